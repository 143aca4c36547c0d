"""Token sources, packing, resumable loading, and the Lightning data module that joins them."""

from lightning_moe.data.baselines import bigram_bits_per_byte, unigram_bits_per_byte
from lightning_moe.data.batch import IGNORE_INDEX, TokenBatch, TokenRow, collate
from lightning_moe.data.module import TokenDataModule
from lightning_moe.data.packing import WindowDataset
from lightning_moe.data.prepare import prepare_tokens, progress_bar
from lightning_moe.data.sampling import LoaderState, ResumableDataLoader, RowOrder, TokenSampler
from lightning_moe.data.sidecar import Sidecar
from lightning_moe.data.tokens import ByteTokenizer, TokenFile, TokenStream, open_tokens

__all__ = [
    "IGNORE_INDEX",
    "ByteTokenizer",
    "LoaderState",
    "ResumableDataLoader",
    "RowOrder",
    "Sidecar",
    "TokenBatch",
    "TokenDataModule",
    "TokenFile",
    "TokenRow",
    "TokenSampler",
    "TokenStream",
    "WindowDataset",
    "bigram_bits_per_byte",
    "collate",
    "open_tokens",
    "prepare_tokens",
    "progress_bar",
    "unigram_bits_per_byte",
]
