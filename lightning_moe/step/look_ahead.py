"""The batches that an optimizer step has still to come, and whether they routed as was foreseen."""

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor


class LookAhead:
    """The iterator of a data fetcher, whose next items can be seen before they are handed out.

    While items wait here, the loader is further on than training. A checkpoint asks the loader for its position; it
    is answered with the one before the first waiting item, so that a resumed run misses none of them.

    Args:
        loader: whose position a checkpoint keeps.
        iterator: an iteration over it.
    """

    def __init__(self, loader: CombinedLoader, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        # Each with the loader's position before it.
        self._waiting: deque[tuple[Any, list[dict[str, Any]]]] = deque()
        self._position = type(loader)._state_dicts.__get__(loader)
        loader._state_dicts = self.position  # type: ignore[method-assign]  # of this loader alone

    def position(self) -> list[dict[str, Any]]:
        """The loader's position, had it handed out no more than this iterator has."""
        return self._waiting[0][1] if self._waiting else self._position()

    def peek(self, number: int) -> list[Any]:
        """The next `number` items, or as many as there are."""
        while len(self._waiting) < number:
            position = copy.deepcopy(self._position())
            try:
                self._waiting.append((next(self._iterator), position))
            except StopIteration:
                break
        return [item for item, _ in self._waiting][:number]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> object:
        return self._waiting.popleft()[0] if self._waiting else next(self._iterator)


def batches_ahead(module: L.LightningModule) -> list[Any]:
    """The micro-batches that follow the present one in its optimizer step, on the module's device.

    To be called from `training_step`. They are copies: hooks that change a batch on its way to the device run for
    them here, and once more when the Trainer hands the batch itself out.

    Raises:
        RuntimeError: if the Trainer can't say which micro-batches belong to a step, or doesn't fetch them itself.
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


def refuse_unforeseen(foreseen: Mapping[int, Tensor], requested: Sequence[Tensor]) -> None:
    """The counts of the scope `exact` were promised before the step; noise that differs would break them.

    A near tie may fall otherwise in a forward without gradients, whose kernels can differ: 1 % is let pass.

    Args:
        foreseen: by number of the layer, the copies that each expert was to get in the step.
        requested: per layer, the copies that it got.

    Raises:
        RuntimeError: for the first layer where they differ.
    """
    if not foreseen:
        return
    pairs = [(requested[layer], counts) for layer, counts in foreseen.items()]
    # One wait for the device, however many layers.
    differs = torch.stack([(a - b).abs().sum() * 100 > a.sum() for a, b in pairs]).tolist()
    for layer, (counted, counts), refused in zip(foreseen, pairs, differs, strict=True):
        if refused:
            raise RuntimeError(
                f"model.moe.router.lb_loss_scope='exact': MoE layer {layer} was to route {counts.tolist()} copies to "
                f"its experts in this optimizer step and routed {counted.tolist()}; routing_step must repeat what "
                "training_step does with the same batch, random numbers included, and training_step must call "
                "step_router_losses and add to its window once per batch"
            )
