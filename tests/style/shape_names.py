"""Reads shape annotations: Float[Tensor, "T K"] on `scores` should be named `scores_TK`."""

import ast
import re
from collections.abc import Iterator

# jaxtyping's types: Float, Int64, Bool, UInt8, ... and the catch-alls.
_DTYPE = re.compile(r"^(Float|Int|UInt|Integer|Bool|Inexact|Num|Real|Complex|Key|Shaped)\d*$")
_LEGEND_LINE = re.compile(r"^ +([A-Z])  +\S", re.MULTILINE)


def read_legend(docstring: str) -> set[str]:
    """Give the letters of all lines like `    B  batch`."""
    return set(_LEGEND_LINE.findall(docstring))


def find_shapes(annotation: ast.AST) -> list[str]:
    """Give the shape strings of all jaxtyping annotations inside `annotation`."""
    return [
        node.slice.elts[1].value
        for node in ast.walk(annotation)
        if isinstance(node, ast.Subscript)
        and _DTYPE.match(_base_name(node))
        and isinstance(node.slice, ast.Tuple)
        and isinstance(node.slice.elts[1], ast.Constant)
    ]


def name_letters(shape: str) -> set[str]:
    """Give the axis names inside a shape: "T*K 3" gives T and K; "...", "*rows" and "_" name none."""
    axes = [axis for axis in shape.split() if not axis.startswith("*") and axis != "_"]
    return {name for axis in axes for name in re.findall(r"[A-Za-z_]\w*", axis)}


def find_misnamed(tree: ast.AST) -> Iterator[str]:
    """Describe arguments and class fields whose suffix does not say their annotated shape.

    Shapes with axes that have no letter ("... D", "T*K", "3") and containers of tensors are free.
    """
    for name, annotation, line in _annotated_names(tree):
        plain = _plain_tensor(annotation)
        shapes = find_shapes(plain) if plain is not None else []
        for shape in shapes:
            axes = shape.split()
            if not all(re.fullmatch(r"[A-Z]", axis) for axis in axes):
                continue
            suffix = "".join(axes)
            found = re.search(r"_([A-Z]+)$", name)
            if (found.group(1) if found else "") != suffix:
                wanted = f"the suffix _{suffix}" if suffix else "no suffix"
                yield f"line {line}: {name} has the shape {shape!r} and needs {wanted}"


def _plain_tensor(annotation: ast.AST) -> ast.AST | None:
    """Give the annotation if it is one tensor, perhaps `| None`; None for containers."""
    if isinstance(annotation, ast.BinOp):
        return _plain_tensor(annotation.left) or _plain_tensor(annotation.right)
    is_subscript = isinstance(annotation, ast.Subscript)
    return annotation if is_subscript and _DTYPE.match(_base_name(annotation)) else None


def _base_name(annotation: ast.Subscript) -> str:
    return ast.unparse(annotation.value).split(".")[-1]


def _annotated_names(tree: ast.AST) -> Iterator[tuple[str, ast.AST, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.arg, node.annotation, node.lineno
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id, field.annotation, field.lineno
