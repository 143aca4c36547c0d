"""Numbers of eight bits: quantizers, quantized weights, and the expert backends that compute with them."""

from lightning_moe.precision.backend import QuantizedBackend, mxfp8_backend, rowwise_backend
from lightning_moe.precision.formats import (
    Quantized,
    dequantize,
    quantize_mxfp8,
    quantize_rowwise,
)
from lightning_moe.precision.weight_store import WeightStore

__all__ = [
    "Quantized",
    "QuantizedBackend",
    "WeightStore",
    "dequantize",
    "mxfp8_backend",
    "quantize_mxfp8",
    "quantize_rowwise",
    "rowwise_backend",
]
