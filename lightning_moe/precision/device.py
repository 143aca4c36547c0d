"""Which devices have the kernels of eight-bit formats."""

import torch


def device_refusal(
    name: str, capability: tuple[int, int], device: torch.device, *, remedy: str
) -> str | None:
    """Why what is called `name` can't run on `device`, and the remedy; None if it can.

    Args:
        name: of the format, as its option has it.
        capability: of the CUDA device, at least.
        device: where it shall run.
        remedy: what to set instead.
    """
    needed = ".".join(str(number) for number in capability)
    advice = f"{name} needs a CUDA device of compute capability {needed} or more; {remedy}"
    if device.type != "cuda":
        return f"the device is {device.type}, and {advice}"
    found = torch.cuda.get_device_capability(device)
    if found < capability:
        return f"the device has {found[0]}.{found[1]}, and {advice}"
    return None
