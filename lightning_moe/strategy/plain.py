"""What a checkpoint keeps besides tensors of the model: plain types, and the state of each rank."""

import random
from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import Container, OmegaConf


def plain(value: Any) -> Any:  # noqa: ANN401 - any nesting of plain values
    """The same value in types that `torch.load(weights_only=True)` accepts: no OmegaConf, no classes."""
    if isinstance(value, Container):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items() if not isinstance(entry, type)}
    if isinstance(value, list | tuple):
        return (
            type(value)([plain(entry) for entry in value])
            if type(value) in (list, tuple)
            else value
        )
    return value


def rank_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's random generators and loader positions; Lightning itself keeps those of the first rank only."""
    rng: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    loops = checkpoint.get("loops") or {}
    loaders = loops.get("fit_loop", {}).get("state_dict", {}).get("combined_loader")
    return {"rng": rng, "loaders": plain(loaders)}


def restore_rng(rng: Mapping[str, Any]) -> None:
    """Set this rank's random generators to what `rank_state` found."""
    torch.set_rng_state(rng["torch"])
    random.setstate(rng["python"])
    if "cuda" in rng and torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])
