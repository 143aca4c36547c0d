"""`lightning-moe options`: every option with its default and what it does, and completion for shells."""

import argparse
import difflib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from inspect import getdoc
from pathlib import Path
from textwrap import indent
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from lightning_moe.cli.command import COMMANDS, USAGE_ERROR
from lightning_moe.cli.groups import find_conf, group_options
from lightning_moe.config import OptimConfig, TransformerConfig, to_mapping
from lightning_moe.config.data import DataConfig

# The file of each group whose keys are listed; `callbacks` and `logger` list all of theirs.
_SHOWN: Final = {"trainer": "cpu", "strategy": "expert_parallel"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option.

    Attributes:
        name: in full.
        default: as it is written on the command line.
        kind: its type or its choices; empty where only its default tells.
        doc: what it does.
    """

    name: str
    default: str
    kind: str
    doc: str

    def __str__(self) -> str:
        kind = f"  ({self.kind})" if self.kind else ""
        return f"{self.name}={self.default}{kind}\n{indent(self.doc, '    ')}".rstrip()


def run(arguments: Sequence[str]) -> int:
    """List them; returns the exit code."""
    given = _parser().parse_args(list(arguments))
    options = list(all_options(find_conf()))
    if given.completion:
        print(completion(given.completion, options, find_conf()))
        return 0
    prefix = given.section
    found = [o for o in options if not prefix or f"{o.name}.".startswith(f"{prefix}.")]
    if not found:
        print(_unknown(prefix, [option.name for option in options]), file=sys.stderr)
        return USAGE_ERROR
    print("\n".join(map(str, found)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-moe options",
        description="List the options of `lightning-moe train`, or those of a section, with their defaults.",
        epilog="examples: lightning-moe options model.moe.router; "
        'eval "$(lightning-moe options --completion bash)" in ~/.bashrc completes commands and options',
        allow_abbrev=False,
    )
    parser.add_argument(
        "section", nargs="?", metavar="SECTION", help="such as optim, or model.moe.router.top_k"
    )
    parser.add_argument(
        "--completion", choices=("bash", "zsh"), help="print a script that completes words instead"
    )
    return parser


def _unknown(section: str, names: Sequence[str]) -> str:
    sections = {name.rpartition(".")[0] for name in names} | set(names)
    close = difflib.get_close_matches(section, sorted(sections), n=1)
    hint = f"did you mean {close[0]}?" if close else "leave it out to list all"
    return f"lightning-moe options: there is no option {section}; {hint}"


def all_options(conf: Path) -> Iterator[Option]:
    """Every option of `train`: those of the dataclasses, then those of the files in `conf`."""
    tiny = to_mapping(TransformerConfig.preset("tiny"))
    yield from _of_class("model", TransformerConfig, tiny)
    yield from _of_class("optim", OptimConfig, to_mapping(OptimConfig()))
    yield from _of_class("data", DataConfig, to_mapping(DataConfig()))
    for group, chosen in _SHOWN.items():
        yield from _of_file(conf / group / f"{chosen}.yaml", group)
    for group in ("callbacks", "logger"):
        for path in sorted((conf / group).glob("*.yaml")):
            yield from _of_file(path, group)
    yield from _of_file(conf / "train.yaml", "")


# ---- from the dataclasses ------------------------------------------------------------------------------------


def _of_class(prefix: str, kind: type, defaults: Mapping[Any, object]) -> Iterator[Option]:
    hints, docs = get_type_hints(kind), attribute_docs(kind)
    for field in fields(kind):
        name, hint = f"{prefix}.{field.name}", hints[field.name]
        default = defaults.get(field.name)
        # A section may be optional.
        parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        section = next((part for part in parts if is_dataclass(part)), None)
        if not isinstance(default, Mapping) or section is None:
            yield Option(
                name=name,
                default=_written(default),
                kind=_kind(hint),
                doc=docs.get(field.name, ""),
            )
        if isinstance(section, type):
            nested = default if isinstance(default, Mapping) else {}
            yield from _of_class(name, section, nested or _own_defaults(section))


def _own_defaults(kind: type) -> dict[str, object]:
    """Of a section that is not set by default; its fields without a default have none to show."""
    known = fields(kind)
    return {field.name: field.default for field in known if _is_plain(field.default)}


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def attribute_docs(kind: type) -> dict[str, str]:
    """The entries of `Attributes:` in the docstring of a class, by name."""
    _, found, block = (getdoc(kind) or "").partition("Attributes:\n")
    docs: dict[str, list[str]] = {}
    names: list[str] = []
    for line in block.splitlines() if found else ():
        if line and not line.startswith(" "):
            break
        head, is_entry, text = line.strip().partition(": ")
        if is_entry and line.startswith("    ") and not line.startswith("     "):
            names, line_text = head.split(", "), text
        else:
            line_text = line.strip()
        for name in names:
            docs.setdefault(name, []).append(line_text)
    return {name: "\n".join(lines).strip() for name, lines in docs.items()}


def _kind(hint: object) -> str:
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return " | ".join(_kind(part) for part in get_args(hint))
    if hint is type(None):
        return "null"
    if get_origin(hint) is tuple:
        parts = [_kind(part) for part in get_args(hint) if part is not Ellipsis]
        return f"list of {parts[0]}" if parts else "list"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else "mapping"


def _written(value: object) -> str:
    """A value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_written, value))}]"
    return "{}" if value == {} else str(value)


# ---- from the files of `conf` --------------------------------------------------------------------------------


def _of_file(path: Path, prefix: str) -> Iterator[Option]:
    """The keys of a YAML file; the comment above a key says what it does."""
    sections: list[str] = [prefix] if prefix else []
    base, comment = len(sections), list[str]()
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        depth = base + (len(line) - len(line.lstrip())) // 2
        key, is_pair, value = text.partition(":")
        if text.startswith("#"):
            comment.append(text.lstrip("# "))
            continue
        if is_pair and not text.startswith("-"):
            sections = [*sections[:depth], key]
            named = ".".join(sections)
            if value.strip() and key != "_target_" and not _is_hydras(sections):
                default = _written(yaml.safe_load(value.strip()))
                yield Option(name=named, default=default, kind="", doc="\n".join(comment))
        comment = []


def _is_hydras(sections: Sequence[str]) -> bool:
    """Hydra's own settings, but for the folder of the run."""
    return sections[0] in ("hydra", "defaults") and sections != ["hydra", "run", "dir"]


# ---- completion ----------------------------------------------------------------------------------------------

_BASH: Final = """\
_lightning_moe() {
  local line="${COMP_LINE:0:$COMP_POINT}" words="@COMMANDS@"
  local word="${line##* }"
  [ "$COMP_CWORD" -gt 1 ] && words="@OPTIONS@"
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  # The shell has cut the word at its "=".
  case "$word" in *=*) COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}") ;; esac
}
complete -o nospace -o default -F _lightning_moe lightning-moe"""


def completion(shell: str, options: Sequence[Option], conf: Path) -> str:
    """A script for bash or zsh that completes commands, options and the choices of groups."""
    groups = [f"{group}={name}" for group, names in group_options("train", conf) for name in names]
    words = [*groups, *dict.fromkeys(f"{option.name}=" for option in options)]
    script = _BASH.replace("@COMMANDS@", " ".join(command.name for command in COMMANDS))
    script = script.replace("@OPTIONS@", " ".join(words))
    return script if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{script}"
