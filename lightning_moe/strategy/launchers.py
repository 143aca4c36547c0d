"""Starting the ranks: scripts that know Hydra's jobs, and processes that give whole weights back."""

import atexit
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final

import lightning as L
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput
from typing_extensions import override

from lightning_moe.parallel.apply import gather_experts
from lightning_moe.strategy.stop_signal import say

_RANK_VARIABLES: Final = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HYDRA_FLAGS: Final = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd")
_CHILDREN_WAIT_S: Final = 30.0
_LAST_WORDS_S: Final = 3.0
# `${name:...}` calls a resolver, `${name}` only refers to another value.
_RESOLVER: Final = re.compile(r"\$\{[\w.]+:")


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the user's command once per rank.

    Under Hydra, Lightning repeats the whole command line: in a multirun every child would start a sweep of its own,
    and later jobs would meet the children of the first. Here a child gets the options of this job and its output
    folder, and each job gets children of its own.
    """

    # Children of the last job of this process, and which job that was.
    _job: ClassVar[str | None] = None
    _children: ClassVar[list[subprocess.Popen[bytes]]] = []

    @override
    def launch(
        self,
        function: Callable[..., object],
        *args: Any,
        trainer: L.Trainer | None = None,
        **kwargs: Any,
    ) -> object:
        """Start the children of a new job, then run `function`."""
        self._end_earlier_job()
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def _end_earlier_job(self) -> None:
        job = _hydra_job()
        if job is None or ScriptLauncher._job in (None, job):
            return
        _wait_for(ScriptLauncher._children)
        for child in ScriptLauncher._children:
            child.kill()
            child.wait()
        for name in _RANK_VARIABLES:
            os.environ.pop(name, None)
        ScriptLauncher._job, ScriptLauncher._children = None, []

    @override
    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        # The group of an earlier job: its children are gone, and the new ones will form another.
        if dist.is_initialized():
            dist.destroy_process_group()
        environment = self.cluster_environment
        os.environ.update(
            MASTER_ADDR=environment.main_address, MASTER_PORT=str(environment.main_port)
        )
        world = self.num_processes * self.num_nodes
        if world > 1:  # alone, a later run of this process may still start children
            os.environ.update(
                NODE_RANK=str(environment.node_rank()),
                LOCAL_RANK=str(environment.local_rank()),
                WORLD_SIZE=str(world),
            )
        self.procs = []
        for local_rank in range(1, self.num_processes):
            command, folder = _command(local_rank)
            child = subprocess.Popen(  # noqa: S603 - the user's own command
                command, env={**os.environ, "LOCAL_RANK": str(local_rank)}, cwd=folder
            )
            self.procs.append(child)
        ScriptLauncher._job, ScriptLauncher._children = _hydra_job(), list(self.procs)
        # They run the rest of the script as well; nobody else may be there to collect their exit codes.
        atexit.register(_wait_for, ScriptLauncher._children)

    def release_children(self) -> list[subprocess.Popen[bytes]]:
        """The children, which Lightning's observer watches no more.

        It kills this process and all others as soon as one child has ended with another code than 0. Once this
        process knows that the run is over, that would only cut short its own orderly end.
        """
        children = list(self.procs)
        self.procs.clear()  # the list that the observer holds; an empty one ends it
        return children


class ProcessLauncher(_MultiProcessingLauncher):
    """Spawns or forks ranks; the main process gets back the weights of all experts."""

    @override
    def _collect_rank_zero_results(
        self, trainer: L.Trainer, results: _WorkerOutput | None
    ) -> _WorkerOutput | None:
        mesh = getattr(self._strategy, "mesh", None)
        if mesh is not None:
            gather_experts(trainer.lightning_module, mesh.ep)
        collected = super()._collect_rank_zero_results(trainer, results)
        if mesh is not None:
            mesh.close()  # the process ends now
        return collected


def end_children(children: list[subprocess.Popen[bytes]], *, at_once: bool) -> None:
    """End scripts that this process has started, and say how they ended.

    Unless `at_once`, those that failed first still have a moment to say so; those that wait for this rank would wait
    in vain.
    """
    _wait_for(children, 0.0 if at_once else _LAST_WORDS_S)
    for local_rank, child in enumerate(children, start=1):
        code = child.poll()
        if code is None:
            child.kill()
            child.wait()
            say(f"[local rank {local_rank}] did not end by itself: killed")
        elif code < 0:
            say(f"[local rank {local_rank}] was ended by {signal.Signals(-code).name}")


def _wait_for(children: list[subprocess.Popen[bytes]], seconds: float = _CHILDREN_WAIT_S) -> None:
    deadline = time.monotonic() + seconds
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(deadline - time.monotonic(), 0))


def _hydra_job() -> str | None:
    """The running Hydra job, by its folder."""
    config = _hydra_config()
    return None if config is None else str(config.runtime.output_dir)


def _hydra_config() -> Any:  # noqa: ANN401 - Hydra's own node
    # Only a process that has imported Hydra can be one of its jobs.
    module = sys.modules.get("hydra.core.hydra_config")
    return (
        module.HydraConfig.get()
        if module is not None and module.HydraConfig.initialized()
        else None
    )


def _command(local_rank: int) -> tuple[Sequence[str], str | None]:
    words = _basic_subprocess_cmd()
    config = _hydra_config()
    if config is None:
        return words, None
    program = list(words[: len(words) - len(sys.argv[1:])])
    if program[1] != "-m":
        # The job may have changed its folder since the script was named.
        program[1] = str(Path(config.runtime.cwd) / sys.argv[0])
    options = [
        *config.overrides.task,
        *_drawn_values(),
        "hydra.mode=RUN",
        f"hydra.run.dir={_quoted(config.runtime.output_dir)}",
        "hydra.output_subdir=null",
        f"hydra.job.name={config.job.name}_rank{local_rank}",
    ]
    return [*program, *_before_options(sys.argv[1:]), *options], config.runtime.cwd


def _before_options(arguments: list[str]) -> list[str]:
    """A leading subcommand, and the flags that say where options come from; not the sweep."""
    kept = [arguments[0]] if arguments and arguments[0].isidentifier() else []
    for i, word in enumerate(arguments):
        name, equals, _ = word.partition("=")
        if name in _HYDRA_FLAGS:
            kept += [word] if equals else arguments[i : i + 2]
    return kept


def _drawn_values() -> list[str]:
    """Overrides for what resolvers gave in this process: the time, or a random number, would differ in a child.

    A resolver without `use_cache=True` draws anew at every access, here as well.
    """
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "run_job":
        frame = frame.f_back
    job = frame.f_locals.get("task_cfg")
    if job is None:
        return []
    from omegaconf import OmegaConf  # noqa: PLC0415 - only a job of Hydra gets here, and that has it

    raw = OmegaConf.to_container(job, resolve=False)
    assert isinstance(raw, dict)
    return list(_resolved(job, raw, ""))


def _resolved(node: Mapping[Any, Any], raw: Mapping[Any, Any], path: str) -> Iterator[str]:
    for key, text in raw.items():
        if isinstance(text, dict):
            yield from _resolved(node[key], text, f"{path}{key}.")
        elif isinstance(text, str) and _RESOLVER.search(text):
            with suppress(Exception):  # an error is the job's own, once it asks for the value
                value = node[key]
                if isinstance(value, bool | int | float | str):
                    yield f"++{path}{key}={_quoted(value) if isinstance(value, str) else value}"


def _quoted(value: str) -> str:
    """A string in Hydra's grammar of overrides."""
    # A backslash stands for itself there, except before a quote.
    escaped = re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), value)
    return f'"{escaped}"'
