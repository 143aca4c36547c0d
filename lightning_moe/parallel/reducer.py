"""Gradients averaged over replicas while backward is still running."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_moe.ops.dtypes import at_least_float32
from lightning_moe.ops.ranges import named_range
from lightning_moe.parallel.collectives import AxisGroup, Work
from lightning_moe.parallel.layout import ParamLayout, ParamSpec


@dataclass(slots=True)
class _Bucket:
    """Parameters that are reduced in one message.

    The message is (rows, columns): one row per rank that gets a part of it, or a single row that all get. Each
    parameter owns a run of columns, and one more that tells on how many ranks it had a gradient.
    """

    group: AxisGroup
    scatter: bool
    dtype: torch.dtype
    specs: list[ParamSpec] = field(default_factory=list)
    ready: set[str] = field(default_factory=set)
    work: Work | None = None
    reduced: Tensor | None = None
    launched: bool = False

    @property
    def num_columns(self) -> int:
        return sum(spec.chunk for spec in self.specs) + len(self.specs)

    @property
    def num_bytes(self) -> int:
        rows = self.group.size if self.scatter else 1
        return rows * self.num_columns * self.dtype.itemsize

    def places(self) -> Iterable[tuple[ParamSpec, slice, int]]:
        """Each parameter's columns, and its flag's."""
        start, flags = 0, sum(spec.chunk for spec in self.specs)
        for i, spec in enumerate(self.specs):
            yield spec, slice(start, start + spec.chunk), flags + i
            start += spec.chunk


class GradientReducer:
    """Means of gradients over each parameter's replicas, bucket by bucket, in one fixed order on every rank.

    A bucket is sent when all its parameters have their gradients and all buckets before it have been sent; `finish`
    sends the rest. Sums run in at least float32, over ranks and over micro-batches. Gradients of experts arrive
    divided by ep (see `transports.exchange.Exchange`); the mean over their ep_dp replicas makes that 1/world, as for
    all other parameters, also when backward runs several times per step.

    Attributes:
        enabled: off for all but the last micro-batch of a step.
        scale: factor on all gradients of the next reduction (0-d), applied while messages are written; None is 1.
        launches: (bucket, whether backward was still running) in order, of the last reduction.

    Args:
        layout: the parameters.
        targets: optimizer parameters by name, where they differ from the model's: they get the gradient.
        bucket_bytes: soft limit of one message.
    """

    def __init__(
        self,
        layout: ParamLayout,
        targets: dict[str, nn.Parameter],
        *,
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        self.layout = layout
        self.targets = targets
        self.enabled = True
        self.scale: Tensor | None = None
        self.launches: list[tuple[int, bool]] = []
        self._wide_sums: dict[str, Tensor] = {}
        self._held: dict[str, Tensor | None] = {}
        self._name_of = {targets.get(name, p): name for name, p in layout.parameters.items()}
        self._frozen = [name for name, p in layout.parameters.items() if not p.requires_grad]
        self._buckets = _make_buckets(layout, bucket_bytes)
        self._bucket_of = {
            spec.name: i for i, bucket in enumerate(self._buckets) for spec in bucket.specs
        }
        self._next = 0
        self._handles = [
            handle
            for name, parameter in layout.parameters.items()
            if parameter.requires_grad
            for handle in self._hooks(name, parameter)
        ]

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def forget(self, optimizer: Optimizer) -> None:
        """Drop what micro-batches that weren't reduced have left here for an optimizer's parameters.

        Call it wherever `optimizer.zero_grad` throws gradients away before a step; it can't reach these.
        """
        for group in optimizer.param_groups:
            for owner in group["params"]:
                name = self._name_of.get(owner)
                if name is None:  # added after fit began; `finish` says so
                    continue
                if name in self.targets:
                    self.layout.parameters[name].grad = None
                self._wide_sums.pop(name, None)

    def finish(self) -> None:
        """Send the buckets that are left, wait, and give parameters their gradients. Call after the backward of a step.

        Raises:
            RuntimeError: if a parameter that was frozen when training began isn't any more.
        """
        for name in self._frozen:
            if self.layout.parameters[name].requires_grad:
                raise RuntimeError(
                    f"parameter {name} was frozen when fit began and now requires a gradient, which would not be "
                    "averaged over ranks; begin with all parameters trainable, or call fit again to unfreeze some"
                )
        self._launch_in_order(in_backward=False, force=True)
        with named_range("reduce"):
            for bucket in self._buckets:
                if bucket.work is not None:
                    bucket.work.wait()
                self._deliver(bucket)
        self._next, self.scale = 0, None

    def _hooks(self, name: str, parameter: nn.Parameter) -> list[torch.utils.hooks.RemovableHandle]:
        return [
            parameter.register_hook(lambda _: self._before_gradient(name)),
            parameter.register_post_accumulate_grad_hook(lambda p: self._on_gradient(name, p)),
        ]

    def _before_gradient(self, name: str) -> None:
        if name in self.targets and not self.targets[name].requires_grad:
            # `toggle_optimizer` has frozen the optimizer's parameter. The model's own one still gets a gradient: this
            # puts aside what it had, so that `_on_gradient` can drop the new one.
            parameter = self.layout.parameters[name]
            self._held[name], parameter.grad = parameter.grad, None

    def _on_gradient(self, name: str, parameter: Tensor) -> None:
        if name in self._held:
            parameter.grad = self._held.pop(name)
            return
        gradient = parameter.grad
        if gradient is not None and gradient.dtype != at_least_float32(gradient.dtype):
            self._add_wide(name, gradient)
            parameter.grad = None
        # Micro-batches before the last one of a step only add up; nothing is sent for them.
        if self.enabled:
            self._buckets[self._bucket_of[name]].ready.add(name)
            self._launch_in_order(in_backward=True, force=False)

    def _add_wide(self, name: str, gradient: Tensor) -> None:
        """Micro-batches add up in float32: a low-precision sum would lose small contributions."""
        if name in self._wide_sums:
            self._wide_sums[name] += gradient
        else:
            self._wide_sums[name] = gradient.to(at_least_float32(gradient.dtype))

    def _launch_in_order(self, *, in_backward: bool, force: bool) -> None:
        # Backward may fill buckets in another order on another rank (unused parameters, data-dependent branches), but
        # collectives must start in the same order on all of them.
        if self._next == 0:
            self.launches.clear()
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if not force and len(bucket.ready) < len(bucket.specs):
                return
            with named_range("reduce"):
                self._launch(bucket)
            self.launches.append((self._next, in_backward))
            self._next += 1

    def _launch(self, bucket: _Bucket) -> None:
        size = bucket.group.size
        device = self.layout.parameters[bucket.specs[0].name].device
        rows = size if bucket.scatter else 1
        # Zeros, since a parameter without a gradient here may have one on another rank.
        message = torch.zeros(rows, bucket.num_columns, dtype=bucket.dtype, device=device)
        for spec, columns, flag in bucket.places():
            gradient = self._take(spec)
            if gradient is not None:
                factor = 1 / size if self.scale is None else self.scale / size
                torch.mul(gradient.view(rows, -1), factor, out=message[:, columns])
                message[:, flag] = 1.0
        if bucket.scatter:
            bucket.reduced = message.new_empty(1, bucket.num_columns)
            bucket.work = bucket.group.reduce_scatter(bucket.reduced, message, async_op=True)
        else:
            bucket.reduced = message
            bucket.work = bucket.group.all_reduce(message, async_op=True)

    def _take(self, spec: ParamSpec) -> Tensor | None:
        """Take this rank's gradient, summed over micro-batches, off its parameter."""
        parameter = self.layout.parameters[spec.name]
        gradient = self._wide_sums.pop(spec.name, parameter.grad)
        parameter.grad = None
        return None if gradient is None else gradient.contiguous()

    def _deliver(self, bucket: _Bucket) -> None:
        reduced = bucket.reduced
        assert reduced is not None
        for spec, columns, flag in bucket.places():
            # Reading a flag waits for the device, so it is read only where this rank had no gradient and can't know.
            if spec.name in bucket.ready or reduced[0, flag].item() > 0:
                self._give(spec, reduced[0, columns])
        bucket.ready.clear()
        bucket.reduced = bucket.work = None

    def _give(self, spec: ParamSpec, gradient: Tensor) -> None:
        target = self.targets.get(spec.name, self.layout.parameters[spec.name])
        gradient = gradient.view(target.shape).to(target.dtype)
        # After an earlier backward of the step, an optimizer's own part holds that backward's mean, to be added to. A
        # model's own parameter gave its gradient away in `_take`, so that this mean contains it already.
        adds_up = spec.name in self.targets and target.grad is not None
        if adds_up:
            assert target.grad is not None
            target.grad += gradient
        else:
            target.grad = gradient


def _make_buckets(layout: ParamLayout, bucket_bytes: int) -> list[_Bucket]:
    """Parameters in reverse order, as backward meets them; one bucket never mixes groups, types or ways to reduce."""
    open_buckets: dict[tuple[str, bool, torch.dtype], _Bucket] = {}
    complete_at: dict[int, tuple[int, _Bucket]] = {}
    for place, (name, parameter) in enumerate(reversed(layout.parameters.items())):
        if not parameter.requires_grad:
            continue
        spec = layout.specs[name]
        dtype = at_least_float32(parameter.dtype)
        key = spec.kind, spec.split, dtype
        bucket = open_buckets.get(key)
        if bucket is None or bucket.num_bytes + spec.numel * dtype.itemsize > bucket_bytes:
            bucket = open_buckets[key] = _Bucket(layout.replicas(spec), spec.split, dtype)
        bucket.specs.append(spec)
        complete_at[id(bucket)] = place, bucket
    # In the order in which they fill up, so that no full bucket waits for one that fills later.
    return [bucket for _, bucket in sorted(complete_at.values(), key=lambda entry: entry[0])]
