"""Runs a command as a Hydra job: options composed and checked, one folder per job, errors as one message."""

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lightning_moe.cli import runs
from lightning_moe.cli.errors import describe, show_error
from lightning_moe.cli.groups import find_conf, list_groups, register_groups
from lightning_moe.cli.process import INTERRUPTED, is_further_rank, wait_without_spinning
from lightning_moe.cli.run_config import RunConfig, check_options


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failure:
    """A job of a sweep that ended with an error."""

    number: int
    words: list[str]
    message: str


class _JobError(Exception):
    """Ends one job of a sweep; its error has been shown."""


class _Jobs:
    """The jobs of one call: a single one, or those of a sweep.

    Args:
        command: of `lightning-moe`.
        arguments: Hydra's overrides and flags.
    """

    def __init__(self, command: str, arguments: Sequence[str]) -> None:
        self.command = command
        self.flags = _flags(arguments)
        self.script = sys.argv[0]
        self.wants_full_errors = os.environ.get("HYDRA_FULL_ERROR") not in (None, "", "0")
        self.started: list[list[str]] = []
        self.failures: list[_Failure] = []

    def run(self, config: DictConfig) -> float | None:
        """Run one job; what it returns is what a sweeper minimises."""
        own = HydraConfig.get()
        words = list(own.overrides.task)
        self.started.append(words)
        with _fresh_process_state():
            # Lightning starts further ranks with this command: in a multirun they must run this job only.
            sys.argv = [self.script, self.command, *self.flags, *words]
            try:
                result = self._run(config, words)
                _leave_ranks()
                return result
            except Exception as error:
                self.show(error)
                if own.mode != RunMode.MULTIRUN:
                    # Past Hydra, which would print it again.
                    raise SystemExit(1) from None
                failure = _Failure(number=own.job.num, words=words, message=describe(error))
                self.failures.append(failure)
                raise _JobError from None

    def _run(self, config: DictConfig, words: list[str]) -> float | None:
        """Check the options, then run `cli.<command>`, which imports torch and Lightning: that takes seconds."""
        options = check_options(self.command, config, words)
        wait_without_spinning()
        module = import_module(f"lightning_moe.cli.{self.command}")
        task: Callable[[DictConfig, RunConfig | None], float | None] = module.run
        return task(config, options)

    def show(self, error: Exception) -> None:
        """Print an error as its user should see it."""
        show_error(error, full=self.wants_full_errors)

    def show_failures(self) -> None:
        """Print the summary of a sweep some of whose jobs failed."""
        _tell(f"{len(self.failures)} of {len(self.started)} jobs failed:")
        shared = set.intersection(*map(set, self.started)) if len(self.started) > 1 else set()
        for failure in self.failures:
            own = " ".join(word for word in failure.words if word not in shared)
            _tell(f"  job {failure.number} ({own}): {failure.message}")


def run_job(command: str, arguments: Sequence[str]) -> int:
    """Compose `conf/<command>.yaml` with `arguments` and run `cli.<command>`, once per job of a multirun.

    Args:
        command: of `lightning-moe`.
        arguments: Hydra's overrides and flags.

    Returns:
        The exit code.
    """
    if {"-h", "--help"} & set(arguments):
        print(_help_text(command))
        return 0
    jobs, original_argv = _Jobs(command, arguments), sys.argv
    code = 0
    try:
        with _fresh_process_state(), _words(command, arguments) as words:
            # Makes Hydra raise its own errors instead of printing them.
            os.environ["HYDRA_FULL_ERROR"] = "1"
            sys.argv = [f"lightning-moe {command}", *words]
            register_groups(command)
            compose = hydra.main(
                version_base="1.3", config_path=str(find_conf()), config_name=command
            )
            compose(jobs.run)()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
        # Lightning ends the process with code 1 after Ctrl-C.
        if isinstance(stop.__context__, KeyboardInterrupt):
            code = INTERRUPTED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except _JobError:
        jobs.show_failures()
        code = 1
    except Exception as error:
        jobs.show(error)
        code = 1
    finally:
        sys.argv = original_argv
    return code


@contextmanager
def _words(command: str, arguments: Sequence[str]) -> Iterator[list[str]]:
    """The words that Hydra gets: flags first, paths that it can read, and the options of a run that is resumed."""
    # Hydra takes flags before or after all overrides, not between them.
    words = sorted(arguments, key=lambda word: word not in ("-m", "--multirun"))
    # The only group that is null by default, and that Hydra can neither set to null nor take away.
    words = [runs.readable(word) for word in words if word != "experiment=null"]
    words = runs.with_checkpoint(words)
    checkpoint = runs.value_of(words, "ckpt_path") if command == "train" else None
    if checkpoint is not None and not is_further_rank():
        saved = runs.saved_words(checkpoint)
        _tell_resumed(checkpoint, words, saved)
        words = runs.resumed_words(words, saved)
    if not runs.is_dry(words) or is_further_rank():
        yield words
        return
    with tempfile.TemporaryDirectory(prefix="lightning-moe-dry-run-") as folder:
        _tell("trainer.fast_dev_run: a dry run in a temporary folder, nothing of it is kept")
        kept = [w for w in words if runs.key_of(w) not in ("hydra.run.dir", "hydra.sweep.dir")]
        place = runs.quoted(f"{folder}/run")
        yield [*kept, f"hydra.run.dir={place}", f"hydra.sweep.dir={place}"]


def _tell_resumed(checkpoint: str, words: Sequence[str], saved: Sequence[str]) -> None:
    if saved:
        _tell(f"ckpt_path={checkpoint} goes on with the options of its run: {' '.join(saved)}")
    for change in runs.changed_words(words, saved):
        _tell(f"given differently: {change}")


def _tell_failures(failures: Sequence[_Failure], num_jobs: int) -> None:
    """The summary of a sweep some of whose jobs failed."""
    _tell(f"{len(failures)} of {num_jobs} jobs failed:")
    for failure in failures:
        _tell(f"  job {failure.number} ({' '.join(failure.words)}): {failure.message}")


def _tell(message: str) -> None:
    """Standard output may be YAML (`--cfg job`)."""
    print(message, file=sys.stderr)


def _leave_ranks() -> None:
    """Leave the process group that Lightning's ddp keeps until the process ends: the next job has other ranks."""
    if "torch" not in sys.modules or threading.current_thread() is not threading.main_thread():
        return
    # Imported already if there is a group.
    from lightning.fabric.utilities.distributed import (
        _destroy_dist_connection,
    )

    on_interrupt = signal.getsignal(signal.SIGINT)
    _destroy_dist_connection()
    # Lightning leaves Ctrl-C at the system's default, which ends the process without cleaning up.
    signal.signal(signal.SIGINT, on_interrupt)


def _help_text(command: str) -> str:
    """The template of `hydra.help`, filled in here: Hydra copies every preset for every option, for 4 seconds."""
    conf = find_conf()
    template: str = OmegaConf.load(conf / "hydra" / "help" / f"{command}.yaml").template
    return template.replace("$APP_CONFIG_GROUPS", list_groups(command, conf))


@contextmanager
def _fresh_process_state() -> Iterator[None]:
    """Seeds, ranks and ports that a job leaves in the environment are not the next job's."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _flags(arguments: Sequence[str]) -> list[str]:
    """The flags that say where options come from; the others are not for a further rank."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in (("--config-dir", "-cd"), ("--config-name", "-cn"), ("--config-path", "-cp")):
        parser.add_argument(*names)
    known, _ = parser.parse_known_args(list(arguments))
    pairs = [
        (f"--{name.replace('_', '-')}", value)
        for name, value in vars(known).items()
        if value is not None
    ]
    return [word for pair in pairs for word in pair]
