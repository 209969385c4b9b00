"""One answer of the model in a tool loop: the part that the client gets, and the calls that the daemon makes."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from modelrunner.gateway.dialects.assembly import Event, is_null
from modelrunner.gateway.dialects.bodies import with_members
from modelrunner.gateway.dialects.chunks import TokenUsage
from modelrunner.gateway.dialects.dialect import EVENT_STREAM, JSON, Translation
from modelrunner.gateway.dialects.openai import OpenAI
from modelrunner.gateway.dialects.openai_answer import OpenAIAnswer
from modelrunner.http.answers import Header

if TYPE_CHECKING:
    from modelrunner.engine.runner import Runner
    from modelrunner.gateway.calls import Inference

_GOES_ON = ("tool_calls", "stop")  # vLLM ends with "stop" if the request named the tool
_TOO_LONG = "length"
_SHARED = ("id", "created", "model")
_NULL = msgspec.Raw(b"null")
_events = msgspec.json.Decoder(list[Event])
_event = msgspec.json.Decoder(Event)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ToolCall(NamedTuple):
    """A call that the model wants. `arguments` is their JSON as text, which may be broken."""

    id: str
    name: str
    arguments: str

    def decoded(self) -> dict[str, Any] | None:
        """Returns the arguments; None if they are not a JSON object."""
        try:
            return msgspec.json.decode(self.arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeEncodeError):
            return None


def sse(data: bytes, event: str = "") -> bytes:
    """Returns a server-sent event, with the name `event` unless that is ""."""
    return (b"event: %b\n" % event.encode() if event else b"") + b"data: %b\n\n" % data


class ToolTurn(OpenAIAnswer):
    """A `Translation` of the engine's stream, with one choice. `theirs` are the names of the client's tools; a call of
    any other is ours. A client that `streams` gets the text at once, and the calls of its own tools; the end and the
    usage stay in `held`. `first` has the members of the first answer that all events of the client's stream share."""

    def __init__(self, theirs: Collection[str], *, streams: bool, first: Event) -> None:
        super().__init__()
        self.whole = not streams  # type: ignore[misc]  # of each answer
        self.headers: tuple[Header, ...] = EVENT_STREAM if streams else (JSON,)
        self.first = first
        self.held: list[Event] = []
        self.usage = TokenUsage()
        self._theirs = theirs
        self._streams = streams
        self._is_first = not first
        self._out: list[bytes] = []
        self._places: dict[int, int | None] = {}  # the client's index of each call, None for a call of ours

    def piece(self, data: bytes) -> bytes:
        super().piece(data)
        out, self._out = self._out, []
        return b"".join(out)

    def end(self) -> bytes:
        super().end()  # raises for an answer that is not complete
        return b""

    def add(self, event: Event) -> int:
        if (raw := event.get("usage")) is not None and not is_null(raw):
            self.usage = msgspec.json.decode(raw, type=TokenUsage)
        if not self.first:
            self.first = {name: event[name] for name in _SHARED if name in event}
        if self._streams:
            self._show({**event, **self.first})
        return super().add(event)

    # once it is complete

    def message(self) -> dict[str, Any]:
        """Returns the model's whole message."""
        return dict(self._choice().get("message") or {"role": "assistant", "content": ""})

    def calls(self) -> list[ToolCall]:
        """Returns the calls that the daemon makes. There are none if the answer is for the client: the model is done,
        wants one of the client's tools, or was cut off."""
        found = [_call(call, number) for number, call in enumerate(self.message().get("tool_calls") or ())]
        goes_on = self._choice().get("finish_reason") in _GOES_ON and not any(one.name in self._theirs for one in found)
        return found if goes_on else []

    def final(self, *, given_up: bool) -> dict[str, Any]:
        """Returns the answer without our calls. With `given_up` the loop ended before the model did: the answer ends
        like one that is too long."""
        answer = dict(super().answer())
        for choice in answer["choices"]:
            message = choice.get("message") or {}
            kept = [call for call in message.pop("tool_calls", ()) if _call(call, 0).name in self._theirs]
            if kept:
                message["tool_calls"] = kept
            if given_up:
                choice["finish_reason"] = _TOO_LONG
        return answer

    def last_events(self, *, given_up: bool) -> list[Event]:
        """Returns the held events of the client's stream, without the usage."""
        ends = []
        for event in self.held:
            choices = msgspec.json.decode(event["choices"])
            for choice in choices if given_up else ():
                choice["finish_reason"] = _TOO_LONG
            ends.append({**event, "choices": msgspec.Raw(msgspec.json.encode(choices))})
        return ends

    def _choice(self) -> dict[str, Any]:
        return dict(super().answer()["choices"][0])

    # while it comes

    def _show(self, event: Event) -> None:
        """Sends the client's part of an event, and holds the end back."""
        choices = _events.decode(event.get("choices", b"[]"))
        if not choices:
            return
        choice = choices[0]
        delta = self._shown(_event.decode(choice.get("delta", b"{}")))
        if not is_null(choice.get("finish_reason", _NULL)):
            self.held.append({**event, "choices": _raw([{**choice, "delta": _raw({}), "logprobs": _NULL}])})
            choice["finish_reason"] = _NULL
        if any(not is_null(raw) for raw in delta.values()):
            self._out.append(sse(msgspec.json.encode({**event, "choices": _raw([{**choice, "delta": _raw(delta)}])})))

    def _shown(self, delta: Event) -> Event:
        """Returns a delta for the client: with the role only once, and without parts of our calls."""
        if not self._is_first:
            delta.pop("role", None)
        raw = delta.pop("tool_calls", _NULL)
        parts = [] if is_null(raw) else [one for part in _events.decode(raw) if (one := self._part(part)) is not None]
        return {**delta, "tool_calls": _raw(parts)} if parts else delta

    def _part(self, part: Event) -> Event | None:
        """Returns a part of a call of the client's tools, with its index among these calls; None for a call of ours."""
        index = msgspec.json.decode(part.get("index", b"0"), type=int)
        if index not in self._places:
            name = msgspec.json.decode(part.get("function", b"{}"), type=dict[str, Any]).get("name")
            before = sum(place is not None for place in self._places.values())
            self._places[index] = before if name in self._theirs else None
        place = self._places[index]
        return None if place is None else {**part, "index": _raw(place)}


class TurnDialect(OpenAI):
    """OpenAI's dialect for one request of a loop. `turn` is the newest translation that `begin` made for its answer."""

    def __init__(self, begin: Callable[[], ToolTurn], *, streams: bool) -> None:
        self.turn: ToolTurn
        self._begin = begin
        self._streams = streams

    def request(self, ask: "Inference", runner: "Runner") -> tuple[str, bytes, Translation | None]:
        path, body, _ = super().request(ask, runner)
        if not self._streams and (more := runner.asked_as_streams.get(path)):
            body = with_members(_members.decode(body), more)
        self.turn = self._begin()
        return path, body, self.turn


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _call(found: dict[str, Any], number: int) -> ToolCall:
    function = found.get("function") or {}
    return ToolCall(found.get("id") or f"call_{number}", function.get("name") or "", function.get("arguments") or "")
