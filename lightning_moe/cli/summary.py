"""Prints the end of a run: paths, and the loss of the model beside baselines that count bytes."""

import math
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.table import Table

from lightning_moe.data import (
    ByteTokenizer,
    TokenDataModule,
    bigram_bits_per_byte,
    unigram_bits_per_byte,
)
from lightning_moe.data.corpus import find_files
from lightning_moe.data.sidecar import read_sidecar


def print_facts(facts: dict[str, str]) -> None:
    """Names and values, one a line; paths are never broken, so that they can be copied."""
    console = Console(soft_wrap=True, highlight=False)
    width = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"[bold]{name:<{width}}[/bold]  ", end="")
        console.print(value, markup=False)


@rank_zero_only
def announce_compiling(backend: str) -> None:
    """Say why nothing seems to happen at first (`model.compile`)."""
    if backend != "none":
        print(
            f"model.compile={backend}: the first micro-batch compiles, which can take a minute or two"
        )


def print_scores(
    data: TokenDataModule, cross_entropy: float | None, limit_batches: int | float
) -> None:
    """Print the model's validation loss beside those of two byte models.

    Args:
        data: what was validated on.
        cross_entropy: mean over the validation tokens, in nats; None if there was no validation.
        limit_batches: the Trainer's `limit_val_batches`: an integer counts batches, a float is a share. Named if it
            may have left tokens out.
    """
    bytes_per_token = data.val_bytes_per_token
    table = Table(title=f"validation on {data.num_val_tokens:,} tokens", title_justify="left")
    table.add_column("")
    table.add_column("bits per byte", justify="right")
    table.add_column("nats per token", justify="right")
    if cross_entropy is None:
        table.add_row("model", "-", "no validation")
    elif bytes_per_token:
        table.add_row(
            "model", f"{cross_entropy / math.log(2) / bytes_per_token:.4f}", f"{cross_entropy:.4f}"
        )
    else:
        table.add_row("model", "unknown", f"{cross_entropy:.4f}")
    if bytes_per_token and _are_bytes(data):
        for name, score in (
            ("bigram counts", bigram_bits_per_byte(data.train_tokens, data.val_tokens)),
            ("unigram counts", unigram_bits_per_byte(data.train_tokens, data.val_tokens)),
        ):
            table.add_row(name, f"{score:.4f}", f"{score * math.log(2) * bytes_per_token:.4f}")
    else:
        table.caption = "no byte baselines: the tokens are not known to be bytes"
    # 1 is one batch, 1.0 is all of them.
    if cross_entropy is not None and (isinstance(limit_batches, int) or limit_batches != 1):
        table.caption = f"the model saw a part only: trainer.limit_val_batches={limit_batches}"
    Console().print(table)


def _are_bytes(data: TokenDataModule) -> bool:
    if not data.config.reads_token_files:
        return True
    files = find_files(data.config.paths + data.config.val_paths)
    sidecars = [read_sidecar(Path(path)) for _, path in files]
    return all(
        sidecar is not None and sidecar.tokenizer == ByteTokenizer.name for sidecar in sidecars
    )
