"""From the words after `lightning-moe` to the function of a command."""

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final

USAGE_ERROR: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command.

    Attributes:
        name: its word.
        summary: what it does, in one line.
        example: a call that works.
        is_job: whether Hydra runs it; else `cli.<name>` has a function `run(arguments) -> exit code`.
    """

    name: str
    summary: str
    example: str
    is_job: bool = False

    def run(self, arguments: Sequence[str]) -> int:
        """Do it; returns the exit code."""
        # Imported only now: `--help` must not wait for Hydra, nor for torch.
        if self.is_job:
            from lightning_moe.cli.hydra_job import run_job

            return run_job(self.name, arguments)
        module = import_module(f"lightning_moe.cli.{self.name.replace('-', '_')}")
        function: Callable[[Sequence[str]], int] = module.run
        return function(arguments)


COMMANDS: Final = (
    Command(
        name="train",
        is_job=True,
        summary="train a model (Hydra options)",
        example="lightning-moe train experiment=tiny_cpu trainer.max_steps=100",
    ),
    Command(
        name="evaluate",
        is_job=True,
        summary="validation loss of a checkpoint beside simple baselines (Hydra options)",
        example="lightning-moe evaluate ckpt_path=RUN/checkpoints/last.ckpt",
    ),
    Command(
        name="prepare",
        summary="turn text into a token file",
        example="lightning-moe prepare 'corpus/**/*.txt' --output tokens.npy",
    ),
    Command(
        name="report",
        summary="write an HTML page about a run, or about several side by side",
        example="lightning-moe report RUN",
    ),
    Command(
        name="routes-diff",
        summary="show where the routes of two runs first differ, and why",
        example="lightning-moe routes-diff RUN_A RUN_B",
    ),
    Command(
        name="options",
        summary="list the options of train with their defaults and what they do",
        example="lightning-moe options model.moe.router",
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 after an error, 2 after a wrong call."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if not words:
        print(help_text(), file=sys.stderr)
        return USAGE_ERROR
    if words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if words[0] == "--version":
        from lightning_moe import __version__

        print(f"lightning-moe {__version__}")
        return 0
    commands = {command.name: command for command in COMMANDS}
    if words[0] not in commands:
        print(_unknown(words[0], list(commands)), file=sys.stderr)
        return USAGE_ERROR
    return commands[words[0]].run(words[1:])


def help_text() -> str:
    """All commands, an example for each."""
    lines = ["usage: lightning-moe COMMAND [options]", "", "commands:"]
    for command in COMMANDS:
        lines += [f"  {command.name:<13}{command.summary}", f"  {'':<13}  {command.example}"]
    lines += [
        "",
        "lightning-moe COMMAND --help lists the options of a command; --version the version.",
    ]
    return "\n".join(lines)


def _unknown(word: str, names: list[str]) -> str:
    close = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(names)}"
    return f"lightning-moe: there is no command {word!r}; {hint} (lightning-moe --help)"
