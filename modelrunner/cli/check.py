"""The command check, which tries what programs ask of a model: conversations, tools, structured output, thinking,
images, and a full window."""

import json
import math
import struct
import time
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import click
import msgspec

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.answer import Answer, Quiet, receive
from modelrunner.cli.client import HttpClient, path
from modelrunner.cli.common_options import json_option, with_client
from modelrunner.cli.prepare import prepare
from modelrunner.errors import ModelRunnerError, TimedOut

_TOKENS = 192  # of an answer; a model that thinks gets four times as many
_PATIENCE = 120.0  # seconds of one answer
_EXPECTED_FILL = 20.0  # seconds that the prompt of a full window may take by the speed of a short one
_LONGEST_FILL = 40.0  # seconds that it may then take
_FULL = 0.9  # the part of the window that counts as full
_WORD = "word "
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the present weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_QUESTION = "What is the weather in Paris? Use the tool."
_CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Check(msgspec.Struct, frozen=True):
    """`verdict` is passed, failed or skipped; `detail` says what came, or why nothing was asked. `matters` says for
    whom."""

    name: str
    matters: str
    verdict: str
    detail: str = ""
    seconds: float = 0.0


class CheckReport(msgspec.Struct, frozen=True):
    """The output of `check --json`."""

    model: str
    checks: list[Check]


class _NotAsAsked(Exception):
    """The answer is not what the conversation asked for."""


class _NotHeld(Exception):
    """The conversation was not held, for this reason."""


class _Checker:
    """The conversations with one model."""

    def __init__(self, client: HttpClient, model: str, shown: wire.Model) -> None:
        self._client, self._model = client, model
        self._able, self._window = frozenset(shown.capabilities), shown.context_window or 0
        self._tokens = _TOKENS * (4 if "reasoning" in self._able else 1)

    def checks(self) -> Iterator[tuple[str, str, str, Callable[[], str]]]:
        """Yields the name of each conversation, for whom it matters, why it is left out ("" if it is not), and the
        conversation: it returns what was seen, and raises `_NotAsAsked`
        or `_NotHeld`."""
        tools = "" if "tools" in self._able else "its chat template has no tools"
        thinks = "" if "reasoning" in self._able else "it does not think"
        sees = "" if "vision" in self._able else "it takes no images"
        yield "system prompt", "every program", "", self._system
        yield "several turns", "every chat", "", self._turns
        yield "stream", "every chat", "", self._stream
        yield "two users in turn", "agents, group chats", "", self._two_users
        yield "tool call", "agents", tools, lambda: self._call("required")
        yield "tool call unasked", "agents", tools, lambda: self._call("auto")
        yield "tool result", "agents", tools, self._result
        yield "schema", "programs that read the answer", "", lambda: self._schema(thinks=None)
        yield "schema with thinking", "programs that read the answer", thinks, lambda: self._schema(thinks=True)
        yield "thinking", "chats that show it", thinks, self._thinking
        yield "no thinking", "quick answers", thinks, self._no_thinking
        yield "image", "programs that send images", sees, self._picture
        yield "full window", "agents, long documents", "" if self._window else "its window is not known", self._fill

    def _ask(self, messages: list[dict[str, Any]], **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the message and the usage of an answer."""
        body = {"model": self._model, "messages": messages, "max_tokens": self._tokens, "temperature": 0, **options}
        answer = self._client.call("POST", "/v1/chat/completions", dict[str, Any], body, timeout=_PATIENCE)
        return answer["choices"][0]["message"], answer.get("usage") or {}

    def _said(self, messages: list[dict[str, Any]], **options: Any) -> str:
        message, _ = self._ask(messages, **options)
        if not (text := (message.get("content") or "").strip()):
            raise _NotAsAsked("it says nothing")
        return text

    def _system(self) -> str:
        return self._said([_message("system", "You are a helpful assistant."), _message("user", "Name a colour.")])

    def _turns(self) -> str:
        turns = [_message("user", "My name is Ada."), _message("assistant", "Hello Ada!")]
        return self._said([*turns, _message("user", "What is my name?")])

    def _stream(self) -> str:
        answer, ending = Answer(), {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self._model, "messages": [_message("user", "Count from one to ten.")], **ending}
        pieces = sum(1 for _ in receive(self._client, body | {"max_tokens": self._tokens}, Quiet(), answer))
        if not answer.usage.get("completion_tokens"):
            raise _NotAsAsked("the stream ends without a count of its tokens")
        return f"{answer.usage['completion_tokens']} tokens in {pieces} pieces" if pieces else "a stream"

    def _two_users(self) -> str:
        return self._said([_message("user", "Here is a note."), _message("user", "What did I give you?")])

    def _call(self, choice: str) -> str:
        message, _ = self._ask([_message("user", _QUESTION)], tools=[_WEATHER], tool_choice=choice)
        if not (calls := message.get("tool_calls")):
            raise _NotAsAsked(f"it answers in words: {_cut(message.get('content') or 'nothing')}")
        arguments = _parsed(calls[0]["function"]["arguments"])
        if calls[0]["function"]["name"] != "get_weather" or not isinstance(arguments.get("city"), str):
            raise _NotAsAsked(f"it calls {_cut(json.dumps(calls[0]['function']))}")
        return f"get_weather({arguments['city']!r})"

    def _result(self) -> str:
        called = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
        result = {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "clear", "celsius": 21}'}
        return self._said([_message("user", _QUESTION), called, result], tools=[_WEATHER])

    def _schema(self, *, thinks: bool | None) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": _PERSON}}
        text = self._said([_message("user", "Invent a person.")], response_format=form, **_thinking(thinks))
        person = _parsed(text)
        if person.keys() != {"name", "age"} or type(person["age"]) is not int:
            raise _NotAsAsked(f"it is not of the schema: {_cut(text)}")
        return text

    def _thinking(self) -> str:
        message, _ = self._ask([_message("user", "Is 91 a prime number?")], **_thinking(True))
        if not (thought := message.get("reasoning_content")):
            raise _NotAsAsked("no thinking comes apart from the answer")
        return str(thought)

    def _no_thinking(self) -> str:
        message, _ = self._ask([_message("user", "Say hello.")], **_thinking(False))
        if message.get("reasoning_content") or "<think>" in (message.get("content") or ""):
            raise _NotAsAsked("it thinks although it was told not to")
        return message.get("content") or ""

    def _picture(self) -> str:
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(_png()).decode()}"}}
        question = {"type": "text", "text": "Which colour is this?"}
        return self._said([{"role": "user", "content": [question, picture]}])

    def _fill(self) -> str:
        counts = [self._timed(words) for words in (64, 512)]
        (few, _), (many, seconds) = counts
        each = (many - few) / (512 - 64)
        room = self._window - 64
        expected = seconds * room / max(1, many)
        if expected > _EXPECTED_FILL:
            raise _NotHeld(f"the prompt alone would take about {expected:.0f} s here")
        used, _ = self._timed(math.floor((room - few) / each) + 64 if each else 64, _LONGEST_FILL)
        if used < _FULL * self._window:
            raise _NotAsAsked(f"only {used} of {self._window} tokens were read")
        return f"{used} of {self._window} tokens"

    def _timed(self, words: int, patience: float = _PATIENCE) -> tuple[int, float]:
        """Returns the tokens of a prompt, and the seconds until its first token."""
        begin = time.monotonic()
        question = [_message("user", f"{begin} {_WORD * words}")]
        body = {"model": self._model, "messages": question, "max_tokens": 1, "temperature": 0, **_thinking(None)}
        answer = self._client.call("POST", "/v1/chat/completions", dict[str, Any], body, timeout=patience)
        return int((answer.get("usage") or {}).get("prompt_tokens", 0)), time.monotonic() - begin


@click.command()
@click.argument("model")
@json_option
@with_client()
def check(client: HttpClient, model: str, as_json: bool) -> int:
    """Try what programs ask of a model: tools, schemas, thinking, a full window.

    It holds a dozen short conversations: turns, tools, structured output, thinking, images, and a prompt that fills
    the window. A failure is the model's or its chat template's; the exit code is then 1. `modelrunner list`, the page
    and /v1/models show the result until the model, its settings or its engine change.
    """
    name = prepare(client, model, backend=None, context_size=None)
    checker = _Checker(client, name, client.call("GET", path("models", name), wire.Model))
    done = [_tried(*each) for each in checker.checks()]
    report = CheckReport(name, done)
    failed = [each.name for each in done if each.verdict == "failed"]
    passed = sum(each.verdict == "passed" for each in done)
    try:
        client.call("POST", path("models", name, "check"), wire.ModelCheck, wire.CheckOutcome(passed, failed))
    except ModelRunnerError as error:
        output.note(f"the result is not kept for lists: {error.message}")
    if as_json:
        output.json(msgspec.json.encode(report))
    else:
        rows = [(each.verdict, each.name, each.matters, _cut(each.detail)) for each in done]
        output.table(["RESULT", "CHECK", "MATTERS FOR", "WHAT CAME"], rows, expendable=("MATTERS FOR",))
        output.say(f"{name}: {passed} of {passed + len(failed)} passed")
    return int(bool(failed))


def _tried(name: str, matters: str, reason: str, conversation: Callable[[], str]) -> Check:
    if reason:
        return Check(name, matters, "skipped", reason)
    output.note(name)
    begin = time.monotonic()
    try:
        verdict, detail = "passed", conversation()
    except _NotHeld as error:
        verdict, detail = "skipped", str(error)
    except TimedOut:  # the machine is slow: that is no fault of the model
        verdict, detail = "skipped", f"no answer within {time.monotonic() - begin:.0f} s here"
    except _NotAsAsked as error:
        verdict, detail = "failed", str(error)
    except ModelRunnerError as error:
        verdict, detail = "failed", error.message
    return Check(name, matters, verdict, detail, round(time.monotonic() - begin, 2))


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _thinking(on: bool | None) -> dict[str, Any]:
    return {} if on is None else {"chat_template_kwargs": {"enable_thinking": on}}


def _parsed(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise _NotAsAsked(f"it is no JSON object: {_cut(text)}")
    return value


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def _png() -> bytes:
    """Returns a red square as a picture (https://www.w3.org/TR/png-3/)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    side = 64
    rows = (b"\0" + b"\xff\0\0" * side) * side
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
