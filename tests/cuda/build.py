"""Builds the CUDA runtime without a device for the CUDA build of torch that this interpreter has."""

import hashlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_SOURCES: Final = Path(__file__).parent
_FOLDER: Final = _SOURCES.parents[1] / "build" / "cuda"
# Functions of the runtime, the driver and cuBLAS.
_CUDA: Final = re.compile(r"^(cuda[A-Z]\w*|__cuda\w+|cu[A-Z]\w*|cublas\w+)")
_NVRTC: Final = "libnvrtc.so.13"

# The one header of nvcc's that the CUDA wheels leave out.
_HOST_DEFINES: Final = """
#define __host__
#define __device__
#define __global__
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
"""


def build() -> tuple[Path, Path]:
    """The libraries to load before torch's, libcuda first; takes seconds, once per change.

    Raises:
        RuntimeError: if torch isn't the CUDA build.
    """
    package = _torch()
    sources = [_SOURCES / name for name in ("runtime.h", "memory.c", "kernels.c", "nvrtc.c")]
    version = (package / "version.py").read_bytes()
    contents = version + Path(__file__).read_bytes() + b"".join(p.read_bytes() for p in sources)
    folder = _FOLDER / hashlib.sha256(contents).hexdigest()[:16]
    cuda, nvrtc = folder / "libcuda.so.1", folder / _NVRTC
    if not (cuda.exists() and nvrtc.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        _build_cuda(cuda, package, sources[1:3])
        _build_nvrtc(nvrtc, sources[3])
    return cuda, nvrtc


def _torch() -> Path:
    """Its folder; found without importing it, since the libraries must be loaded before."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    if not (package / "lib" / "libtorch_cuda.so").exists():
        raise RuntimeError(
            f"{sys.executable} has a build of torch without CUDA; make check-cuda installs one that has it"
        )
    return package


def _build_cuda(library: Path, package: Path, sources: list[Path]) -> None:
    headers = next((package.parent / "nvidia").glob("cu*/include/cuda_runtime_api.h")).parent
    folder = library.parent
    (folder / "crt").mkdir(exist_ok=True)
    (folder / "crt" / "host_defines.h").write_text(_HOST_DEFINES)
    written = "".join(source.read_text() for source in sources)
    defined = set(re.findall(r"^[\w ]+[ *]+(\w+)\(", written, re.MULTILINE))
    stubs = [
        f'int {name}(void) {{ return runtime_trace("{name}"); }}\n'
        for name in sorted(_needed(package) - defined)
    ]
    rest = folder / "rest.c"
    rest.write_text("int runtime_trace(const char *);\n" + "".join(stubs))
    options = ["-Wl,-soname,libcuda.so.1", f"-I{headers}", f"-I{folder}", f"-I{_SOURCES}"]
    _compile(library, [*sources, rest], options)
    # Triton links against it by this name.
    (folder / "libcuda.so").unlink(missing_ok=True)
    (folder / "libcuda.so").symlink_to(library.name)


def _build_nvrtc(library: Path, source: Path) -> None:
    """Torch looks for these functions by the version of the library's name."""
    versions = library.parent / "versions.map"
    versions.write_text(f"{_NVRTC} {{ global: *; }};\n")
    _compile(library, [source], [f"-Wl,-soname,{_NVRTC}", f"-Wl,--version-script={versions}"])


def _needed(package: Path) -> set[str]:
    """What torch's libraries and Triton's driver ask of CUDA."""
    needed: set[str] = set()
    for library in sorted((package / "lib").glob("lib*.so")):
        command = ["nm", "-D", "--undefined-only", str(library)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names = (line.split()[-1].split("@")[0] for line in lines.splitlines())
        needed |= {name for name in names if _CUDA.match(name)}
    for driver in package.parent.glob("triton/backends/nvidia/driver.c"):
        needed |= set(re.findall(r"\b(cu[A-Z]\w+)\(", driver.read_text()))
    return needed | {"cuCtxSetLimit"}


def _compile(library: Path, sources: list[Path], options: list[str]) -> None:
    common = ["gcc", "-O1", "-w", "-shared", "-fPIC", "-pthread"]
    # Whole or not at all: another process may be building the same.
    unfinished = library.with_suffix(".new")
    subprocess.run([*common, *options, "-o", unfinished, *sources], check=True)
    unfinished.rename(library)
