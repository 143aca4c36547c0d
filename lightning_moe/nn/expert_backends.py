"""Which backends experts can run on, and the choice of one."""

from collections.abc import Callable
from typing import Final

from lightning_moe.config import FP8Config
from lightning_moe.config.fp8 import EXPERT_BACKEND_NAMES
from lightning_moe.ops.expert_backend import ExpertBackend, ExpertSizes, MatmulBackend
from lightning_moe.ops.grouped_gemm import grouped_gemm_mm, grouped_gemm_refusal
from lightning_moe.ops.grouped_mm import (
    loop_grouped_mm,
    torch_grouped_mm,
    torch_grouped_mm_refusal,
    torch_grouped_mm_waits,
)
from lightning_moe.precision import (
    QuantizedBackend,
    WeightStore,
    mxfp8_backend,
    rowwise_backend,
)


def _no_refusal(_: ExpertSizes) -> None:
    return None


def _torch_refusal(sizes: ExpertSizes) -> str | None:
    return torch_grouped_mm_refusal(sizes.dtype, (sizes.width, sizes.hidden, sizes.packed))


def _torch_waits(sizes: ExpertSizes) -> int:
    return 3 * torch_grouped_mm_waits(sizes.dtype, sizes.device)  # two of them in backward


def _reads_counts(sizes: ExpertSizes) -> int:
    return int(sizes.device.type == "cuda")


def _grouped_gemm_refusal(sizes: ExpertSizes) -> str | None:
    return grouped_gemm_refusal(sizes.dtype, sizes.device)


# A further backend of the package is one file and one line here, and its name in `config.ExpertBackendName`.
EXPERT_BACKENDS: Final[dict[str, Callable[[FP8Config], ExpertBackend]]] = {
    "torch": lambda _: MatmulBackend(torch_grouped_mm, _torch_refusal, host_waits=_torch_waits),
    "loop": lambda _: MatmulBackend(loop_grouped_mm, _no_refusal, host_waits=_reads_counts),
    "grouped_gemm": lambda _: MatmulBackend(
        grouped_gemm_mm, _grouped_gemm_refusal, host_waits=_reads_counts
    ),
    "fp8_rowwise": rowwise_backend,
    "mxfp8": mxfp8_backend,
}


def register_expert_backend(name: str, build: Callable[[FP8Config], ExpertBackend]) -> None:
    """Let `model.moe.backend=name` mean what `build` makes of `model.moe.fp8`, once per MoE layer.

    Every process registers it before it builds a config with that name; `auto` never takes it.

    Raises:
        ValueError: if the name is taken.
    """
    EXPERT_BACKEND_NAMES.add(name)
    EXPERT_BACKENDS[name] = build


# What `auto` tries, in this order; the last one runs everything.
AUTO: Final = ("torch", "loop")


class ExpertBackendChoice:
    """One backend by name, or with `auto` the first that can run the experts.

    Attributes:
        fp8_only: whether weights are to be dropped while they train (`model.moe.fp8.fp8_only`).

    Args:
        name: as in `model.moe.backend`.
        fp8: as in `model.moe.fp8`.
        by_plugin: whether the plugin `MoEPrecision` asked for it, not the option `model.moe.backend`.
    """

    def __init__(self, name: str, fp8: FP8Config, *, by_plugin: bool = False) -> None:
        self.name = name
        self.by_plugin = by_plugin
        self.fp8_only = fp8.fp8_only
        self._candidates = {
            candidate: EXPERT_BACKENDS[candidate](fp8)
            for candidate in (AUTO if name == "auto" else (name,))
        }

    def settle(self, sizes: ExpertSizes) -> ExpertBackend:
        """The backend for these experts.

        Raises:
            ValueError: if the one that was asked for can't run them.
        """
        for backend in self._candidates.values():
            if backend.refusal(sizes) is None:
                return backend
        asked, instead = (
            ("MoEPrecision experts", "leave the plugin out")
            if self.by_plugin
            else ("model.moe.backend", "use model.moe.backend=auto")
        )
        raise ValueError(
            f"{asked}={self.name} can't run these experts: "
            f"{self._candidates[self.name].refusal(sizes)}; or {instead}"
        )

    def taken(self, sizes: ExpertSizes) -> str:
        """The name of that backend.

        Raises:
            ValueError: as `settle`.
        """
        backend = self.settle(sizes)
        return next(name for name, own in self._candidates.items() if own is backend)

    def account(self, sizes: ExpertSizes) -> str:
        """A sentence for the log: the backend, and why `auto` took none of those before it."""
        name = self.taken(sizes)
        taken = self._candidates[name]
        refused = {name: backend.refusal(sizes) for name, backend in self._candidates.items()}
        asked = "auto takes " if self.name == "auto" else ""
        waits = taken.host_waits(sizes)
        notes = [
            taken.note,
            f"the host waits for the device {waits} times per layer and micro-batch"
            if waits
            else "",
            *(f"not {other}: {why}" for other, why in refused.items() if why),
        ]
        because = "; ".join(note for note in notes if note)
        because = f" ({because})" if because else ""
        return f"expert backend: {asked}{name} in {sizes.dtype} on {sizes.device.type}{because}"

    def only_stores(self) -> dict[str, WeightStore]:
        """Where `fp8_only` keeps the codes of weights, by the name of the weight; without it nothing."""
        return {
            name: store
            for backend in self._candidates.values()
            if self.fp8_only and isinstance(backend, QuantizedBackend)
            for name, store in (("w_up_gate", backend.up_gate), ("w_down", backend.down))
        }

    def forget(self) -> None:
        """Drop what backends have derived from the weights."""
        for backend in self._candidates.values():
            backend.forget()
