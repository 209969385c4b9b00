"""The forms of an answer: JSON, text, subtitles, and events of a stream. Pure."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modelrunner_form import Task
from modelrunner_http import event


@dataclass(frozen=True)
class Word:
    """Times are in seconds."""

    word: str
    start: float
    end: float


@dataclass(frozen=True)
class Segment:
    """A piece of the text with its times in seconds, and Whisper's own figures about it."""

    start: float
    end: float
    text: str
    tokens: Sequence[int] = ()
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    words: Sequence[Word] = ()


@dataclass(frozen=True)
class Heard:
    """All that was heard. `language` is a code, `duration` in seconds."""

    language: str
    duration: float
    segments: Sequence[Segment]

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def usage(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": math.ceil(self.duration)}


def answer(task: Task, heard: Heard) -> tuple[str, bytes]:
    """Returns the media type and the body."""
    match task.format:
        case "text":
            return "text/plain; charset=utf-8", f"{heard.text}\n".encode()
        case "srt":
            return "application/x-subrip; charset=utf-8", _srt(heard.segments).encode()
        case "vtt":
            return "text/vtt; charset=utf-8", _vtt(heard.segments).encode()
        case "verbose_json":
            return "application/json", _encoded(_verbose(task, heard))
        case _:
            return "application/json", _encoded({"text": heard.text, "usage": heard.usage})


def delta(text: str) -> bytes:
    """Returns the event of the next piece of the text."""
    return event({"type": "transcript.text.delta", "delta": text})


def done(heard: Heard) -> bytes:
    """Returns the last event of a stream."""
    return event({"type": "transcript.text.done", "text": heard.text, "usage": heard.usage})


def _encoded(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode()


def _verbose(task: Task, heard: Heard) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "task": task.name,
        "language": heard.language,
        "duration": heard.duration,
        "text": heard.text,
    }
    if task.words:
        words = [word for segment in heard.segments for word in segment.words]
        answer["words"] = [{"word": word.word.strip(), "start": word.start, "end": word.end} for word in words]
    if task.segments:
        answer["segments"] = [
            {
                "id": number,
                "seek": round(segment.start * 100),
                "start": segment.start,
                "end": segment.end,
                "text": segment.text,
                "tokens": list(segment.tokens),
                "temperature": segment.temperature,
                "avg_logprob": segment.avg_logprob,
                "compression_ratio": segment.compression_ratio,
                "no_speech_prob": segment.no_speech_prob,
            }
            for number, segment in enumerate(heard.segments)
        ]
    return answer | {"usage": heard.usage}


def _srt(segments: Sequence[Segment]) -> str:
    """Numbered subtitles (SubRip)."""
    return "".join(
        f"{number}\n{_clock(segment.start, ',')} --> {_clock(segment.end, ',')}\n{_line(segment)}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def _vtt(segments: Sequence[Segment]) -> str:
    """Subtitles for browsers (https://www.w3.org/TR/webvtt1/)."""
    cues = (f"{_clock(s.start, '.')} --> {_clock(s.end, '.')}\n{_line(s)}\n\n" for s in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _line(segment: Segment) -> str:
    return segment.text.strip().replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    thousandths = round(seconds * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
