"""Runs a function as a Hydra job: options composed, one folder per job, errors as one message."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_moe.cli.conf_folder import find_conf
from lightning_moe.cli.errors import show_error
from lightning_moe.cli.groups import list_groups, register_groups

Task = Callable[[DictConfig], float | None]

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it."""


def run_job(command: str, arguments: Sequence[str], task: Task) -> int:
    """Compose `conf/<command>.yaml` with `arguments` and call `task`, once per job of a multirun.

    Args:
        command: of `lightning-moe`.
        arguments: Hydra's overrides and flags.
        task: gets the options; what it returns is what a sweeper minimises.

    Returns:
        The exit code.
    """
    if {"-h", "--help"} & set(arguments):
        print(_help_text(command))
        return 0
    wants_full_errors = os.environ.get("HYDRA_FULL_ERROR") not in (None, "", "0")
    original_argv = sys.argv
    script = original_argv[0]

    def job(config: DictConfig) -> float | None:
        with _fresh_process_state():
            # Lightning starts further ranks with this command: in a multirun they must run this job only.
            sys.argv = [script, command, *_flags(arguments), *HydraConfig.get().overrides.task]
            try:
                result = task(config)
                _leave_ranks()
                return result
            except Exception as error:
                show_error(error, full=wants_full_errors)
                # Past Hydra, which would print it again.
                raise SystemExit(1) from None

    try:
        with _fresh_process_state():
            # Makes Hydra raise its own errors instead of printing them.
            os.environ["HYDRA_FULL_ERROR"] = "1"
            # Hydra takes flags before or after all overrides, not between them.
            words = sorted(arguments, key=lambda word: word not in ("-m", "--multirun"))
            sys.argv = [f"lightning-moe {command}", *words]
            register_groups(command)
            hydra.main(version_base="1.3", config_path=str(find_conf()), config_name=command)(job)()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        show_error(error, full=wants_full_errors)
        return 1
    finally:
        sys.argv = original_argv
    return 0


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
