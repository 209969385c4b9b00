"""The translations of an engine's stream: however the stream is cut, the client's answer is the same, and the answer in
one piece is what the events say together."""

from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.gateway.calls import Translation
from modelrunner.gateway.dialects.anthropic_translation import MessageEvents, WholeMessage
from modelrunner.gateway.dialects.ollama_answer import AnswerClock, OllamaLines, OllamaText
from modelrunner.gateway.dialects.responses_answer import ResponseEvents, WholeResponse
from modelrunner.gateway.dialects.responses_request import PreparedFields

Deltas = list[dict[str, Any]]
TEXTS = st.text(min_size=1, max_size=6)
PARTS = st.sampled_from(['{"a":', "1", "}", '"', "é"])
TOOLS = st.builds(
    lambda index, name, piece: {"tool_calls": [{"index": index, "function": {"name": name, "arguments": piece}}]},
    st.integers(0, 2),
    st.sampled_from(["add", None]),
    PARTS,
)
DELTAS = st.lists(
    st.one_of(
        TEXTS.map(lambda text: {"content": text}),
        TEXTS.map(lambda text: {"reasoning_content": text}),
        st.builds(lambda a, b: {"content": a, "reasoning": b}, TEXTS, TEXTS),
        TOOLS,
        st.just({"role": "assistant", "content": None}),
    ),
    max_size=8,
)
CUTS = st.lists(st.integers(0, 3000), max_size=20)


def stream(deltas: Deltas, reason: str) -> bytes:
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    chunks.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(chunk) for chunk in chunks) + b"data: [DONE]\n\n"


def answer(translation: Translation, data: bytes, cuts: list[int]) -> bytes:
    """What the client gets."""
    places = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = [translation.piece(data[start:end]) for start, end in pairwise(places)]
    return b"".join([*(() if translation.whole else pieces), translation.end()])


CHANGING = frozenset(
    (
        *("id", "item_id", "call_id", "created_at"),
        *("total_duration", "load_duration", "eval_duration", "prompt_eval_duration"),
    )
)


def still(value: Any) -> Any:
    """Without what is different each time."""
    match value:
        case dict():
            return {name: still(inner) for name, inner in value.items() if name not in CHANGING}
        case list():
            return [still(inner) for inner in value]
        case _:
            return value


def told(data: bytes) -> list[Any]:
    """The JSON of each line, of events or by itself."""
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line and not line.startswith(b"event: ")]
    return [still(msgspec.json.decode(line)) for line in lines]


def response_fields() -> PreparedFields:
    return PreparedFields(model="m", id="resp_1", created=1.0)


def messages_together(events: list[Any]) -> dict[str, Any]:
    message = dict(events[0]["message"])
    content: list[dict[str, Any]] = []
    partial = ""
    event: Any
    for event in events:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(content)
                content.append(dict(block))
            case {"type": "content_block_delta", "delta": {"partial_json": piece}}:
                partial = str(piece)
            case {"type": "content_block_delta", "delta": delta}:
                [name] = set(delta) - {"type"}
                assert delta["type"] == f"{name}_delta"
                content[-1][name] += delta[name]
            case {"type": "content_block_stop"} if content[-1]["type"] == "tool_use":
                try:
                    content[-1]["input"] = msgspec.json.decode(partial, type=dict[str, Any])
                except msgspec.DecodeError:
                    content[-1]["input"] = {}
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= {**delta, "usage": usage}
    return message | {"content": content}


def lines_together(lines: list[Any]) -> dict[str, Any]:
    *before, last = lines
    message = last["message"]
    message["content"] = "".join(line["message"]["content"] for line in before)
    if thought := "".join(line["message"].get("thinking", "") for line in before):
        message["thinking"] = thought
    for line in before:
        message |= {name: value for name, value in line["message"].items() if name == "tool_calls"}
    return dict(last)


Together = Callable[[list[Any]], Any]
FAMILIES: dict[str, tuple[Callable[[], Translation], Callable[[], Translation], Together]] = {
    "anthropic": (lambda: MessageEvents("m", [], ()), lambda: WholeMessage("m", [], ()), messages_together),
    "ollama": (
        lambda: OllamaLines("m", AnswerClock(perf_counter()), (), chat=True),
        lambda: OllamaText("m", AnswerClock(perf_counter()), (), chat=True),
        lines_together,
    ),
    "responses": (
        lambda: ResponseEvents(response_fields(), ()),
        lambda: WholeResponse(response_fields(), ()),
        lambda events: events[-1]["response"],
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@given(deltas=DELTAS, reason=st.sampled_from(["stop", "length", "tool_calls"]), cuts=CUTS)
def test_any_cut_gives_the_same_answer(family: str, deltas: Deltas, reason: str, cuts: list[int]) -> None:
    streamed, whole, together = FAMILIES[family]
    data = stream(deltas, reason)
    events = told(answer(streamed(), data, []))
    assert told(answer(streamed(), data, cuts)) == events
    assert told(answer(whole(), data, cuts)) == [together(events)]
