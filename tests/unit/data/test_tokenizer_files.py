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


def tokenizer_file(folder: Path) -> str:
    """A tokenizer of three words."""
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
    path.write_text(json.dumps(content))
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
