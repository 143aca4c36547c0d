"""The command line, `lightning-moe COMMAND`. The only part that knows Hydra."""

from lightning_moe.cli.command import main

__all__ = ["main"]
