"""The reader of Whisper models in CTranslate2's format."""

from pathlib import Path

import pytest

from modelrunner.errors import InvalidModel
from modelrunner.types import Mode, RunSpec
from modelrunner_whisper import memory
from modelrunner_whisper.model import FORMAT, read
from tests.whisper.files import SHAPES, VOCABULARY, WIDTH, model, weights


def write(folder: Path, files: dict[str, bytes]) -> dict[str, Path]:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return {name: folder / name for name in files}


def test_what_a_model_is(tmp_path: Path) -> None:
    found = read(write(tmp_path, model()))
    matrices = VOCABULARY * WIDTH
    assert found.metadata == {
        "general.architecture": "whisper",
        "parameters": matrices + WIDTH * 80 * 3 + 2 * WIDTH,
        "matrices": matrices,
        "width": WIDTH,
        "bands": 80,
        "vocabulary": VOCABULARY,
        "layers": 2,
        "multilingual": True,
    }
    assert (found.capabilities, found.quantization) == (frozenset({"transcription"}), "F16")


def test_a_model_of_english_alone(tmp_path: Path) -> None:
    english = weights({**SHAPES, "decoder/embeddings/weight": (VOCABULARY - 1, WIDTH)})
    assert read(write(tmp_path, {**model(), "model.bin": english})).metadata["multilingual"] is False


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "vocabulary.txt"])
def test_a_file_that_is_missing(tmp_path: Path, missing: str) -> None:
    files = {name: data for name, data in model().items() if name != missing}
    with pytest.raises(InvalidModel, match=f"{missing[:10]}.* is missing"):
        read(write(tmp_path, files))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is cut"),
        (b"PK\x03\x04 a pickle of torch", "no model of CTranslate2"),
        (weights(version=5), "no model of CTranslate2"),
        (weights(specification="TransformerSpec"), "no Whisper model"),
        (weights({}), "lacks the weights"),
        (weights({**SHAPES, "encoder/conv1/weight": (1,)}), "lacks the weights"),
        (weights()[:-5], "is cut"),
        (weights()[:200_000], "is cut: it ends in the variable 'decoder/embeddings/weight'"),
        (weights()[:24] + b"\xff\xff\xff\xff", "variables"),
    ],
)
def test_weights_that_are_none(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(InvalidModel, match=said):
        read(write(tmp_path, {**model(), "model.bin": data}))


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 10_000, b" " * ((1 << 20) + 1)])
def test_a_configuration_that_is_none(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InvalidModel, match=r"config\.json"):
        read(write(tmp_path, {**model(), "config.json": data}))


def test_the_files_of_a_repository() -> None:
    there = ["README.md", ".gitattributes", "pickle.bin", *model(), "preprocessor_config.json"]
    assert sorted(FORMAT.chosen(there)) == sorted([*model(), "preprocessor_config.json"])


def test_memory_grows_with_sequences_and_with_the_type(whisper: RunSpec) -> None:
    small = memory.required(whisper).ram
    assert memory.growth(whisper).ram < small
    more = RunSpec(whisper.model_id, whisper.bundle, Mode("transcription"), 1500, 2 * whisper.parallel)
    exact = RunSpec(
        whisper.model_id, whisper.bundle, Mode("transcription"), 1500, 1, options={"compute-type": "float32"}
    )
    assert memory.required(more).ram == small + memory.growth(whisper).ram
    assert memory.required(exact).ram == small + 3 * VOCABULARY * WIDTH


@pytest.fixture
def whisper(tmp_path: Path, known_format: None) -> RunSpec:
    from modelrunner.testing import spec_for

    (tmp_path / "model").mkdir()
    write(tmp_path / "model", model())
    return spec_for(tmp_path / "model", tmp_path)
