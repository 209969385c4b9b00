import time

import pytest

from modelrunner.errors import InvalidModel, ModelNotFound, UnsupportedModel
from modelrunner.pull.selection import choose, folder_in, quantization_of, quantizations, with_shards
from modelrunner.store import foreignformats
from modelrunner_piper.model import FORMAT as VOICE


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3-0.6B-Q4_K_M", "Q4_K_M"),
        ("smollm2.q4_1", "Q4_1"),
        ("UD-Q4_K_XL/big-UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("IQ2_XXS/model", "IQ2_XXS"),
        ("gpt-oss-20b-MXFP4", "MXFP4"),
        ("bert-fp16", "F16"),
        ("bert-BF16", "BF16"),
        ("Qwen2.5-7B-Instruct", ""),
    ],
)
def test_the_quantization_is_read_from_the_name(name: str, expected: str) -> None:
    assert quantization_of(name) == expected


@pytest.mark.parametrize(
    ("offered", "expected"),
    [
        (["a-Q8_0.gguf", "a-Q4_K_M.gguf", "a-F16.gguf"], "a-Q4_K_M.gguf"),
        (["a-Q8_0.gguf", "a-Q5_K_M.gguf", "a-Q2_K.gguf"], "a-Q5_K_M.gguf"),
        (["a-IQ1_S.gguf", "a-F32.gguf"], "a-F32.gguf"),
        (["b.gguf", "a.gguf"], "a.gguf"),
        (["deep/a-Q4_K_M.gguf", "z-Q4_K_M.gguf"], "z-Q4_K_M.gguf"),
        (["imatrix-Q4_K_M.gguf", "a-Q8_0.gguf"], "a-Q8_0.gguf"),
    ],
)
def test_the_default_is_the_nearest_to_q4_k_m(offered: list[str], expected: str) -> None:
    assert choose(offered, None, "here") == {"model.gguf": expected}


def test_a_file_may_be_named_instead_of_a_quantization() -> None:
    assert choose(["a-Q4_0.gguf", "b-Q4_0.gguf"], "B-Q4_0.GGUF", "here") == {"model.gguf": "b-Q4_0.gguf"}


def test_shards_are_taken_together_and_in_order() -> None:
    offered = ["m-Q4_0-00002-of-00002.gguf", "m-Q4_0-00001-of-00002.gguf", "m-Q8_0.gguf"]
    assert choose(offered, "q4_0", "here") == {
        "model-00001-of-00002.gguf": "m-Q4_0-00001-of-00002.gguf",
        "model-00002-of-00002.gguf": "m-Q4_0-00002-of-00002.gguf",
    }


def test_quantizations_are_offered_with_the_default_first() -> None:
    offered = ["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-Q2_K-00001-of-00002.gguf", "mmproj-m-F16.gguf", "imatrix-Q6_K.gguf"]
    assert quantizations([*offered, "README.md", "plain.gguf"]) == ["Q4_K_M", "Q8_0"]


def test_an_incomplete_set_of_shards_is_not_offered() -> None:
    with pytest.raises(ModelNotFound, match="it has Q8_0"):
        choose(["m-Q4_0-00001-of-00002.gguf", "m-Q8_0.gguf"], "Q4_0", "here")


def test_the_projector_comes_with_the_model_and_is_never_taken_for_one() -> None:
    offered = ["mmproj-m-F32.gguf", "mmproj-m-F16.gguf", "m-Q8_0.gguf"]
    assert choose(offered, None, "here") == {"model.gguf": "m-Q8_0.gguf", "mmproj.gguf": "mmproj-m-F16.gguf"}
    with pytest.raises(UnsupportedModel, match="here holds no complete model in GGUF"):
        choose(offered[:2], None, "here")


def test_one_file_brings_its_shards() -> None:
    names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "other.gguf"]
    assert list(with_shards(names, names[1]).values()) == names[:2]
    assert with_shards(names, "other.gguf") == {"model.gguf": "other.gguf"}
    with pytest.raises(InvalidModel, match=r"m-00002-of-00002\.gguf is missing"):
        with_shards(names[:1], names[0])


def test_shards_in_other_letters() -> None:
    names = ["Big-Q8_0-00001-OF-00002.GGUF", "big-q8_0-00002-of-00002.gguf"]
    expected = {"model-00001-of-00002.gguf": names[0], "model-00002-of-00002.gguf": names[1]}
    assert choose(names, "q8_0", "x") == expected
    assert with_shards(names, names[0]) == expected


def test_the_outermost_folder_with_a_model_is_taken() -> None:
    names = [
        *("a/config.json", "a/README.md", "a/b/c/config.json", "a/b/c/model.safetensors"),
        "a/b/c/1_Pooling/x.json",
    ]
    inner = {"config.json": "a/b/c/config.json", "1_Pooling/x.json": "a/b/c/1_Pooling/x.json"}
    assert folder_in(names, trust=False) == {**inner, "model.safetensors": "a/b/c/model.safetensors"}
    outer = {"config.json": "a/config.json", "m.safetensors": "a/m.safetensors"}
    assert folder_in([*names, "a/m.safetensors"], trust=False) == outer
    assert folder_in(["config.json", "model.safetensors"], trust=False).keys() == {"config.json", "model.safetensors"}


def test_weights_at_any_depth_tell_the_formats_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(foreignformats._formats, VOICE.format, VOICE)
    names = ["a/joe.onnx", "a/joe.onnx.json"]
    assert folder_in(names, trust=False) == {"joe.onnx": "a/joe.onnx", "joe.onnx.json": "a/joe.onnx.json"}
    assert folder_in([*names, "a/b/c/d/other.safetensors"], trust=False) == {}


@pytest.mark.parametrize("name", ["a{}/config.json", "{}config.json"])
def test_the_work_grows_with_the_names(name: str) -> None:
    def seconds(count: int) -> float:
        names = [name.format(n) for n in range(count)]
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            assert folder_in(names, trust=False) == {}
            best = min(best, time.process_time() - began)
        return best

    assert seconds(8000) < 8 * seconds(2000)
