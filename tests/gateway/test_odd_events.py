"""Events of an engine that are JSON but not what they should be: an answer, or a fault of the engine in words, in a
time and a memory that their length bounds. Each test prints its figures (`-rP`)."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.errors import ModelRunnerError
from modelrunner.gateway.calls import Translation
from modelrunner.gateway.dialects.openai_answer import OpenAIAnswer
from modelrunner.gateway.engine_errors import EngineRefused
from modelrunner.gateway.request.required_calls import RequiredCalls
from tests.fuzzing import Figures
from tests.gateway.test_assembly import KINDS
from tests.gateway.test_translations import FAMILIES, stream

DEEP = "[" * 990 + "]" * 990
ODD = [
    *("null", "true", "-1", "1.5", "1e400", "9" * 30, "9" * 400, '""', '"x"', '"{\\"a\\":"', '"\\ud800"', "[]", "{}"),
    *("[null]", "[[]]", "[{}]", '{"":null}', '{"message":7}', DEEP, f'"{DEEP}"', '"{\\"a\\":[' + "[" * 2000 + '"'),
]
CALL = {"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a":1}'}}
CHUNKS = stream([{"content": "hi", "reasoning_content": "hm"}, {"tool_calls": [CALL]}], "stop")
CALLS = stream([{"content": '[{"name":"f",'}, {"content": '"arguments":{"a":1}}]'}], "stop")
MADE: dict[str, tuple[Callable[[], Translation], bytes]] = {
    **{f"{name}, streamed": (streamed, CHUNKS) for name, (streamed, _, _) in FAMILIES.items()},
    **{f"{name}, whole": (whole, CHUNKS) for name, (_, whole, _) in FAMILIES.items()},
    **{path: (make, data) for path, make, data, _ in KINDS},
    "a required call, streamed": (lambda: RequiredCalls(None), CALLS),
    "a required call, whole": (lambda: RequiredCalls(OpenAIAnswer()), CALLS),
}


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*place, key))


def with_odd(value: Any, place: tuple[Any, ...], odd: msgspec.Raw | None) -> Any:
    """`value` with `odd` at `place`, or without that place."""
    if not place:
        return odd
    changed = dict(value) if isinstance(value, dict) else list(value)
    if odd is None and len(place) == 1:
        del changed[place[0]]
    else:
        changed[place[0]] = with_odd(value[place[0]], place[1:], odd)
    return changed


@pytest.mark.parametrize("answer", MADE)
def test_an_odd_event_is_an_answer_or_a_fault_of_the_engine(answer: str) -> None:
    make, events = MADE[answer]
    figures = Figures()

    def read(stream: bytes) -> None:
        made = make()
        try:
            written = made.piece(stream) + made.end()
        except (ModelRunnerError, EngineRefused):
            return
        assert written.decode()

    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        lines = events.splitlines()
        number = data.draw(st.sampled_from([n for n, line in enumerate(lines) if line.startswith(b"data: {")]))
        event = msgspec.json.decode(lines[number].removeprefix(b"data: "))
        place = data.draw(st.sampled_from(list(places(event))))
        odd = data.draw(st.sampled_from([None, *ODD] if place else ODD))
        changed = with_odd(event, place, None if odd is None else msgspec.Raw(odd.encode()))
        lines[number] = b"data: " + msgspec.json.encode(changed)
        stream = b"\n".join(lines) + b"\n\n"
        figures.take(lambda: read(stream), len(stream))

    check()
    print(figures)
