"""Linear layers in eight bits on a GPU: accuracy and speed."""

import torch
from torch import Tensor, nn

from lightning_moe.config import LinearFormat
from lightning_moe.nn import MLP
from lightning_moe.precision import LinearRecipe
from lightning_moe.strategy.linears import LinearSwap
from tests.gpu.measure import LEAST_SNR_FP8, Result, Size, against, timed, tokens


class Dense(nn.Module):
    """A dense network with as many FLOPs per token as the experts of `size`; called as a layer with experts is."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = MLP(size.width, size.top_k * size.hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Output, and no record."""
        return self.mlp(x), None


def dense(
    size: Size, linears: LinearFormat, dtype: torch.dtype, device: torch.device, *, emulate: bool
) -> Dense | str:
    """The network with linear layers in eight bits, or why it can't run here."""
    layer = Dense(size).to(device, dtype)
    swap = LinearSwap(LinearRecipe(name=linears, emulate=emulate))
    swap.swap(layer)
    try:
        swap.settle()
    except ValueError as error:
        return str(error)
    return layer


def linear_accuracy(
    size: Size,
    linears: LinearFormat,
    dtype: torch.dtype,
    device: torch.device,
    *,
    emulate: bool = False,
) -> Result:
    """Output and all gradients of linear layers in eight bits against float64, as for the experts."""
    subject = f"linears {linears}, {str(dtype).removeprefix('torch.')}"
    layer = dense(size, linears, dtype, device, emulate=emulate)
    if isinstance(layer, str):
        return Result(check="accuracy", subject=subject, passed=None, detail=layer)
    data = tokens(size, dtype, device)
    return against(Dense(size).double(), layer, data, subject=subject, least=LEAST_SNR_FP8)


def linear_speed(size: Size, linears: LinearFormat | None, device: torch.device) -> Result:
    """Time of linear layers in eight bits, or in bfloat16 (None); compiled, as torchao means them to be."""
    subject = f"linears {linears or 'bfloat16'}"
    layer: Dense | str
    if linears is None:
        layer = Dense(size).to(device, torch.bfloat16)
    else:
        layer = dense(size, linears, torch.bfloat16, device, emulate=False)
    if isinstance(layer, str):
        return Result(check="speed", subject=subject, passed=None, detail=layer)
    if device.type == "cuda":
        layer.compile()
    return timed(layer, size, device, subject=subject)
