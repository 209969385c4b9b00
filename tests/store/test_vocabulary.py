"""Whether one model can draft for another."""

from pathlib import Path
from typing import Any

import pytest

from modelrunner.errors import InvalidModel
from modelrunner.store import Store, gguf, vocabulary
from modelrunner.types import Bundle
from tests.store.samples import add_model, write_gguf

BPE = {"tokenizer.ggml.model": "gpt2"}
BOS = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 1}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "data")


def bundle(store: Store, seed: int, **options: Any) -> Bundle:
    return store.bundle(add_model(store, None, seed, **options).id)


@pytest.mark.parametrize(
    ("model", "draft"),
    [
        ({}, {}),
        ({"vocabulary": 6000}, {"vocabulary": 6128}),  # padded otherwise
        ({"words": {0: "<s>", 4: "<unk>"}}, {"words": {0: "[BOS]"}}),  # marks may be called otherwise
        ({"metadata": BOS}, {"metadata": {"tokenizer.ggml.bos_token_id": 1}}),
        ({"metadata": {"tokenizer.ggml.bos_token_id": 1}}, {"metadata": {"tokenizer.ggml.bos_token_id": 2}}),
    ],
)
def test_what_llama_cpp_would_take(store: Store, model: dict[str, Any], draft: dict[str, Any]) -> None:
    assert vocabulary.difference(bundle(store, 1, **model), bundle(store, 2, **draft)) == ""


@pytest.mark.parametrize(
    ("model", "draft", "why"),
    [
        ({"metadata": BPE}, {"metadata": {"tokenizer.ggml.model": "llama"}}, "another kind of tokenizer"),
        ({"vocabulary": 6000}, {"vocabulary": 6129}, "another vocabulary (6129 words, not 6000)"),
        ({"vocabulary": 6000}, {"vocabulary": 6000, "words": {5999: "z"}}, "word 5999 is 'z', not 'token5999'"),
        ({}, {"words": {5: "five"}}, "word 5 is 'five'"),
        ({"metadata": BOS}, {"metadata": {**BOS, "tokenizer.ggml.bos_token_id": 2}}, "marks the beginning"),
        ({"metadata": BOS}, {"metadata": {"tokenizer.ggml.add_bos_token": False}}, "marks the beginning"),
    ],
)
def test_what_it_would_not(store: Store, model: dict[str, Any], draft: dict[str, Any], why: str) -> None:
    assert why in vocabulary.difference(bundle(store, 1, **model), bundle(store, 2, **draft))


def test_the_words_of_an_array_however_long(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", vocabulary=5000)
    assert gguf.read_strings(file, "tokenizer.ggml.tokens") == [f"token{n}".encode() for n in range(5000)]
    assert gguf.read_strings(file, "tokenizer.ggml.merges") == []
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:2000])
    with pytest.raises(InvalidModel):
        gguf.read_strings(tmp_path / "cut.gguf", "tokenizer.ggml.tokens")
