"""What a CUDA device can do, by its compute capability."""

import torch


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; None for all others."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def device_refusal(
    name: str,
    device: torch.device,
    *,
    least: tuple[int, int],
    below: tuple[int, int] | None = None,
    remedy: str,
) -> str | None:
    """Why what is called `name` can't run on `device`, and the remedy; None if it can.

    Args:
        name: of the format, as its option has it.
        device: where it shall run.
        least: compute capability of the CUDA device, at least.
        below: the first one above `least` that has no kernel, or None.
        remedy: what to set instead.
    """
    needed = f"{_dotted(least)} or more" + (f" and below {_dotted(below)}" if below else "")
    advice = f"{name} needs a CUDA device of compute capability {needed}; {remedy}"
    found = capability_of(device)
    if found is None:
        return f"the device is {device.type}, and {advice}"
    if found < least or (below is not None and found >= below):
        return f"the device has {_dotted(found)}, and {advice}"
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(str(number) for number in capability)
