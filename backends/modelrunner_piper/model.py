"""Reads a voice of Piper: `NAME.onnx` and `NAME.onnx.json` beside it.

The members of the JSON are those that Piper reads (OHF-Voice/piper1-gpl, src/piper/config.py, `PiperConfig.from_dict`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelrunner.sdk import FileFormat, FormatReading, InvalidModel, ModelFormat, read_object

PIPER = ModelFormat("piper")
_LONGEST = 4 << 20
"""Bytes of the description."""
_MOST_SPEAKERS = 4096
_ALPHABETS = ("espeak", "text")
"""The kinds of phonemes that need no packages and no downloads besides Piper's own."""


def read(files: Mapping[str, Path]) -> FormatReading:
    """Reads the description. Raises `InvalidModel` for files that make no voice."""
    weights = next(name for name in files if name.endswith(".onnx"))
    description = f"{weights}.json"
    if description not in files:
        raise InvalidModel(f"{description} is missing beside {weights}")
    config = read_object(files[description], _LONGEST, description)
    audio, phonemes = config.get("audio"), config.get("phoneme_type", "espeak")
    rate = audio.get("sample_rate") if isinstance(audio, dict) else None
    if not isinstance(rate, int) or not 8000 <= rate <= 48000:
        raise InvalidModel(f"{description} names no sample rate from 8000 to 48000")
    if not isinstance(config.get("phoneme_id_map"), dict):
        raise InvalidModel(f"{description} has no phoneme_id_map: it describes no voice of Piper")
    if phonemes not in _ALPHABETS:
        raise InvalidModel(f"{description} has phonemes of the kind {phonemes!r}; {' and '.join(_ALPHABETS)} are known")
    espeak = config.get("espeak")
    language = espeak.get("voice") if isinstance(espeak, dict) else None
    return FormatReading(
        {
            "general.architecture": "vits",
            "sample_rate": rate,
            "language": str(language or ""),
            "voices": voices(config, weights),
        },
        frozenset({"speech"}),
    )


def voices(description: Mapping[str, Any], weights: str) -> list[str]:
    """Returns the names of the speakers, or that of the only one. Raises `InvalidModel`."""
    speakers = description.get("speaker_id_map") or {}
    if not isinstance(speakers, dict) or len(speakers) > _MOST_SPEAKERS:
        raise InvalidModel(f"the speaker_id_map is no object of at most {_MOST_SPEAKERS} speakers")
    name = description.get("dataset")
    return list(speakers) or [name if isinstance(name, str) and name else weights.removesuffix(".onnx")]


FORMAT = FileFormat(PIPER, "*.onnx", read, ("*.onnx.json",))
