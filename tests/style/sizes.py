"""Lines of code by floor of the package: `python -m tests.style.sizes`, the end of `make check`."""

import tomllib
from collections import Counter
from pathlib import Path

from tests.style.source import ROOT

LONG_FILE = 350


def count_lines(folder: str) -> dict[Path, int]:
    """Lines of every Python file below `folder`, by its path below the repository."""
    return {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def long_files(sizes: dict[Path, int]) -> dict[str, int]:
    """Files that should be looked at: are they still one idea?"""
    return {str(path): size for path, size in sizes.items() if size > LONG_FILE}


def floors() -> list[str]:
    """The floors of the package from the lowest to the highest, as the order of imports has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    return [name for line in reversed(layers) for name in line.split(" | ")]


def table(package: dict[Path, int], tests: dict[Path, int]) -> str:
    """Lines by floor, then of the package, of the tests, and of both."""
    by_floor = Counter[str]()
    for path, size in package.items():
        by_floor[path.with_suffix("").parts[1]] += size
    order = [*floors(), "__init__"]
    assert set(by_floor) <= set(order), "a floor without a place in the order of imports"
    rows = [(name, by_floor[name]) for name in order]
    total, total_of_tests = sum(package.values()), sum(tests.values())
    rows += [("package", total), ("tests", total_of_tests), ("both", total + total_of_tests)]
    return "\n".join(f"{name:<12}{size:>7,}" for name, size in rows)


def main() -> None:
    """Print the table and the long files."""
    package, tests = count_lines("lightning_moe"), count_lines("tests")
    print(table(package, tests))
    for path, size in long_files(package).items():
        print(f"warning: {path} has {size} lines, more than {LONG_FILE}; is it still one idea?")


if __name__ == "__main__":
    main()
