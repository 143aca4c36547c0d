"""Initial weights that depend on a seed, a parameter's name and an expert's global id, and on nothing else."""

import hashlib
from functools import partial

import torch
from torch import Tensor, nn

from lightning_moe.nn.experts import Experts
from lightning_moe.nn.router import Router


def draw_seed() -> int:
    """A seed from torch's global generator, so that `torch.manual_seed` decides the weights of a new module."""
    return int(torch.randint(2**62, (), device="cpu").item())


@torch.no_grad()
def init_weights_(module: nn.Module, *, seed: int, std: float) -> None:
    """Give every parameter of `module` its initial value, in place.

    Matrices are drawn from a normal of standard deviation `std`, cut at three of them, by a generator of their own:
    neither the number of ranks nor the order of layers changes a value, and layers of equal shape differ. Norm
    weights are 1, biases 0. Does nothing on the meta device.

    Source: Olmo-core 3, initialisation of its MoE models.
    """
    for path, child in module.named_modules():
        if isinstance(child, Router) and child.score_bias is not None:
            child.score_bias.zero_()
        if isinstance(child, Experts):
            child.fill_(partial(_init_experts_, path=path, seed=seed, std=std))
            continue
        for name, parameter in child.named_parameters(recurse=False):
            if parameter.is_meta:
                continue
            if name == "bias":
                parameter.zero_()
            elif isinstance(child, nn.RMSNorm | nn.LayerNorm):
                parameter.fill_(1.0)
            else:
                _draw_(parameter, f"{path}.{name}", seed, std)


@torch.no_grad()
def _init_experts_(experts: Experts, *, path: str, seed: int, std: float) -> None:
    for name, parameter in experts.named_parameters(recurse=False):
        if name.startswith("b_"):
            parameter.zero_()
            continue
        for row, expert in enumerate(experts.expert_ids):
            _draw_(parameter[row], f"{path}.{name}[{expert}]", seed, std)


def give_memory_(module: nn.Module, device: torch.device) -> None:
    """Memory on `device` for all that a module built on the meta device holds; to experts once it is read."""
    for child in module.modules():
        if isinstance(child, Experts):
            child.defer_(device)
        else:
            child.to_empty(device=device, recurse=False)


def _draw_(parameter: Tensor, name: str, seed: int, std: float) -> None:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    # On the CPU and in float32 whatever the parameter's device and type, so that both start from equal values.
    values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    nn.init.trunc_normal_(values, std=std, a=-3 * std, b=3 * std, generator=generator)
    parameter.copy_(values)
