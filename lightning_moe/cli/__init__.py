"""The command line: `lightning-moe train | evaluate | prepare | report`. The only part that knows Hydra."""

from lightning_moe.cli.command import main

__all__ = ["main"]
