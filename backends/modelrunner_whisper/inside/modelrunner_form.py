"""What a request asks for, read from its form as OpenAI's API has it
(https://platform.openai.com/docs/api-reference/audio)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from modelrunner_http import Refused

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
_GRANULARITIES = ("word", "segment")
_LONGEST_PROMPT = 4000
"""Characters; Whisper reads the last 223 tokens."""
_NOT_HERE = {
    "include[]": "log probabilities of tokens are not given here",
    "include": "log probabilities of tokens are not given here",
    "known_speaker_names[]": "speakers are not told apart here",
    "known_speaker_references[]": "speakers are not told apart here",
}
_OFF = ("", "false", "0", "none", "null")


@dataclass(frozen=True)
class Task:
    """`name` is "transcribe" or "translate" (to English). `language` is a code such as "en", None to detect it. With
    `pauses`, silence is left out before Whisper hears it."""

    name: str
    format: str = "json"
    language: str | None = None
    prompt: str | None = None
    temperature: float = 0.0
    words: bool = False
    segments: bool = True
    stream: bool = False
    pauses: bool = False


def read(name: str, texts: Mapping[str, Sequence[str]], languages: Collection[str]) -> Task:
    """Reads the parts of a form that are no files, by their names. Raises `Refused`."""
    for part, reason in _NOT_HERE.items():
        if texts.get(part):
            raise Refused(f"{reason}: leave out `{part}`", part)
    format = _one(texts, "response_format") or "json"
    if format not in FORMATS:
        raise Refused(f"`response_format` is one of {', '.join(FORMATS)}, not {format[:40]!r}", "response_format")
    stream = (_one(texts, "stream") or "").lower() not in _OFF
    if stream and format not in ("json", "text"):
        raise Refused(f"a stream has the text alone: leave out `stream` for {format}", "stream")
    granularities = [*texts.get("timestamp_granularities[]", ()), *texts.get("timestamp_granularities", ())]
    if unknown := [each for each in granularities if each not in _GRANULARITIES]:
        raise Refused(
            f"`timestamp_granularities[]` is word or segment, not {unknown[0][:40]!r}", "timestamp_granularities"
        )
    if granularities and format != "verbose_json":
        raise Refused("`timestamp_granularities[]` needs the `response_format` verbose_json", "timestamp_granularities")
    return Task(
        name,
        format,
        _language(_one(texts, "language"), languages),
        _prompt(_one(texts, "prompt")),
        _temperature(_one(texts, "temperature")),
        "word" in granularities,
        not granularities or "segment" in granularities,
        stream,
        (_one(texts, "chunking_strategy") or "").lower() not in _OFF,
    )


def _one(texts: Mapping[str, Sequence[str]], name: str) -> str | None:
    values = texts.get(name, ())
    if len(values) > 1:
        raise Refused(f"`{name}` must be given once", name)
    return values[0].strip() if values else None


def _language(language: str | None, languages: Collection[str]) -> str | None:
    if not language:
        return None
    code = language.lower()
    if code not in languages:
        known = ", ".join(sorted(languages))
        raise Refused(f"this model does not know the language {language[:40]!r}; it knows {known}", "language")
    return code


def _prompt(prompt: str | None) -> str | None:
    if prompt and len(prompt) > _LONGEST_PROMPT:
        raise Refused(f"`prompt` has {len(prompt)} characters, and may have {_LONGEST_PROMPT}", "prompt")
    return prompt or None


def _temperature(temperature: str | None) -> float:
    try:
        value = float(temperature or 0)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise Refused(f"`temperature` is a number from 0 to 1, not {(temperature or '')[:40]!r}", "temperature")
    return value
