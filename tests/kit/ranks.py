"""Run a function on several gloo ranks of this machine: `run_ranks(fn, 2, arg)`."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(
    fn: Callable[..., Any], world: int, *args: object, timeout_s: float = 180.0
) -> list[Any]:
    """Call `fn(rank, world, *args)` on every rank of a gloo group; give the results in rank order.

    `fn` is a module-level function; arguments and results must be picklable.

    Raises:
        RuntimeError: the traceback of the rank that failed first.
        TimeoutError: if a rank is still running after `timeout_s` seconds. All ranks are killed.
    """
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        # A file, not Process(args=...): that would hand tensors over in shared memory.
        (folder / "job").write_bytes(pickle.dumps((fn, world, args)))
        context = multiprocessing.get_context("forkserver")
        ranks = [context.Process(target=_run_rank, args=(folder, rank)) for rank in range(world)]
        for process in ranks:
            process.start()
        try:
            exit_codes = _wait_for_end(ranks, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        _raise_first_failure(folder, exit_codes)
        if None in exit_codes:
            name = getattr(fn, "__qualname__", fn)
            raise TimeoutError(f"{name} on {world} ranks took more than {timeout_s} s")
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world)]


def _run_rank(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    try:
        fn, world, args = pickle.loads((folder / "job").read_bytes())
        # What Lightning leaves in the working directory, also of a rank that is stopped, goes with the folder.
        os.chdir(folder)
        rendezvous = f"file://{folder / 'rendezvous'}"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
        result = pickle.dumps(fn(rank, world, *args))
    except BaseException:
        # Written before this process ends, so it is older than any error the end causes elsewhere.
        report = (time.monotonic(), f"rank {rank} failed:\n{traceback.format_exc()}")
        # Whole or not at all: the parent may end this process at any time.
        (folder / f"writing-{rank}").write_bytes(pickle.dumps(report))
        (folder / f"writing-{rank}").rename(folder / f"failure-{rank}")
        raise SystemExit(1) from None
    (folder / f"result-{rank}").write_bytes(result)
    if dist.is_initialized():  # the job may have left its group
        dist.destroy_process_group()


def _wait_for_end(ranks: list[Any], deadline: float) -> list[int | None]:
    """Wait until all ranks ended, one failed or the deadline passed; give exit codes so far."""
    running = list(ranks)
    while running and time.monotonic() < deadline:
        wait([process.sentinel for process in running], timeout=deadline - time.monotonic())
        if any(process.exitcode for process in running):
            break
        running = [process for process in running if process.exitcode is None]
    return [process.exitcode for process in ranks]


def _raise_first_failure(folder: Path, exit_codes: list[int | None]) -> None:
    """Raise what failed first; the other ranks often only report a lost connection."""
    reports = [pickle.loads(path.read_bytes()) for path in folder.glob("failure-*")]
    if reports:
        raise RuntimeError(min(reports)[1])
    crashed = {rank: code for rank, code in enumerate(exit_codes) if code}
    if crashed:
        raise RuntimeError(f"ranks ended without a traceback; exit code by rank: {crashed}")
