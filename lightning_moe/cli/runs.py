"""The folder of a run, which no other run writes to, and the options with which a resumed run goes on."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lightning_moe.cli.errors import show_error
from lightning_moe.cli.process import is_further_rank
from lightning_moe.files import atomic_write

OPTIONS_FILE: Final = "config.yaml"
OVERRIDES_FILE: Final = "overrides.yaml"

# Any of these says that a run has begun in a folder.
_RESULTS: Final = (OPTIONS_FILE, "metrics.csv", "checkpoints", "sigterm.ckpt", "multirun.yaml")
# Groups that a run can do without.
_GROUPS: Final = ("callbacks", "logger", "strategy")
# Checkpoints at which a run can be resumed, by their places in its folder.
_RESUMABLE: Final = ("checkpoints/last.ckpt", "sigterm.ckpt")


class RunFolder(Callback):
    """Hydra's callback that settles the folder before anything is written to it.

    A folder that the user names is refused if it holds results, unless the run goes on from a checkpoint in it. A
    folder that is named after the time gets a number if another run has taken it in the same second.
    """

    def on_run_start(self, config: DictConfig, **names: object) -> None:
        """Settle `hydra.run.dir`."""
        resumed = config.get("ckpt_path") if names.get("config_name") == "train" else None
        self._settle(config, "run", resumed)

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        """Settle `hydra.sweep.dir`."""
        self._settle(config, "sweep", None)

    def _settle(self, config: DictConfig, kind: str, resumed: str | None) -> None:
        if is_further_rank():
            return
        folder, key = Path(config.hydra[kind].dir), f"hydra.{kind}.dir"
        hydra_words = config.hydra.overrides.hydra
        if any(key_of(word) == key for word in hydra_words):
            try:
                check_free(folder, key, resumed)
            except ValueError as error:
                show_error(error, has_log=False)
                # Hydra turns other exceptions of callbacks into warnings.
                raise SystemExit(1) from None
            return
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra[kind].dir = str(new_folder(folder))
            # The jobs of a sweep are composed from these words.
            hydra_words.append(f"{key}={quoted(config.hydra[kind].dir)}")


def check_free(folder: Path, option: str, resumed: str | None = None) -> None:
    """Refuse the folder of another run.

    Args:
        folder: of the run that is about to start.
        option: that names it.
        resumed: the checkpoint that the run goes on from; its own folder is not another run's.

    Raises:
        ValueError: if the folder holds results.
    """
    found = next((name for name in _RESULTS if (folder / name).exists()), None)
    is_own = resumed is not None and folder.resolve() in Path(resumed).resolve().parents
    if found is not None and not is_own:
        raise ValueError(
            f"{option}={folder} holds the results of another run ({found}); choose another folder, delete this one, "
            f"or leave {option} out for a new one. `lightning-moe train ckpt_path=CHECKPOINT` goes on with that run"
        )


def new_folder(folder: Path) -> Path:
    """Make `folder`, or the first of `folder-2`, `folder-3`, ... that does not exist."""
    number = 1
    while True:
        free = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            free.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return free


def run_folder() -> Path:
    """The folder of this job (`hydra.run.dir`)."""
    return Path(HydraConfig.get().runtime.output_dir)


def save_options(config: DictConfig) -> None:
    """Write the resolved options and the words that they come from into the run folder, which from here on is taken.

    Raises:
        ValueError: if another run has begun there meanwhile.
    """
    if is_further_rank():
        return
    folder = run_folder()
    resumed = config.get("ckpt_path") if HydraConfig.get().job.config_name == "train" else None
    check_free(folder, "hydra.run.dir", resumed)
    with atomic_write(folder / OPTIONS_FILE) as file:
        file.write(OmegaConf.to_yaml(config, resolve=True).encode())
    with atomic_write(folder / OVERRIDES_FILE) as file:
        words = [str(word) for word in HydraConfig.get().overrides.task]
        file.write(yaml.safe_dump(words).encode())


# ---- words of the command line -------------------------------------------------------------------------------


def key_of(word: str) -> str:
    """The key of one of Hydra's overrides, such as `+trainer.max_time=...`."""
    return word.lstrip("+~").partition("=")[0]


def quoted(value: str) -> str:
    """A value that Hydra takes as it is."""
    # A backslash is one only before a quote.
    escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + (found[2] and '\\"'), value)
    return f'"{escaped}"'


def readable(word: str) -> str:
    """A word as Hydra takes it: a group may be `null`, a value hold `=`, as Lightning's names of checkpoints do."""
    key, _, value = word.partition("=")
    if value == "null" and key in _GROUPS:
        return f"~{key}"
    if word.startswith("-") or "=" not in value or set("'\"\\") & set(value):
        return word
    return f"{key}=" + value.replace("=", "\\=")


def value_of(words: Sequence[str], key: str) -> str | None:
    """The plain value that `words` give a key; None if they don't."""
    values = [word.partition("=")[2] for word in words if key_of(word) == key and "=" in word]
    if not values or values[-1] in ("", "null"):
        return None
    return values[-1].strip("'\"").replace("\\=", "=")


def with_checkpoint(words: Sequence[str]) -> list[str]:
    """The words, where `ckpt_path=latest` is the path of the newest checkpoint.

    That is looked for in `hydra.run.dir`, or below `runs`: in the runs of the experiment, if one is named.

    Raises:
        FileNotFoundError: if there is none.
    """
    if value_of(words, "ckpt_path") != "latest":
        return list(words)
    named = value_of(words, "name") or value_of(words, "experiment")
    folder = Path(value_of(words, "hydra.run.dir") or (Path("runs") / (named or "")))
    found = [path for name in _RESUMABLE for path in folder.glob(f"**/{name}")]
    if not found:
        raise FileNotFoundError(f"ckpt_path=latest: there is no {_RESUMABLE[0]} below {folder}")
    newest = max(found, key=lambda path: path.stat().st_mtime)
    others = [word for word in words if key_of(word) != "ckpt_path"]
    return [*others, f"ckpt_path={quoted(str(newest))}"]


def saved_words(checkpoint: str) -> list[str]:
    """The overrides of the run that wrote a checkpoint, as far as a resumed run takes them over.

    Empty where they are not known: the checkpoint has left its run folder, or comes from elsewhere. A word that names
    Python code (`_target_`) has to be given again: files of a run folder don't decide which code runs.

    Raises:
        ValueError: if the file is damaged.
    """
    for folder in list(Path(checkpoint).parents)[:2]:
        path = folder / OVERRIDES_FILE
        if path.is_file():
            break
    else:
        return []
    try:
        words = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}; delete it to do without") from error
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{path} is damaged: it holds no list of overrides; delete it")
    return [
        word
        for word in words
        if key_of(word) not in ("ckpt_path", "init_from")
        and not key_of(word).startswith("hydra")
        and "_target_" not in word
    ]


def resumed_words(words: Sequence[str], saved: Sequence[str]) -> list[str]:
    """The words of a resumed run: those of the run that it goes on with, unless given again."""
    given = {key_of(word) for word in words}
    # An experiment may start from other weights; a resumed run does not start.
    start = [] if "init_from" in given or not saved else ["init_from=null"]
    return [*(word for word in saved if key_of(word) not in given), *start, *words]


def changed_words(words: Sequence[str], saved: Sequence[str]) -> list[str]:
    """What is given differently, as `new instead of old`."""
    before = {key_of(word): word for word in saved}
    return [
        f"{word} instead of {old}"
        for word in words
        if (old := before.get(key_of(word), word)) != word
    ]


def is_dry(words: Sequence[str]) -> bool:
    """Whether `trainer.fast_dev_run` asks for a run that only shows that everything works."""
    return (value_of(words, "trainer.fast_dev_run") or "false").lower() not in ("false", "0")
