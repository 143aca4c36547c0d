"""Runs Python with the CUDA runtime that has no device: `python -m tests.cuda.run SCRIPT.py ...` or `-m MODULE ...`."""

import os
import sys

from tests.cuda.build import build

# One device per capability that decides something: Hopper twice (two ranks), data-centre Blackwell, Ampere, consumer
# Blackwell, and the last that torch's eight-bit kernels take.
CAPABILITIES = "9.0,9.0,10.0,8.0,12.0,10.3"


def main() -> None:
    """Replace this process."""
    cuda, nvrtc = build()
    os.environ["LD_PRELOAD"] = f"{cuda}:{nvrtc}"
    os.environ.setdefault("RUNTIME_CAPABILITIES", CAPABILITIES)
    # What is compiled here must reach no device, and its timings mean nothing.
    os.environ["USE_PYTORCH_KERNEL_CACHE"] = "0"
    os.environ["TRITON_LIBCUDA_PATH"] = str(cuda.parent)
    os.environ["TRITON_CACHE_DIR"] = str(cuda.parent / "triton")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cuda.parent / "inductor")
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])  # noqa: S606 - LD_PRELOAD needs a new start


if __name__ == "__main__":
    main()
