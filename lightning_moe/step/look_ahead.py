"""The micro-batches that follow in an optimizer step, seen before the Trainer hands them out."""

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from lightning_moe.ops.records import Routing


@runtime_checkable
class RoutesAhead(Protocol):
    """The method that the scope `exact` requires of a module."""

    def routing_step(self, batch: object, batch_idx: int) -> Sequence[Routing]:
        """One record per MoE layer, from the forward that `training_step` does with this batch, noise included."""
        ...


class LookAhead:
    """The iterator of a data fetcher, whose next items can be seen before they are handed out.

    Args:
        loader: the loader whose position a checkpoint keeps.
        iterator: an iteration over it.
    """

    def __init__(self, loader: CombinedLoader, iterator: Iterator[Any]) -> None:
        self._loader = loader
        self._iterator = iterator
        # Each with the loader's position before it.
        self._waiting: deque[tuple[Any, list[dict[str, Any]]]] = deque()

    def position(self) -> list[dict[str, Any]]:
        """The loader's position, had it handed out no more items than this iterator has."""
        return self._waiting[0][1] if self._waiting else self._loader._state_dicts()

    def peek(self, number: int) -> list[Any]:
        """The next `number` items, or as many as there are."""
        while len(self._waiting) < number:
            position = copy.deepcopy(self._loader._state_dicts())
            try:
                self._waiting.append((next(self._iterator), position))
            except StopIteration:
                break
        return [item for item, _ in self._waiting][:number]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> object:
        return self._waiting.popleft()[0] if self._waiting else next(self._iterator)


def keep_position(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Write the position of training to `checkpoint`, where the loader is further on by the items seen ahead.

    Without this a resumed run would miss those items.
    """
    fetcher = trainer.fit_loop._data_fetcher
    iterator = None if fetcher is None else fetcher.iterator
    if isinstance(iterator, LookAhead) and (position := iterator.position()):
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = position


def requested_ahead(module: L.LightningModule, num_layers: int) -> list[Tensor]:
    """Per MoE layer, the copies that the step's later micro-batches request of each expert; 0 where none follow.

    Calls `routing_step` without gradients, with the random numbers of the present moment and with copies of batches
    and buffers, so that training finds all of them as they were.
    """
    assert isinstance(module, RoutesAhead)
    batches = batches_ahead(module)
    first = module.trainer.fit_loop.batch_idx + 1
    totals: list[Tensor] = [torch.zeros((), dtype=torch.int64, device=module.device)] * num_layers
    devices = [module.device] if module.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices), _copied_buffers(module):
        for batch_idx, batch in enumerate(batches, start=first):
            records = module.routing_step(batch, batch_idx)
            totals = [
                total + record.requested_E for total, record in zip(totals, records, strict=True)
            ]
    return totals


def batches_ahead(module: L.LightningModule) -> list[Any]:
    """The micro-batches that follow the present one in its optimizer step, on the module's device.

    To be called from `training_step`. They are copies: hooks that change a batch on its way to the device run for
    them here, and once more when the Trainer hands the batch itself out.

    Raises:
        RuntimeError: if the Trainer doesn't know which micro-batches belong to a step, or doesn't fetch them itself.
    """
    trainer = module.trainer
    if not module.automatic_optimization:
        raise RuntimeError(
            f"model.moe.router.lb_loss_scope='exact' needs to know which micro-batches an optimizer step has, and "
            f"{type(module).__name__} optimizes manually; use automatic optimization, or choose accumulated or lagged"
        )
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    if isinstance(fetcher, _DataLoaderIterDataFetcher):
        raise RuntimeError(
            f"model.moe.router.lb_loss_scope='exact' looks at batches ahead of training, and "
            f"{type(module).__name__}.training_step takes a dataloader_iter; let it take a batch, or choose "
            "accumulated or lagged"
        )
    number = _number_ahead(trainer)
    items = _peek(fetcher, number) if number else []
    return [_on_device(module, copy.deepcopy(item[0])) for item in items]


def _number_ahead(trainer: L.Trainer) -> int:
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    # An epoch's last step may have fewer micro-batches.
    return int(min(-ready % trainer.accumulate_grad_batches, trainer.num_training_batches - ready))


def _peek(fetcher: _DataFetcher, number: int) -> list[Any]:
    if not isinstance(fetcher.iterator, LookAhead):
        assert fetcher.iterator is not None
        fetcher.iterator = LookAhead(fetcher.combined_loader, fetcher.iterator)
    # Without a length the fetcher itself is one batch ahead, to know which is the last.
    fetched: list[Any] = getattr(fetcher, "batches", [])[:number]
    return fetched + fetcher.iterator.peek(number - len(fetched))


def _on_device(module: L.LightningModule, batch: object) -> object:
    """What the Trainer does with a batch before `training_step`."""
    trainer = module.trainer
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


@contextmanager
def _copied_buffers(module: L.LightningModule) -> Iterator[None]:
    """Have forwards write to copies of the buffers: a batch norm would see every batch twice."""
    buffers = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    copies = {buffer: buffer.clone() for _, _, buffer in buffers}
    for owner, name, buffer in buffers:
        owner._buffers[name] = copies[buffer]
    try:
        yield
    finally:
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer
