"""What a checkpoint keeps besides tensors of the model: values in plain types, and the state of each rank."""

import random
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import torch


def plain(value: Any) -> Any:  # noqa: ANN401 - any nesting of plain values
    """The same value in types that `torch.load(weights_only=True)` accepts.

    Hydra's containers become dicts and lists with their references resolved, paths become strings, NumPy's scalars
    numbers; classes are left out.
    """
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items() if not isinstance(entry, type)}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is tuple:
        return tuple(plain(entry) for entry in value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | tuple):
        return [plain(entry) for entry in value]
    return value


def rank_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's random generators and loader positions; Lightning itself keeps those of the first rank only."""
    numpy = np.random.get_state(legacy=False)
    rng: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        # Its 624 words are an array, which weights_only refuses.
        "numpy": numpy | {"state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
    }
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    loops = checkpoint.get("loops") or {}
    loaders = loops.get("fit_loop", {}).get("state_dict", {}).get("combined_loader")
    return {"rng": rng, "loaders": plain(loaders)}


def restore_rng(rng: Mapping[str, Any]) -> None:
    """Set this rank's random generators to what `rank_state` found."""
    torch.set_rng_state(rng["torch"])
    random.setstate(rng["python"])
    np.random.set_state(rng["numpy"])
    if "cuda" in rng and torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])
