"""DataConfig refuses what can't work and what would have no effect."""

import re

import pytest

from lightning_moe.config.data import DataConfig

pytestmark = pytest.mark.usefixtures("shape_checker_off")


def test_defaults_read_the_embedded_corpus_and_hold_out_a_twentieth() -> None:
    config = DataConfig()
    assert config.paths == ()
    assert config.holdout_fraction == 0.05
    assert not config.reads_token_files


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 1}, "data.sequence_length=1 must be at least 2"),
        ({"batch_size": 0}, "data.batch_size=0 must be at least 1"),
        ({"num_workers": -1}, "data.num_workers=-1 must be at least 0"),
        ({"val_fraction": 0.0}, "data.val_fraction=0.0 must be finite and above 0 and below 1"),
        ({"val_fraction": 1.0}, "data.val_fraction=1.0 must be finite and above 0 and below 1"),
        ({"eos_id": 264}, "data.eos_id=264 is outside of data.vocab_size=264; the model needs"),
        ({"paths": ("a.bin",), "token_dtype": "int64"}, "data.token_dtype='int64' must be one of"),
        (
            {"paths": ("a.txt",), "val_paths": ("b.txt",), "val_fraction": 0.1},
            "data.val_fraction=0.1 has no effect with data.val_paths=('b.txt',)",
        ),
        ({"val_paths": ("b.txt",)}, "data.val_paths=('b.txt',) without data.paths"),
        (
            {"paths": ("a.txt",), "val_paths": ("b.npy",)},
            "data.paths and data.val_paths mix token files ('b.npy') with text ('a.txt')",
        ),
        (
            {"paths": ("a.npy",), "token_dtype": "uint32"},
            "data.token_dtype=uint32 has no effect without a .bin file",
        ),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DataConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"paths": "a.txt"}, "data.paths='a.txt' must be a tuple of paths, got one str"),
        ({"paths": (3,)}, "data.paths[0]=3 must be of type str"),
        ({"mask_documents": 1}, "data.mask_documents=1 must be true or false"),
        ({"seed": 0.5}, "data.seed=0.5 must be an integer"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        DataConfig(**options)
