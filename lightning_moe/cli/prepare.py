"""`lightning-moe prepare`: turns text into a token file."""

import argparse
from collections.abc import Sequence

from lightning_moe.cli.errors import show_error


def run(arguments: Sequence[str]) -> int:
    """Prepare with plain flags; returns the exit code."""
    options = _parser().parse_args(list(arguments))
    try:
        _prepare(options)
    except Exception as error:
        show_error(error)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-moe prepare",
        description="Turn text files, one document each, into a token file for `lightning-moe train data.paths=FILE`.",
        epilog="example: lightning-moe prepare 'corpus/**/*.txt' --output tokens.npy --workers 2",
        allow_abbrev=False,
    )
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="text files or globs; none takes the sources of Python's standard library",
    )
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="the token file: .npy or .bin"
    )
    parser.add_argument(
        "--tokenizer",
        default="byte",
        metavar="NAME",
        help="byte (default), or the path of a tokenizer.json",
    )
    parser.add_argument(
        "--eos-token",
        metavar="TEXT",
        help="the token that ends a document; needed with a tokenizer.json",
    )
    parser.add_argument(
        "--special-tokens",
        choices=("text", "ids"),
        default="text",
        help="what the text of a special token within a document becomes: text like any other (default), or its id",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "uint16", "uint32"),
        default="auto",
        help="numbers of the file; auto (default) takes uint16 where the vocabulary fits",
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that encode (default 1)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    return parser


def _prepare(options: argparse.Namespace) -> None:
    # It brings torch along, which `--help` should not wait for.
    from lightning_moe.data import prepare_tokens, progress_bar

    with progress_bar("documents") as progress:
        sidecar = prepare_tokens(
            options.sources,
            options.output,
            tokenizer=options.tokenizer,
            eos_token=options.eos_token,
            special_tokens=options.special_tokens,
            dtype=options.dtype,
            num_workers=options.workers,
            overwrite=options.overwrite,
            progress=progress,
        )
    print(
        f"{options.output}: {sidecar.num_tokens:,} tokens ({sidecar.dtype}, ids below {sidecar.vocab_size}, "
        f"{sidecar.eos_id} ends a document) from {sidecar.num_documents:,} documents, {sidecar.num_bytes:,} bytes"
    )
