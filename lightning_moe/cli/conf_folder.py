"""Where the YAML files are."""

from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).parents[1]


def find_conf(package: Path = _PACKAGE) -> Path:
    """The folder `conf`: inside the installed package, or beside it in a clone.

    Raises:
        FileNotFoundError: if there is none.
    """
    candidates = (package / "conf", package.parent / "conf")
    for folder in candidates:
        if (folder / "train.yaml").is_file():
            return folder
    places = " and ".join(str(folder) for folder in candidates)
    raise FileNotFoundError(
        f"no folder conf with a train.yaml at {places}; install lightning-moe again"
    )
