"""The files of a voice."""

import json
from pathlib import Path

import pytest

from modelrunner.sdk import InvalidModel
from modelrunner_piper.model import FORMAT, read

DESCRIPTION = {
    "audio": {"sample_rate": 22050},
    "espeak": {"voice": "en-us"},
    "phoneme_type": "espeak",
    "phoneme_id_map": {"a": [1]},
    "dataset": "joe",
}


def voice(folder: Path, description: object) -> dict[str, Path]:
    files = {name: folder / name for name in ("v.onnx", "v.onnx.json")}
    files["v.onnx"].write_bytes(b"weights")
    files["v.onnx.json"].write_text(description if isinstance(description, str) else json.dumps(description))
    return files


def test_a_voice_with_one_speaker_has_the_name_of_its_dataset(tmp_path):
    reading = read(voice(tmp_path, DESCRIPTION))
    assert reading.capabilities == {"speech"}
    assert reading.metadata["voices"] == ["joe"]
    assert (reading.metadata["language"], reading.metadata["sample_rate"]) == ("en-us", 22050)


def test_a_voice_with_several_speakers_has_their_names(tmp_path):
    assert read(voice(tmp_path, DESCRIPTION | {"speaker_id_map": {"a": 0, "b": 1}})).metadata["voices"] == ["a", "b"]


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        ("no json", "is not valid JSON"),
        ([], "is not a JSON object"),
        ({}, "sample rate"),
        (DESCRIPTION | {"audio": {"sample_rate": 10**9}}, "sample rate"),
        (DESCRIPTION | {"phoneme_id_map": None}, "phoneme_id_map"),
        (DESCRIPTION | {"phoneme_type": "pinyin"}, "'pinyin'"),
        (DESCRIPTION | {"speaker_id_map": [1]}, "speaker_id_map"),
    ],
)
def test_other_files_are_refused_with_the_reason(tmp_path, description, reason):
    with pytest.raises(InvalidModel, match=reason):
        read(voice(tmp_path, description))


def test_the_description_must_be_there(tmp_path):
    files = voice(tmp_path, DESCRIPTION)
    del files["v.onnx.json"]
    with pytest.raises(InvalidModel, match=r"v\.onnx\.json is missing"):
        read(files)


def test_the_files_of_a_voice_are_chosen_from_others():
    assert FORMAT.chosen(["v.onnx.json", "README.md", "v.onnx"]) == ["v.onnx", "v.onnx.json"]
