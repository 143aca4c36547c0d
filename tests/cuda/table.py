"""What a run of these tests prints at its end."""

from typing import Final

TABLE: list[str] = []

UNVERIFIED: Final = (
    "not verified without a device: what is inside of kernels (accuracy, races, reads out of bounds, garbage in "
    "groups without rows, determinism),",
    "  the order of streams (copies are immediate here), NCCL, what cuBLAS and cuDNN refuse, occupancy and shared "
    "memory, speed. On a GPU: python -m tests.gpu.check",
)


def row(name: str, numbers: dict[str, tuple[float, float]], note: str = "") -> None:
    """Add one configuration: its numbers on CUDA beside the CPU's."""
    if not TABLE:
        TABLE.append("configurations run on CUDA without a device, each number beside the CPU's")
    pairs = "  ".join(f"{key} {ours:.6g} | {cpu:.6g}" for key, (ours, cpu) in numbers.items())
    TABLE.append(f"  {name:<28} {pairs}  {note}".rstrip())
