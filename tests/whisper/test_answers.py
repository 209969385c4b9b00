"""The forms of answers, and what a form asks for."""

import json
from typing import Any

import pytest
from modelrunner_answers import Heard, Segment, Word, answer, delta, done
from modelrunner_form import Task, read
from modelrunner_http import Refused

HEARD = Heard(
    "en",
    5.69,
    [
        Segment(0.0, 2.54, " Close the door.", (1, 2), words=[Word(" Close", 0.0, 1.0)]),
        Segment(3661.2345, 3662.0, " An --> arrow.", (3,)),
    ],
)


def body(**task: Any) -> str:
    return str(answer(Task("transcribe", **task), HEARD)[1], "utf-8")


def test_text_and_json() -> None:
    assert body(format="text") == "Close the door. An --> arrow.\n"
    assert json.loads(body()) == {
        "text": "Close the door. An --> arrow.",
        "usage": {"type": "duration", "seconds": 6},
    }


def test_subtitles() -> None:
    assert body(format="srt") == (
        "1\n00:00:00,000 --> 00:00:02,540\nClose the door.\n\n2\n01:01:01,234 --> 01:01:02,000\nAn -> arrow.\n\n"
    )
    assert body(format="vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:02.540\nClose the door.\n\n")


def test_the_long_form_has_what_was_asked_for() -> None:
    plain = json.loads(body(format="verbose_json"))
    assert (plain["language"], plain["duration"], "words" in plain) == ("en", 5.69, False)
    assert [(s["id"], s["start"], s["text"]) for s in plain["segments"]] == [
        (0, 0.0, " Close the door."),
        (1, 3661.2345, " An --> arrow."),
    ]
    words = json.loads(body(format="verbose_json", words=True, segments=False))
    assert (words["words"], "segments" in words) == ([{"word": "Close", "start": 0.0, "end": 1.0}], False)


def test_events() -> None:
    assert delta("Hi\n") == b'data: {"type": "transcript.text.delta", "delta": "Hi\\n"}\n\n'
    assert b'"transcript.text.done", "text": "Close the door. An --> arrow."' in done(HEARD)


def form(**texts: str | list[str]) -> Task:
    given = {name: [value] if isinstance(value, str) else value for name, value in texts.items()}
    return read("transcribe", given, ["de", "en"])


def test_a_form_with_everything() -> None:
    granular: Any = {"timestamp_granularities[]": ["word", "segment"]}
    asked = form(
        response_format="verbose_json", language="DE", prompt="Zürich", temperature="0.5", stream="false", **granular
    )
    assert asked == Task("transcribe", "verbose_json", "de", "Zürich", 0.5, words=True)
    assert form() == Task("transcribe")
    assert form(stream="true", language="", prompt="", temperature="") == Task("transcribe", stream=True)


@pytest.mark.parametrize(
    ("texts", "param"),
    [
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": ["json", "text"]}, "response_format"),
        ({"language": "klingon"}, "language"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"temperature": "1.1"}, "temperature"),
        ({"prompt": "x" * 4001}, "prompt"),
        ({"stream": "true", "response_format": "srt"}, "stream"),
        ({"include[]": "logprobs"}, "include[]"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"timestamp_granularities[]": "letter", "response_format": "verbose_json"}, "timestamp_granularities"),
        ({"known_speaker_names[]": "Kim"}, "known_speaker_names[]"),
    ],
)
def test_what_a_form_may_not_ask_for(texts: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as caught:
        form(**texts)
    assert (caught.value.status, caught.value.param) == (400, param)
