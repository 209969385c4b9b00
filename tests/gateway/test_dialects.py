"""Families of APIs: what a client of each sees, before its request reaches an engine, on the way, and after it."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from modelrunner.engine.runner import Runner
from modelrunner.errors import BadRequest, EngineProtocolError, ModelRunnerError, NotImplementedHere, Unavailable
from modelrunner.gateway import routes
from modelrunner.gateway.calls import Call as EngineCall
from modelrunner.gateway.calls import Dialect, Fields, Inference
from modelrunner.gateway.engine_request import EngineRequest
from modelrunner.http.answers import Header
from modelrunner.openapi import make_document
from modelrunner.progress import LoadProgress
from modelrunner.types import Mode
from tests.gateway.fakes import SSE, Call, event
from tests.gateway.harness import CHAT, Answer, only, proxy, request

MESSAGES = "/v1/messages"
ASK = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}


def messages(path: str = MESSAGES, **more: Any) -> bytes:
    return request(path, ASK | more, anthropic_version="2023-06-01", x_api_key="secret")


def anthropic_error(answer: Answer) -> tuple[int, str]:
    found = answer.json()
    assert set(found) == {"type", "error", "request_id"}
    assert set(found["error"]) == {"type", "message"}
    assert (found["type"], found["request_id"]) == ("error", answer.headers["x-request-id"])
    assert found["error"]["message"]
    return answer.status, found["error"]["type"]


@pytest.mark.parametrize(
    "path", [MESSAGES, "/anthropic/v1/messages", "/engines/v1/messages", "/engines/fake/v1/messages?beta=true"]
)
async def test_anthropic_messages_pass_through(folder: Path, kind: str, path: str) -> None:
    async with proxy(folder, kind) as served:
        assert (await served.ask(messages(path))).json() == {"ok": True}
        [received] = served.engine.received
        assert (received.path, msgspec.json.decode(received.body)) == (MESSAGES, ASK)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (messages(model=7), (400, "invalid_request_error")),
        (messages(model="nope"), (404, "not_found_error")),
        (messages("/runners/nobody/v1/messages"), (404, "not_found_error")),
        (messages("/v1/messages/batches"), (404, "not_found_error")),
        (messages("/anthropic/v1/complete"), (404, "not_found_error")),
        (messages(padding="x" * 5000), (413, "request_too_large")),
        (request(MESSAGES, ASK, Host="test", Origin="http://evil.example"), (403, "permission_error")),
        (request(MESSAGES, ASK, method="PUT"), (405, "invalid_request_error")),
        (f"POST {MESSAGES} HTTP/1.1\r\nHost: test\r\n\r\n".encode(), (411, "invalid_request_error")),
    ],
)
async def test_anthropic_refusals_before_the_engine(
    folder: Path, kind: str, data: bytes, expected: tuple[int, str]
) -> None:
    async with proxy(folder, kind, limits=only(body=4096)) as served:
        assert anthropic_error(await served.ask(data)) == expected
        assert not served.engine.received


async def test_a_full_queue_in_anthropics_words(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        served.scheduler.refusal = Unavailable("the model is on its way", retry_after=7)
        answer = await served.ask(messages())
        assert anthropic_error(answer) == (503, "overloaded_error")
        assert answer.headers["retry-after"] == "7"


async def test_anthropic_engine_errors(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        body = b'{"type":"error","error":{"type":"invalid_request_error","message":"max_tokens is too large"}}'
        status = b"400" if len(served.engine.received) == 1 else b"500"
        await call.send(b"HTTP/1.1 %b X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))

    async with proxy(folder, kind, script) as served:
        first = await served.ask(messages())
        assert anthropic_error(first) == (400, "invalid_request_error")
        assert first.json()["error"]["message"] == "max_tokens is too large"
        assert anthropic_error(await served.ask(messages())) == (502, "api_error")


async def test_an_anthropic_stream_waits_with_pings_and_breaks_with_its_own_event(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + event("a"))
        call.close()

    async with proxy(folder, kind, script, limits=only(progress_after=0.0)) as served:
        served.scheduler.is_warm = False
        client = await served.connect()
        await client.send(messages(stream=True))
        answer = await client.head()
        assert answer.headers["content-type"] == "text/event-stream"
        assert await client.more(answer) == b'event: ping\ndata: {"type":"ping"}\n\n'
        served.scheduler.gate.set()
        while await client.more(answer):
            pass
        assert answer.complete
        _, _, told = answer.body.partition(b"data: a\n\nevent: error\ndata: ")
        assert msgspec.json.decode(told)["error"]["type"] == "api_error"


async def test_a_stream_that_is_refused_while_it_waits(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, limits=only(progress_after=0.0)) as served:
        served.scheduler.is_warm = False
        served.scheduler.refusal = Unavailable("it cannot be loaded")
        client = await served.connect()
        await client.send(messages(stream=True))
        answer = await client.head()
        await client.more(answer)
        served.scheduler.gate.set()
        while await client.more(answer):
            pass
        event_type, _, told = answer.body.rpartition(b"\n\n")[0].rpartition(b"\n\n")[2].partition(b"\ndata: ")
        assert event_type == b"event: error"
        assert msgspec.json.decode(told)["error"] == {"type": "overloaded_error", "message": "it cannot be loaded"}


async def test_permanent_refusals_say_that_another_try_is_of_no_use(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        assert (await served.ask(request("/score"))).headers["x-should-retry"] == "false"
        served.scheduler.refusal = NotImplementedHere("no")
        assert (await served.ask()).headers["x-should-retry"] == "false"
        served.scheduler.refusal = Unavailable("not now")
        assert "x-should-retry" not in (await served.ask()).headers


async def test_ignored_fields_are_named(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        served.runner.change(["/v1/rerank"], reads=frozenset({"query", "documents", "messages"}))
        plain = await served.ask(request("/rerank"))
        assert "x-modelrunner-ignored" not in plain.headers
        told = await served.ask(request("/rerank", {"model": "m", "return_documents": True}))
        assert told.headers["x-modelrunner-ignored"] == "return_documents"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        (f"{CHAT}/", CHAT),
        ("/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("//v1/chat/completions", CHAT),
        ("/engines/chat/completions", "/engines/v1/chat/completions"),
        ("/engines/fake/embeddings", "/engines/fake/v1/embeddings"),
        ("/messages", MESSAGES),
        ("/health/", "/health"),
    ],
)
async def test_a_path_that_is_nearly_right_is_answered_with_the_right_one(
    folder: Path, kind: str, path: str, meant: str
) -> None:
    async with proxy(folder, kind) as served:
        answer = await served.ask(request(path))
        assert answer.status == 404
        assert answer.json()["error"]["message"].endswith(f": ask {meant}")


# A third family in one class: plain text in, plain text out. The first line of a request names the model.


class PlainText(Dialect):
    name = "plain"
    calls: Mapping[str, EngineCall] = {"/plain": EngineCall(Mode.COMPLETION, CHAT)}  # type: ignore[misc]

    def read(self, body: bytes) -> Fields:
        model, newline, _ = body.decode().partition("\n")
        if not newline:
            raise BadRequest("the first line names the model, the prompt follows")
        return Fields(model, stream=True)

    def request(self, ask: Inference, runner: Runner) -> "tuple[EngineRequest, Words]":
        prompt = ask.body.decode().partition("\n")[2]
        chat = {"model": ask.fields.model, "stream": True, "messages": [{"role": "user", "content": prompt}]}
        return EngineRequest.of(CHAT, chat), Words()

    def error(self, error: ModelRunnerError, request_id: str) -> tuple[tuple[Header, ...], bytes]:
        return ((b"Content-Type", b"text/plain"),), f"error: {error.message}".encode()

    def error_event(self, error: ModelRunnerError, request_id: str) -> bytes:
        return f" (error: {error.message})".encode()

    def waiting(self, progress: LoadProgress | None, waited: float) -> bytes:
        return b" "


class Words:
    """The text of each event's delta."""

    headers: tuple[Header, ...] = ((b"Content-Type", b"text/plain"),)
    whole: ClassVar[bool] = False
    chunk_per_line: ClassVar[bool] = False
    counted: ClassVar[None] = None

    def __init__(self) -> None:
        self._rest = b""

    def piece(self, data: bytes) -> bytes:
        *events, self._rest = (self._rest + data).split(b"\n\n")
        return b"".join(self._word(one.removeprefix(b"data: ")) for one in events)

    def _word(self, data: bytes) -> bytes:
        try:
            return str(msgspec.json.decode(data)["choices"][0]["delta"]["content"]).encode()
        except (msgspec.DecodeError, KeyError):
            raise EngineProtocolError("the engine's event cannot be read") from None

    def end(self) -> bytes:
        return b"." + self._rest


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_families", list(routes._families))
    monkeypatch.setattr(routes, "_routes", dict(routes._routes))
    routes.register(PlainText())


def word(text: str) -> bytes:
    return event(msgspec.json.encode({"choices": [{"delta": {"content": text}}]}).decode())


@pytest.mark.usefixtures("plain")
async def test_a_third_family_is_one_class_and_one_registration(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE)
        whole = word("Hello") + word(" there") + b"0\r\n\r\n"
        for start in range(0, len(whole), 7):
            await call.send(whole[start : start + 7])

    async with proxy(folder, kind, script) as served:
        answer = await served.ask(request("/plain", b"m\nhow are you?"))
        assert (answer.status, answer.headers["content-type"]) == (200, "text/plain")
        assert (answer.body, answer.complete) == (b"Hello there.", True)
        [received] = served.engine.received
        assert received.path == CHAT
        assert msgspec.json.decode(received.body)["messages"][0]["content"] == "how are you?"
        assert (await served.ask(request("/plain", b"no line"))).body.startswith(b"error: the first line")
        assert (await served.ask(request("/plain", b"nope\nhello"))).status == 404


@pytest.mark.usefixtures("plain")
async def test_a_third_family_breaks_and_waits_in_its_own_words(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + word("Hello"))
        await heard.wait()
        await call.send(event("what?"))

    heard = asyncio.Event()
    async with proxy(folder, kind, script, limits=only(progress_after=0.0)) as served:
        served.scheduler.is_warm = False
        client = await served.connect()
        await client.send(request("/plain", b"m\nhello"))
        answer = await client.head()
        assert await client.more(answer) == b" "
        served.scheduler.gate.set()
        while b"Hello" not in answer.body:
            await client.more(answer)
        heard.set()
        while await client.more(answer):
            pass
        assert answer.body.strip() == b"Hello (error: the engine fake's event cannot be read)"
        assert answer.complete


@pytest.mark.usefixtures("plain")
def test_a_third_family_is_in_the_document() -> None:
    paths = make_document([], "1")["paths"]
    asked = paths["/plain"]["post"]
    assert asked["tags"] == ["plain"]
    assert asked["summary"]
    assert "application/json" not in asked["requestBody"]["content"]
    assert "application/json" not in asked["responses"]["200"]["content"]
    assert "content" not in asked["responses"]["404"]
    assert paths["/v1/chat/completions"]["post"]["tags"] == ["openai"]


def test_two_families_may_have_a_tail_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    described = EngineCall(Mode.COMPLETION, CHAT, text="Answers in plain text.", body={"text/plain": str})

    class Other(PlainText):
        name = "other"
        prefixes = ("/other",)
        calls: Mapping[str, EngineCall] = {CHAT: described}  # type: ignore[misc]

    monkeypatch.setattr(routes, "_families", list(routes._families))
    monkeypatch.setattr(routes, "_routes", dict(routes._routes))
    routes.register(Other())
    paths = make_document([], "1")["paths"]
    assert paths[f"/other{CHAT}"]["post"]["summary"] == "Answers in plain text"
    assert set(paths[f"/other{CHAT}"]["post"]["requestBody"]["content"]) == {"text/plain"}
    assert set(paths[CHAT]["post"]["requestBody"]["content"]) == {"application/json"}
