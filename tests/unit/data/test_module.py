"""TokenDataModule: sources, splits, counts, and what the Trainer gets."""

import logging
import re
from pathlib import Path

import pytest
import torch

from lightning_moe.config.data import DataConfig
from lightning_moe.data import IGNORE_INDEX, TokenBatch, TokenDataModule, prepare_tokens
from tests.kit.data_runs import Recorder, data_trainer

quiet = pytest.mark.filterwarnings("ignore::UserWarning")


def write_texts(folder: Path, *texts: bytes) -> str:
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_bytes(text)
    return str(folder / "*.txt")


def test_the_default_reads_the_embedded_corpus() -> None:
    data = TokenDataModule()
    data.setup()
    assert data.config == DataConfig()
    assert data.num_train_tokens > 10 * data.num_val_tokens > 1e6
    assert data.val_bytes_per_token is not None
    assert 0.999 < data.val_bytes_per_token < 1
    assert "documents of Python's standard library" in data.describe()
    assert next(iter(data.train_dataloader())).ids_BS.shape == (8, 256)


def test_validation_documents_are_whole_and_not_trained_on(tmp_path: Path) -> None:
    texts = [bytes([65 + i]) * (5 + i) for i in range(12)]
    data = TokenDataModule.from_text(write_texts(tmp_path, *texts), val_fraction=0.3)
    train, val = (
        [bytes(document) for document in _split_at_eos(stream.read(0, len(stream)).tolist())]
        for stream in (data.train_tokens, data.val_tokens)
    )
    assert sorted(train + val) == sorted(texts)
    assert val


def _split_at_eos(tokens: list[int]) -> list[list[int]]:
    documents: list[list[int]] = [[]]
    for token in tokens:
        if token == 256:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == []
    return documents


def test_one_text_holds_out_its_end(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path, bytes(range(39)))
    data = TokenDataModule.from_text(pattern, val_fraction=0.25, sequence_length=4, batch_size=1)
    assert data.train_tokens.read(0, 99).tolist() == list(range(30))
    assert data.val_tokens.read(0, 99).tolist() == [*range(30, 39), 256]


def test_token_files_hold_out_their_last_whole_documents(tmp_path: Path) -> None:
    # 18 tokens: documents of 6 and 7 bytes, and 2 bytes.
    path = tmp_path / "t.bin"
    prepare_tokens([write_texts(tmp_path, b"a" * 6, b"b" * 7, b"c" * 2)], path)
    data = TokenDataModule.from_tokens(str(path), val_fraction=0.3)
    # The last 30 % begin with token 13, inside of the second document, which ends with token 14.
    assert data.num_train_tokens == 15
    assert data.val_tokens.read(0, 99).tolist() == [99, 99, 256]
    assert data.val_bytes_per_token == 1 / 2  # predicted: c and the end


def test_a_token_file_cuts_a_document_that_would_leave_too_little_to_validate(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.bin"
    prepare_tokens([write_texts(tmp_path, b"a" * 95, b"b" * 3)], path)
    # The last half begins in the first document, behind which there are 4 of 100 tokens.
    data = TokenDataModule.from_tokens(str(path), val_fraction=0.5)
    assert (data.num_train_tokens, data.num_val_tokens) == (50, 50)


def test_one_large_text_among_small_ones_gives_validation_its_share_only(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_bytes(b"x" * 420_000)
    (tmp_path / "a.txt").write_bytes(b"y" * 260)
    data = TokenDataModule.from_text(str(tmp_path / "*.txt"))
    # 5 % of 420,262 tokens: the small text, and the end of the large one.
    assert (data.num_train_tokens, data.num_val_tokens) == (399_249, 21_013)
    ids = data.train_tokens.read(0, 500_000)
    assert set(ids.tolist()) == {ord("x")}


def test_the_split_is_told_before_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = TokenDataModule.from_text(write_texts(tmp_path, b"x" * 99), sequence_length=4)
    with caplog.at_level(logging.INFO):
        data.setup("fit")
    assert "1 text files: 95 training and 5 validation tokens (5.0%) in rows of 4" in caplog.text


def test_bytes_per_token_counts_what_validation_predicts(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path, b"train", b"val")
    val = str(tmp_path / "1.txt")
    data = TokenDataModule.from_text(pattern, val_paths=(val, str(tmp_path / "0.txt")))
    # "train" EOS "val" EOS: the first byte is not predicted, ends have no byte.
    assert data.val_bytes_per_token == 7 / 9


@pytest.mark.parametrize("tokenizer", ["words.json", None])
def test_bytes_per_token_of_other_tokens_come_from_the_sidecar_or_are_unknown(
    tmp_path: Path, tokenizer: str | None
) -> None:
    pattern = write_texts(tmp_path, b"train", b"val")
    for name in ("train.bin", "val.bin"):
        prepare_tokens([pattern], tmp_path / name)
        sidecar = tmp_path / f"{name}.json"
        if tokenizer is None:
            sidecar.unlink()
        else:
            sidecar.write_text(sidecar.read_text().replace('"byte"', f'"{tokenizer}"'))
    paths = [str(tmp_path / name) for name in ("train.bin", "val.bin")]
    data = TokenDataModule.from_tokens(paths[0], val_paths=(paths[1],))
    assert data.val_bytes_per_token == (None if tokenizer is None else 8 / 10)
    held_out = TokenDataModule.from_tokens(paths[0])
    assert held_out.val_bytes_per_token is None


def test_text_and_its_token_file_give_the_same_batches(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path, b"some words", b"and others")
    prepare_tokens([pattern], tmp_path / "t.npy")
    options = {"sequence_length": 4, "batch_size": 2, "mask_documents": True}
    text = TokenDataModule.from_text(pattern, val_paths=(pattern,), **options)
    tokens = TokenDataModule.from_tokens(
        str(tmp_path / "t.npy"), val_paths=(str(tmp_path / "t.npy"),), **options
    )
    for ours, theirs in zip(text.train_dataloader(), tokens.train_dataloader(), strict=True):
        assert torch.equal(ours.ids_BS, theirs.ids_BS)
        assert torch.equal(ours.document_ids_BS, theirs.document_ids_BS)


def test_every_worker_count_reads_mapped_files(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path, b"some words", b"and others")
    prepare_tokens([pattern], tmp_path / "t.bin")
    path = str(tmp_path / "t.bin")
    batches = []
    for num_workers in (0, 2):
        data = TokenDataModule.from_tokens(
            path, val_paths=(path,), sequence_length=4, batch_size=2, num_workers=num_workers
        )
        batches.append([batch.ids_BS.tolist() for batch in data.train_dataloader()])
    assert batches[0] == batches[1]


@quiet
def test_trainer_validation_and_test_predict_every_token_once(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path, bytes(range(50)), bytes(range(50, 61)))
    val = str(tmp_path / "1.txt")
    data = TokenDataModule.from_text(pattern, val_paths=(val,), sequence_length=4, batch_size=2)
    module = Recorder()
    data_trainer(tmp_path).validate(module, data, verbose=False)
    labels = torch.cat([label.flatten() for label in module.validated])
    assert labels[labels != IGNORE_INDEX].tolist() == [*range(51, 61), 256]
    assert len(data.test_dataloader()) == len(data.val_dataloader()) == 2


class _Predicts(Recorder):
    def predict_step(self, batch: TokenBatch) -> torch.Tensor:
        return batch.labels_BS


@quiet
def test_the_trainer_predicts_validation_rows_in_the_order_of_the_text(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path, bytes(range(50)), bytes(range(50, 61)))
    val = str(tmp_path / "1.txt")
    data = TokenDataModule.from_text(pattern, val_paths=(val,), sequence_length=4, batch_size=2)
    found = data_trainer(tmp_path).predict(_Predicts(), data)
    assert [len(labels) for labels in found] == [2, 1]
    labels = torch.cat(found)
    assert labels[labels != IGNORE_INDEX].tolist() == [*range(51, 61), 256]


@quiet
@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "bf16-mixed"])
def test_the_trainer_takes_batches_at_every_precision(tmp_path: Path, precision: str) -> None:
    pattern = write_texts(tmp_path, bytes(range(40)))
    data = TokenDataModule.from_text(pattern, sequence_length=4, batch_size=2, mask_documents=True)
    module = Recorder()
    data_trainer(tmp_path, precision=precision, max_steps=1).fit(module, data)
    assert len(module.trained) == 1


def test_empty_files_are_counted_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pattern = write_texts(tmp_path, b"some", b"", b"words")
    with caplog.at_level(logging.WARNING):
        _ = TokenDataModule.from_text(pattern).num_train_tokens  # reads the files
    assert "left out 1 empty text files" in caplog.text


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (TokenDataModule.from_text, "TokenDataModule.from_text needs a path"),
        (lambda: TokenDataModule.from_text("a.bin"), "are token files; use TokenDataModule.from_"),
        (lambda: TokenDataModule.from_tokens("a.txt"), "are no token files (.npy or .bin)"),
        (lambda: TokenDataModule.from_text("a.txt", "b.npy"), "mix token files ('b.npy') with"),
    ],
)
def test_a_source_of_the_wrong_kind_is_refused(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sequence_length": 60},
            "data.sequence_length=60: the training split has 19 tokens, less than the 61",
        ),
        (
            {"val_fraction": 0.01},
            "the validation split has 0 tokens, less than the 2 of its smallest row",
        ),
        ({"eos_id": 0}, "data.eos_id=0 is a byte, and text is read as bytes; set data.eos_id=256"),
    ],
)
def test_text_that_cannot_be_used_is_refused(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    data = TokenDataModule.from_text(
        write_texts(tmp_path, b"x" * 19), **({"sequence_length": 4} | options)
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        data.setup("fit")


def test_too_few_rows_for_one_batch_name_the_batch_size(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path, b"x" * 30)
    data = TokenDataModule.from_text(pattern, sequence_length=4)
    data.setup("fit")
    with pytest.raises(ValueError, match=r"data.batch_size=8 on 1 ranks needs 8 rows .* has 7"):
        data.train_dataloader()


def test_setup_reads_the_sources_once(tmp_path: Path) -> None:
    pattern = write_texts(tmp_path, b"x" * 90)
    data = TokenDataModule.from_text(pattern, sequence_length=4)
    data.setup("fit")
    (tmp_path / "0.txt").unlink()
    data.setup("fit")
    data.setup("validate")
    assert data.num_train_tokens == 86
