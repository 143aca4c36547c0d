"""Token files by a tokenizer.json, which the package `tokenizers` reads."""

import json
from pathlib import Path

import pytest

from lightning_moe.data import open_tokens, prepare_tokens

pytest.importorskip("tokenizers", reason="the extra `hf` isn't installed")

EOS = "<eos>"
UNKNOWN = "</s>"


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """A glob of two texts."""
    for name, text in (("a", "red blue"), ("b", "blue green")):
        (tmp_path / f"{name}.txt").write_text(text)
    return str(tmp_path / "*.txt")


def tokenizer_file(folder: Path, **changes: object) -> str:
    """A tokenizer of three words, with `changes` to the file."""
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 2,
                "content": "<eos>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {"red": 0, "blue": 1, "<eos>": 2, "<unk>": 3},
            "unk_token": "<unk>",
        },
    }
    path = folder / "words.json"
    path.write_text(json.dumps(content | changes))
    return str(path)


def test_a_tokenizer_json_gives_its_ids_and_ends_documents(texts: str, tmp_path: Path) -> None:
    sidecar = prepare_tokens(
        [texts],
        tmp_path / "out.bin",
        tokenizer=tokenizer_file(tmp_path),
        eos_token=EOS,
    )
    file = open_tokens(tmp_path / "out.bin", vocab_size=4, eos_id=2)
    assert file.tokens[:].tolist() == [0, 1, 2, 1, 3, 2]
    assert (sidecar.tokenizer, sidecar.vocab_size, sidecar.eos_id) == ("words.json", 4, 2)


def test_an_unknown_end_of_document_is_refused_with_the_known_ones(
    texts: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"eos_token='</s>' is not in .*special tokens are <eos>"):
        prepare_tokens(
            [texts],
            tmp_path / "out.bin",
            tokenizer=tokenizer_file(tmp_path),
            eos_token=UNKNOWN,
        )


def test_a_file_that_is_no_tokenizer_is_named(texts: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text("{}")
    with pytest.raises(ValueError, match=r"wrong\.json' is no tokenizer\.json"):
        prepare_tokens(
            [texts],
            tmp_path / "out.bin",
            tokenizer=str(tmp_path / "wrong.json"),
            eos_token=EOS,
        )


def prepare(folder: Path, text: str, special_tokens: str = "text", **changes: object) -> list[int]:
    """The ids of one text."""
    (folder / "a.txt").write_text(text)
    sidecar = prepare_tokens(
        folder / "a.txt",
        folder / "out.bin",
        tokenizer=tokenizer_file(folder, **changes),
        eos_token=EOS,
        special_tokens=special_tokens,
    )
    file = open_tokens(folder / "out.bin", vocab_size=sidecar.vocab_size, eos_id=sidecar.eos_id)
    return file.tokens[:].tolist()


@pytest.mark.parametrize("largest", [300, 65_535, 65_536, 70_000])
def test_ids_with_gaps_are_written_as_they_are(tmp_path: Path, largest: int) -> None:
    model = {"type": "WordLevel", "vocab": {"red": 0, "blue": largest}, "unk_token": "red"}
    assert prepare(tmp_path, "red blue", model=model) == [0, largest, 2]
    sidecar = json.loads((tmp_path / "out.bin.json").read_text())
    assert sidecar["vocab_size"] == largest + 1
    assert sidecar["dtype"] == ("uint16" if largest < 65_536 else "uint32")


def test_an_end_of_document_above_65535_is_written_as_it_is(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"red": 0, EOS: 70_000}, "unk_token": "red"}
    added = [
        {
            "id": 70_000,
            "content": EOS,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ]
    assert prepare(tmp_path, "red", model=model, added_tokens=added) == [0, 70_000]


def test_settings_for_inference_leave_a_corpus_alone(tmp_path: Path) -> None:
    truncation = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    padding = {
        "strategy": {"Fixed": 16},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 3,
        "pad_type_id": 0,
        "pad_token": "<unk>",
    }
    ids = prepare(tmp_path, "red blue " * 4, truncation=truncation, padding=padding)
    assert ids == [0, 1] * 4 + [2]


def test_merges_that_training_would_drop_are_all_made(tmp_path: Path) -> None:
    model = {
        "type": "BPE",
        "dropout": 0.9,
        "vocab": {"a": 0, "b": 1, EOS: 2, "ab": 3},
        "merges": ["a b"],
    }
    assert prepare(tmp_path, "ab " * 50, model=model) == [3] * 50 + [2]


UNIGRAM = {
    "type": "Unigram",
    "unk_id": 3,
    "vocab": [["red", -1.0], ["<", -9.0], [EOS, 0.0], ["<unk>", -9.0], ["eos>", -9.0]],
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0, 3, 3, 3, 1, 2]),
        # Here the model itself has a word for it.
        ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, [0, 3, 3, 1, 2]),
        ({"added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}, [0, 3, 3, 1, 2]),
    ],
)
def test_the_text_of_a_special_token_is_text(
    tmp_path: Path, changes: dict[str, object], expected: list[int]
) -> None:
    assert prepare(tmp_path, "red <eos> blue", **changes) == expected


def test_a_likely_word_that_is_special_is_cut(tmp_path: Path) -> None:
    ids = prepare(tmp_path, "red<eos>red", model=UNIGRAM, pre_tokenizer=None)
    assert ids.count(2) == 1
    assert ids[-1] == 2


def test_special_tokens_in_text_become_ids_where_that_is_asked_for(tmp_path: Path) -> None:
    assert prepare(tmp_path, "red <eos> blue", "ids") == [0, 2, 1, 2]
    assert json.loads((tmp_path / "out.bin.json").read_text())["num_documents"] == 2


def test_a_token_that_stands_for_unknown_text_cannot_end_documents(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"red": 0, EOS: 2}, "unk_token": EOS}
    with pytest.raises(ValueError, match=r"'a.txt': .* gives the special token '<eos>' for the t"):
        prepare(tmp_path, "red blue", model=model)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},  # Rust panics
        {"model": {"type": "WordLevel", "vocab": {"red": -1}, "unk_token": "red"}},
        {"model": None},
    ],
)
def test_a_damaged_tokenizer_is_named(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"words\.json' is no tokenizer\.json"):
        prepare(tmp_path, "red", **changes)


def test_a_text_without_ids_is_named(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"red": 0}, "unk_token": "gone"}
    with pytest.raises(ValueError, match=r"document 'a.txt': the tokenizer can't encode it"):
        prepare(tmp_path, "red blue", model=model)
