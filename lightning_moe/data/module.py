"""`TokenDataModule`: makes batches of packed rows from text or token files."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from lightning_moe.config.data import DataConfig
from lightning_moe.data.batch import TokenRow, collate
from lightning_moe.data.packing import WindowDataset
from lightning_moe.data.sampling import ResumableDataLoader, RowOrder
from lightning_moe.data.splits import Splits, load_splits
from lightning_moe.data.tokens import TokenStream


class TokenDataModule(L.LightningDataModule):
    """Batches of packed rows for training, validation and test.

    Training rows come shuffled, dealt to ranks in full batches, and can be resumed in the middle of
    an epoch. Validation (which is also the test set) goes through its tokens in order, predicts
    each of them (but the very first) exactly once over all ranks, and gives every rank the same
    number of batches.

    Args:
        config: what to read and how to cut it; the default reads the embedded corpus.
    """

    def __init__(self, config: DataConfig | None = None) -> None:
        super().__init__()
        self.config = DataConfig() if config is None else config

    @classmethod
    def from_text(cls, *paths: str | Path, **options: Any) -> "TokenDataModule":
        """Read text files or globs, byte by byte.

        Args:
            paths: files or globs; `**` searches in sub-folders.
            options: other fields of `DataConfig`.

        Raises:
            ValueError: if there is no path, or one names a token file.
        """
        config = _config(paths, options, "from_text")
        if config.reads_token_files:
            raise ValueError(
                f"data.paths={config.paths} are token files; use TokenDataModule.from_tokens"
            )
        return cls(config)

    @classmethod
    def from_tokens(cls, *paths: str | Path, **options: Any) -> "TokenDataModule":
        """Read token files (.npy, .bin) or globs of them.

        Args:
            paths: files or globs; `**` searches in sub-folders.
            options: other fields of `DataConfig`.

        Raises:
            ValueError: if there is no path, or one names no token file.
        """
        config = _config(paths, options, "from_tokens")
        if not config.reads_token_files:
            raise ValueError(
                f"data.paths={config.paths} are no token files (.npy or .bin); "
                f"use TokenDataModule.from_text, or make token files with prepare_tokens"
            )
        return cls(config)

    @property
    def train_tokens(self) -> TokenStream:
        """The training tokens, read at first use."""
        return self._splits.train

    @property
    def val_tokens(self) -> TokenStream:
        """The validation tokens, read at first use."""
        return self._splits.val

    @property
    def num_train_tokens(self) -> int:
        """Training tokens, ends of documents included."""
        return len(self._splits.train)

    @property
    def num_val_tokens(self) -> int:
        """Validation tokens, ends of documents included."""
        return len(self._splits.val)

    @property
    def val_bytes_per_token(self) -> float | None:
        """Bytes of text per token that validation predicts; None if the bytes are not known.

        Ends of documents are tokens without bytes. A mean cross-entropy in nats, over ln 2 and over
        this, is bits per byte.
        """
        return self._splits.val_bytes_per_token

    def describe(self) -> str:
        """Source, sizes and the share to validate on, in one line."""
        config, splits = self.config, self._splits
        num_train, num_val = len(splits.train), len(splits.val)
        return (
            f"{splits.source}: {num_train:,} training and {num_val:,} validation tokens "
            f"({num_val / (num_train + num_val):.1%}) in rows of {config.sequence_length}, "
            f"{config.batch_size} rows per rank"
        )

    def setup(self, stage: str = "fit") -> None:
        """Read the sources, once, and check that each split that `stage` needs has a row.

        Before training the log says how the tokens are split.

        Raises:
            FileNotFoundError: if a source does not exist.
            ValueError: if a source can't be used, or gives less than one row.
        """
        if stage == "fit":
            _check_rows(self._train_dataset, "training", self.config.sequence_length + 1)
            rank_zero_info(self.describe())
        # The last validation row need not be full: one token and the one to predict.
        _check_rows(self._val_dataset, "validation", 2)

    def train_dataloader(self) -> ResumableDataLoader:
        """Shuffled training batches of this rank."""
        limit = 1.0 if self.trainer is None else self.trainer.limit_train_batches
        return self._loader(self._train_dataset, self._order, limit_batches=limit)

    def val_dataloader(self) -> ResumableDataLoader:
        """Validation batches of this rank, in the order of the text."""
        order = replace(self._order, shuffle=False, drop_last=False)
        return self._loader(self._val_dataset.padded_to_multiple_of(order.world_size), order)

    def test_dataloader(self) -> ResumableDataLoader:
        """The validation batches."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[TokenRow]:
        """The validation rows in the order of the text; Lightning deals each to one rank."""
        return DataLoader(
            self._val_dataset,
            batch_size=self.config.batch_size,
            num_workers=self.config.num_workers,
            collate_fn=collate,
        )

    @cached_property
    def _splits(self) -> Splits:
        return load_splits(self.config)

    @property
    def _train_dataset(self) -> WindowDataset:
        return self._dataset(self._splits.train, keep_partial=False)

    @property
    def _val_dataset(self) -> WindowDataset:
        return self._dataset(self._splits.val, keep_partial=True)

    def _dataset(self, stream: TokenStream, *, keep_partial: bool) -> WindowDataset:
        return WindowDataset(
            stream,
            self.config.sequence_length,
            eos_id=self.config.eos_id,
            mask_documents=self.config.mask_documents,
            keep_partial=keep_partial,
        )

    @property
    def _order(self) -> RowOrder:
        # The strategy knows which ranks get different data; on one device there is none.
        ranks = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        ranks = ranks or {"num_replicas": 1, "rank": 0}
        return RowOrder(
            batch_size=self.config.batch_size,
            world_size=ranks["num_replicas"],
            rank=ranks["rank"],
            shuffle=self.config.shuffle,
            seed=self.config.seed,
        )

    def _loader(
        self, dataset: WindowDataset, order: RowOrder, *, limit_batches: int | float = 1.0
    ) -> ResumableDataLoader:
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return ResumableDataLoader(
            dataset,
            order,
            num_workers=self.config.num_workers,
            pin_memory=on_cuda,
            limit_batches=limit_batches,
        )


def _config(paths: tuple[str | Path, ...], options: dict[str, Any], method: str) -> DataConfig:
    if not paths:
        raise ValueError(
            f"TokenDataModule.{method} needs a path; TokenDataModule() reads the embedded corpus"
        )
    return DataConfig(paths=tuple(str(path) for path in paths), **options)


def _check_rows(dataset: WindowDataset, split: str, num_needed: int) -> None:
    if len(dataset) == 0:
        raise ValueError(
            f"data.sequence_length={dataset.sequence_length}: the {split} split has "
            f"{len(dataset.stream)} tokens, less than the {num_needed} of its smallest row; "
            f"give more text, or lower data.sequence_length"
        )
