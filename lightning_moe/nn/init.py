"""Initial weights that depend on a seed, a parameter's name and an expert's global id, and on nothing else."""

import hashlib

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
        for name, parameter in child.named_parameters(recurse=False):
            if parameter.is_meta:
                continue
            if isinstance(child, nn.RMSNorm):
                parameter.fill_(1.0)
            elif name == "bias" or name.startswith("b_"):
                parameter.zero_()
            elif isinstance(child, Experts):
                for row, expert in enumerate(child.expert_ids):
                    _draw_(parameter[row], f"{path}.{name}[{expert}]", seed, std)
            else:
                _draw_(parameter, f"{path}.{name}", seed, std)


def _draw_(parameter: Tensor, name: str, seed: int, std: float) -> None:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    # On the CPU and in float32 whatever the parameter's device and type, so that both start from equal values.
    values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    nn.init.trunc_normal_(values, std=std, a=-3 * std, b=3 * std, generator=generator)
    parameter.copy_(values)
