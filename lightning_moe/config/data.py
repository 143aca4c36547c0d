"""Where tokens come from and how they are cut into batches."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from lightning_moe.config.checks import (
    AT_LEAST_ONE,
    NON_NEGATIVE,
    Interval,
    check_bools,
    check_choices,
    check_floats,
    check_instances,
    check_ints,
    given,
)

TokenDtype = Literal["uint16", "uint32"]

TOKEN_SUFFIXES: Final = (".npy", ".bin")

_AT_LEAST_TWO: Final = Interval("at least 2", lambda number: number > 1)
_PROPER_FRACTION: Final = Interval("above 0 and below 1", lambda number: 0 < number < 1)
_DEFAULT_VAL_FRACTION: Final = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Sources of tokens, the split into training and validation, and the shape of a batch.

    Attributes:
        paths: text files, token files (.npy, .bin) or globs of either; empty takes the embedded
            corpus (the sources of Python's standard library).
        val_paths: files or globs to validate on; empty holds out a part of `paths`.
        val_fraction: share of the tokens of `paths` to hold out, in whole documents where these
            are small, above 0 and below 1; None is 0.05. Only without `val_paths`.
        sequence_length: tokens of one row, at least 2.
        batch_size: rows per rank and micro-batch, at least 1.
        mask_documents: whether attention stays within a document.
        shuffle: whether training rows come in a new random order in every epoch.
        seed: of that order.
        num_workers: processes per rank that read ahead; 0 reads in the training process.
        vocab_size: number of token ids; a source with a larger id is refused.
        eos_id: the token that ends a document.
        token_dtype: numbers in .bin files that have no sidecar; None is uint16, and refuses a file
            that could as well hold wider numbers.
    """

    paths: tuple[str, ...] = ()
    val_paths: tuple[str, ...] = ()
    val_fraction: float | None = None
    sequence_length: int = 256
    batch_size: int = 8
    mask_documents: bool = False
    shuffle: bool = True
    seed: int = 0
    num_workers: int = 0
    vocab_size: int = 264
    eos_id: int = 256
    token_dtype: TokenDtype | None = None

    def __post_init__(self) -> None:
        """Check every option, then that each has an effect and agrees with the others."""
        self._check_values()
        self._check_sources()
        if self.eos_id >= self.vocab_size:
            raise ValueError(
                f"data.eos_id={self.eos_id} is outside of data.vocab_size={self.vocab_size}; the model "
                f"needs model.vocab_size (which data.vocab_size must equal) of at least {self.eos_id + 1}"
            )

    @property
    def holdout_fraction(self) -> float:
        """Share of `paths` that is held out where there are no `val_paths`."""
        return _DEFAULT_VAL_FRACTION if self.val_fraction is None else self.val_fraction

    @property
    def reads_token_files(self) -> bool:
        """Whether the sources hold tokens (.npy, .bin) rather than text."""
        return any(_is_token_path(path) for path in self.paths)

    def _check_values(self) -> None:
        for name, paths in (("paths", self.paths), ("val_paths", self.val_paths)):
            if isinstance(paths, str):
                raise TypeError(
                    f"data.{name}={paths!r} must be a tuple of paths, got one str; "
                    f"write ({paths!r},)"
                )
            check_instances("data", tuple, **{name: paths})
            check_instances("data", str, **{f"{name}[{i}]": path for i, path in enumerate(paths)})
        check_floats("data", _PROPER_FRACTION, **given(val_fraction=self.val_fraction))
        check_ints("data", _AT_LEAST_TWO, sequence_length=self.sequence_length)
        check_ints("data", AT_LEAST_ONE, batch_size=self.batch_size, vocab_size=self.vocab_size)
        check_ints(
            "data", NON_NEGATIVE, seed=self.seed, num_workers=self.num_workers, eos_id=self.eos_id
        )
        check_bools("data", mask_documents=self.mask_documents, shuffle=self.shuffle)
        check_choices("data", get_args(TokenDtype), **given(token_dtype=self.token_dtype))

    def _check_sources(self) -> None:
        if self.val_paths and self.val_fraction is not None:
            raise ValueError(
                f"data.val_fraction={self.val_fraction} has no effect with "
                f"data.val_paths={self.val_paths}; unset one of them"
            )
        if self.val_paths and not self.paths:
            raise ValueError(
                f"data.val_paths={self.val_paths} without data.paths would compare the embedded "
                f"corpus with another one; set data.paths"
            )
        every_path = self.paths + self.val_paths
        token_paths = [path for path in every_path if _is_token_path(path)]
        if token_paths and len(token_paths) < len(every_path):
            text_path = next(path for path in every_path if not _is_token_path(path))
            raise ValueError(
                f"data.paths and data.val_paths mix token files ({token_paths[0]!r}) with text "
                f"({text_path!r}); turn the text into a token file with prepare_tokens"
            )
        if self.token_dtype is not None and not any(path.endswith(".bin") for path in token_paths):
            raise ValueError(
                f"data.token_dtype={self.token_dtype} has no effect without a .bin file in "
                f"data.paths={self.paths}; unset it"
            )


def _is_token_path(path: str) -> bool:
    return path.endswith(TOKEN_SUFFIXES)
