"""Numbers of eight bits: quantizers, quantized weights, and the experts and linear layers that compute with them."""

from lightning_moe.precision.formats import (
    Quantized,
    dequantize,
    quantize_mxfp8,
    quantize_rowwise,
    rows_from_bytes,
    rows_to_bytes,
)
from lightning_moe.precision.linear import LinearRecipe, MXFP8Linear
from lightning_moe.precision.quantized_experts import (
    QuantizedBackend,
    mxfp8_backend,
    rowwise_backend,
)
from lightning_moe.precision.released import (
    ReleasedParameter,
    leaves_device,
    release_,
    restore_,
)
from lightning_moe.precision.weight_store import WeightStore

__all__ = [
    "LinearRecipe",
    "MXFP8Linear",
    "Quantized",
    "QuantizedBackend",
    "ReleasedParameter",
    "WeightStore",
    "dequantize",
    "leaves_device",
    "mxfp8_backend",
    "quantize_mxfp8",
    "quantize_rowwise",
    "release_",
    "restore_",
    "rows_from_bytes",
    "rows_to_bytes",
    "rowwise_backend",
]
