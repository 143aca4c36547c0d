"""Turns text into a token file, in parallel; the file has its name only once it is complete."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from multiprocessing import get_all_start_methods, get_context
from pathlib import Path
from typing import BinaryIO, Final, Literal, get_args

import numpy as np

from lightning_moe.config.data import TOKEN_SUFFIXES
from lightning_moe.data.corpus import Document, embedded_documents, text_documents
from lightning_moe.data.sidecar import Sidecar, sidecar_path
from lightning_moe.data.tokenizers import SpecialTokens, Tokenizer, load_tokenizer
from lightning_moe.data.tokens import IdArray
from lightning_moe.files import atomic_write

Progress = Callable[[int, int], None]

_CHUNK_BYTES: Final = 1 << 20
_CHUNKS_IN_FLIGHT_PER_WORKER: Final = 4
_NPY_HEADER_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class _Job:
    """Documents to encode in one go, and how."""

    documents: list[Document]
    tokenizer: tuple[str, str | None, SpecialTokens]
    dtype: str


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The ids of a job."""

    ids: IdArray
    num_documents: int
    num_bytes: int


def prepare_tokens(  # noqa: PLR0913 - the options of a command
    sources: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    tokenizer: str = "byte",
    eos_token: str | None = None,
    special_tokens: SpecialTokens = "text",
    dtype: Literal["auto", "uint16", "uint32"] = "auto",
    num_workers: int = 1,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Sidecar:
    """Write the tokens of text files to one token file, with a sidecar `<output>.json`.

    The file is the same for any `num_workers`. It is written under another name in the same folder
    and renamed when it is complete.

    Args:
        sources: one or several text files or globs, one document per file; an empty sequence takes
            the embedded corpus.
        output: a `.bin` or `.npy` file.
        tokenizer: `byte`, or the path of a Hugging Face `tokenizer.json`.
        eos_token: the text of the token that ends a document; needed with a `tokenizer.json`.
        special_tokens: what the text of a special token within a document becomes: `text` like
            any other, so that EOS stands at ends of documents only, or `ids` of special tokens.
        dtype: numbers of the file; `auto` takes uint16 where the vocabulary fits.
        num_workers: processes that encode; 1 encodes in this one.
        overwrite: whether an existing file may be replaced.
        progress: called with the documents done and their total after each piece of work.

    Returns:
        What the sidecar says.

    Raises:
        FileExistsError: if there is such a file already.
        FileNotFoundError: if a source does not exist.
        ImportError: if a `tokenizer.json` needs the package `tokenizers`.
        ValueError: if an option is wrong, or sources hold no text.
    """
    output = Path(output)
    _check_output(output, overwrite=overwrite)
    if num_workers < 1:
        raise ValueError(f"num_workers={num_workers} must be at least 1")
    if special_tokens not in get_args(SpecialTokens):
        raise ValueError(f"special_tokens={special_tokens!r} must be text or ids")
    options = (tokenizer, eos_token, special_tokens)
    loaded = load_tokenizer(*options)
    dtype_name = _choose_dtype(dtype, loaded.vocab_size)
    documents = _documents(sources)
    if overwrite:
        _check_inputs_stay(output, [Path(tokenizer), *(d.path for d in documents if d.path)])
    jobs = (_Job(chunk, options, dtype_name) for chunk in _chunks(documents))
    with atomic_write(output) as file:
        if output.suffix == ".npy":
            file.write(bytes(_NPY_HEADER_BYTES))
        results = _run(jobs, loaded, num_workers)
        if progress is not None:
            results = _reported(results, len(documents), progress)
        totals = _write(file, results, loaded.eos_id)
        if output.suffix == ".npy":
            _write_npy_header(file, totals.num_tokens, dtype_name)
        sidecar = Sidecar(
            dtype=dtype_name,
            vocab_size=loaded.vocab_size,
            eos_id=loaded.eos_id,
            num_tokens=totals.num_tokens,
            num_documents=totals.num_ends,
            num_bytes=totals.num_bytes,
            tokenizer=loaded.name,
            max_token_id=totals.max_token_id,
        )
        # First the sidecar: a token file without one could be read with the wrong numbers.
        with atomic_write(sidecar_path(output)) as sidecar_file:
            sidecar_file.write(sidecar.to_json().encode())
    return sidecar


@contextmanager
def progress_bar(description: str = "tokens") -> Iterator[Progress]:
    """A bar in the terminal, as a `progress` callback; shown from its first call on."""
    from rich.progress import Progress as Bar  # noqa: PLC0415 - only where a bar is shown

    bar = Bar()
    task = bar.add_task(description)

    def update(num_done: int, num_documents: int) -> None:
        bar.start()
        bar.update(task, completed=num_done, total=num_documents)

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()


def _documents(sources: str | Path | Sequence[str | Path]) -> list[Document]:
    patterns = [sources] if isinstance(sources, str | Path) else sources
    if not patterns:
        return embedded_documents()
    return text_documents([str(pattern) for pattern in patterns], option="sources")[0]


def _check_output(output: Path, *, overwrite: bool) -> None:
    if output.suffix not in TOKEN_SUFFIXES:
        raise ValueError(f"output={str(output)!r} must end in {' or '.join(TOKEN_SUFFIXES)}")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"output={str(output)!r}: there is no folder {output.parent}")
    for path in (output, sidecar_path(output)):
        if path.exists() and not path.is_file():
            raise FileExistsError(f"{path} exists and is no file; choose another output")
        if path.exists() and not overwrite:
            raise FileExistsError(
                f"{path} exists; pass overwrite=True (on the command line --overwrite) or choose another output"
            )


def _check_inputs_stay(output: Path, inputs: Sequence[Path]) -> None:
    written = {output.resolve(), sidecar_path(output).resolve()}
    for path in inputs:
        if path.resolve() in written:
            raise ValueError(
                f"output={str(output)!r} would replace {path}, which is read; choose another output"
            )


def _choose_dtype(dtype: str, vocab_size: int) -> str:
    needed = "uint16" if vocab_size <= np.iinfo(np.uint16).max + 1 else "uint32"
    if dtype == "auto":
        return needed
    if dtype not in ("uint16", "uint32"):
        raise ValueError(f"dtype={dtype!r} must be one of auto, uint16, uint32")
    if dtype == "uint16" and needed == "uint32":
        raise ValueError(
            f"dtype=uint16 can't hold id {vocab_size - 1} of the tokenizer; "
            f"choose dtype=auto or uint32"
        )
    return dtype


def _chunks(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """Documents in their order, in groups of about a megabyte."""
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += document.num_bytes()
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _run(jobs: Iterator[_Job], tokenizer: Tokenizer, num_workers: int) -> Iterator[_Encoded]:
    """Results in the order of the jobs; only a few jobs are ahead of the reader."""
    if num_workers == 1:
        for job in jobs:
            yield _encode(job, tokenizer)
        return
    # A forked copy of a process in which threads run can hang, so no plain fork.
    method = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"
    with ProcessPoolExecutor(num_workers, mp_context=get_context(method)) as pool:
        ahead: deque[Future[_Encoded]] = deque()
        try:
            for job in jobs:
                ahead.append(pool.submit(_encode_in_worker, job))
                if len(ahead) >= num_workers * _CHUNKS_IN_FLIGHT_PER_WORKER:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


def _encode_in_worker(job: _Job) -> _Encoded:
    return _encode(job, _load_once(*job.tokenizer))


# A worker gets many jobs; the process that calls reads the file anew each time, as it may change.
_load_once = lru_cache(maxsize=1)(load_tokenizer)


def _encode(job: _Job, tokenizer: Tokenizer) -> _Encoded:
    eos = np.array([tokenizer.eos_id], dtype=np.uint32)
    runs: list[IdArray] = []
    num_bytes = 0
    for document in job.documents:
        text = document.read()
        num_bytes += len(text)
        try:
            runs += [tokenizer.encode(text), eos]
        except ValueError as error:
            raise ValueError(f"document {document.name!r}: {error}") from error
    ids = np.concatenate(runs)
    if ids.max() >= tokenizer.vocab_size:
        raise ValueError(f"the tokenizer gave id {ids.max()}, which its vocabulary doesn't have")
    return _Encoded(ids.astype(job.dtype), len(job.documents), num_bytes)


@dataclass(slots=True)
class _Totals:
    num_tokens: int = 0
    num_ends: int = 0
    num_bytes: int = 0
    max_token_id: int = 0


def _write(file: BinaryIO, results: Iterator[_Encoded], eos_id: int) -> _Totals:
    totals = _Totals()
    for result in results:
        file.write(result.ids.tobytes())
        totals.num_tokens += len(result.ids)
        totals.num_ends += int(np.count_nonzero(result.ids == eos_id))
        totals.num_bytes += result.num_bytes
        totals.max_token_id = max(totals.max_token_id, int(result.ids.max()))
    return totals


def _reported(
    results: Iterator[_Encoded], num_documents: int, progress: Progress
) -> Iterator[_Encoded]:
    """The results, each reported when the next one is asked for."""
    num_done = 0
    for result in results:
        yield result
        num_done += result.num_documents
        progress(num_done, num_documents)


def _write_npy_header(file: BinaryIO, num_tokens: int, dtype: str) -> None:
    """Write the header into the space reserved at the start of the file."""
    header = BytesIO()
    np.lib.format.write_array_header_1_0(
        header,
        {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (num_tokens,)},
    )
    # numpy pads a header for one dimension of up to 21 digits to this size.
    assert header.tell() == _NPY_HEADER_BYTES
    file.seek(0)
    file.write(header.getvalue())
