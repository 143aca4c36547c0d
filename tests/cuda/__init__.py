"""The CUDA path without a GPU: torch's CUDA build on a runtime that has no device; see docs/cuda.md."""
