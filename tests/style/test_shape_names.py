"""A tensor's name ends in its shape, and every letter stands in the one legend."""

import ast

import pytest

from tests.style.shape_names import find_misnamed, find_shapes, name_letters, read_legend
from tests.style.source import PACKAGE, parse_package, walk_package


def _legend() -> set[str]:
    tree = ast.parse((PACKAGE / "ops" / "__init__.py").read_text())
    return read_legend(ast.get_docstring(tree, clean=False) or "")


def test_the_legend_of_ops_is_readable() -> None:
    assert {"B", "S", "T", "D", "E", "K"} <= _legend()


def test_every_suffix_agrees_with_its_annotation() -> None:
    wrong = [
        f"{path}, {text}" for path, tree in parse_package().items() for text in find_misnamed(tree)
    ]
    assert wrong == []


def test_every_axis_is_in_the_legend() -> None:
    legend = _legend()
    unknown = {
        f"{path}:{node.lineno}: {shape!r}"
        for path, node in walk_package()
        if isinstance(node, ast.Subscript)
        for shape in find_shapes(node)
        if not name_letters(shape) <= legend
    }
    assert unknown == set()


@pytest.mark.parametrize(
    ("code", "num_wrong"),
    [
        ('def f(x_TK: Float[Tensor, "T K"]): ...', 0),
        ('def f(x_KT: Float[Tensor, "T K"]): ...', 1),
        ('def f(x: Int[Tensor, " E"]): ...', 1),
        ('def f(loss: Float[Tensor, ""]): ...', 0),
        ('def f(loss_T: Float[Tensor, ""]): ...', 1),
        ('def f(*, mask: Bool[Tensor, "B S"] | None = None): ...', 1),
        ('def f(x: Float[Tensor, "... D"], xs: list[Float[Tensor, "T D"]]): ...', 0),
        ('class C:\n    ids_K: Int[Tensor, "T K"]', 1),
        ("def f(ids_T: int): ...", 0),
    ],
)
def test_a_misnamed_tensor_is_found(code: str, num_wrong: int) -> None:
    assert len(list(find_misnamed(ast.parse(code)))) == num_wrong


def test_the_legend_holds_only_lines_of_one_letter_and_a_meaning() -> None:
    assert read_legend("Shapes:\n\n    B  batch\n    N  copies, T*K\n    Note  no\n") == {"B", "N"}


@pytest.mark.parametrize(
    ("shape", "letters"), [("T*K 3", {"T", "K"}), ("*rows D", {"D"}), ("... one", {"one"})]
)
def test_axis_names_are_read_without_variadic_ones(shape: str, letters: set[str]) -> None:
    assert name_letters(shape) == letters
