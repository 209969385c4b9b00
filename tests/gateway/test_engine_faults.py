"""The engine fails: before a byte, in the middle, between two requests. Both lanes; I4: a request reaches an engine at
most once, unless nothing had come back."""

import asyncio
from pathlib import Path
from time import perf_counter

import aiohttp
import httpx
import pytest

from modelrunner.gateway.request import exchange
from tests.gateway.fakes import OK, SSE, Call, FakeRunner, answer_ok, chunk, event, scripted_engine
from tests.gateway.harness import CHAT, proxy, request
from tests.waiting import HUNG


async def test_a_dead_engine_is_asked_once_more_anew(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        served.runner.die()
        served.scheduler.runner = spare
        call.reset()

    async with proxy(folder, kind, script) as served, scripted_engine(folder / "spare.sock") as second:
        spare = FakeRunner(second.endpoint)
        answer = await served.ask()
        assert (answer.status, answer.body) == (200, b'{"ok":true}')
        assert (len(served.engine.received), len(second.received), served.scheduler.granted) == (1, 1, 2)
        spare.upstream.close()


@pytest.mark.parametrize(
    "sent", [SSE, SSE[:-9], SSE + b"9", SSE + b"9\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"]
)
@pytest.mark.parametrize("held_open", [False, True])
async def test_an_engine_that_dies_after_its_head_is_asked_once_more(
    folder: Path, kind: str, sent: bytes, held_open: bool
) -> None:
    async def script(call: Call) -> None:
        await call.send(sent)
        served.runner.die()
        served.scheduler.runner = spare
        call.close()

    async def stream(call: Call) -> None:
        await call.send(SSE + event("a") + event("[DONE]") + b"0\r\n\r\n")

    async with proxy(folder, kind, script) as served, scripted_engine(folder / "spare.sock", stream) as second:
        spare = FakeRunner(second.endpoint)
        served.scheduler.is_warm = not held_open
        client = await served.connect()
        await client.send(request(stream=True, X_Progress="events"))
        answer = await client.head() if held_open else None
        served.scheduler.gate.set()
        answer = answer or await client.head()
        while await client.more(answer):
            pass
        assert (answer.status, answer.complete) == (200, True)
        assert answer.body.endswith(b"data: a\n\ndata: [DONE]\n\n")
        spare.upstream.close()


@pytest.mark.parametrize("media_type", [b"", b"Content-Type: application/json; charset=utf-8\r\n"])
@pytest.mark.parametrize("length", [b"Content-Length: 0\r\n", b"Transfer-Encoding: chunked\r\n"])
async def test_an_answer_without_a_body_is_no_answer(folder: Path, kind: str, media_type: bytes, length: bytes) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\n" + media_type + length + b"\r\n")
        if b"chunked" in length:
            for piece in pieces[len(served.engine.received) - 1]:
                await call.send(piece)
                await asyncio.sleep(0.001)

    pieces = ([b"0\r\n\r\n"], [b"0", b"00;last\r\n", b"\r\n"])
    async with proxy(folder, kind, script) as served:
        for _ in pieces:
            answer = await served.ask()
            assert (answer.status, answer.json()["error"]["message"]) == (502, "the engine fake's answer is empty")


async def test_an_engine_that_dies_within_its_error_is_asked_once_more(folder: Path) -> None:
    """What came of the error says nothing about the second answer."""

    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 500 X\r\nContent-Length: 9\r\n\r\noo")
        served.runner.die()
        served.scheduler.runner = spare
        call.close()

    async def stream(call: Call) -> None:
        last = event('{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}')
        await call.send(SSE + last + event("[DONE]") + b"0\r\n\r\n")

    async with proxy(folder, "fast", script) as served, scripted_engine(folder / "spare.sock", stream) as second:
        spare = FakeRunner(second.endpoint)
        for runner in (spare, served.runner):
            runner.change([CHAT], as_stream={"stream": True})
        answer = await served.ask()
        assert (answer.status, answer.json()["choices"][0]["message"]["content"]) == (200, "a")
        spare.upstream.close()


async def test_what_an_engine_ignores_is_named_once(folder: Path) -> None:
    """However often the request was sent."""

    async def script(call: Call) -> None:
        if len(served.engine.received) == 2:
            call.reset()
        else:
            await call.send(OK)

    async with proxy(folder, "fast", script) as served:
        served.runner.change(["/v1/rerank"], reads=frozenset({"query", "documents"}))
        body = {"model": "m", "query": "a", "documents": ["b"], "return_documents": True}
        for _ in range(2):
            answer = await served.ask(request("/v1/rerank", body))
            assert (answer.status, answer.headers["x-modelrunner-ignored"]) == (200, "return_documents")


@pytest.mark.parametrize("sent", [b"", SSE[:-9], SSE])
async def test_a_stream_that_was_held_open_is_told_of_a_failure(folder: Path, kind: str, sent: bytes) -> None:
    """Whatever the engine sent of its head."""

    async def script(call: Call) -> None:
        await call.send(sent)
        call.close()

    async with proxy(folder, kind, script) as served:
        served.scheduler.is_warm = False
        client = await served.connect()
        await client.send(request(stream=True, X_Progress="events"))
        answer = await client.head()
        served.scheduler.gate.set()
        while await client.more(answer):
            pass
        assert b'event: error\ndata: {"error":{"message":"the request failed' in answer.body
        assert answer.complete


@pytest.mark.parametrize("body", [b'{"a":', b'{"a":"\n\n'])
async def test_a_json_body_that_breaks_off_gets_no_event(folder: Path, kind: str, body: bytes) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        await call.send(chunk(body))
        call.close()

    async with proxy(folder, kind, script) as served:
        answer = await served.ask()
        assert (answer.status, answer.body, answer.complete) == (200, body, False)


async def test_an_empty_answer_without_a_type_is_none(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with proxy(folder, kind, script) as served:
        answer = await served.ask()
        assert (answer.status, answer.error["code"]) == (502, "engine_protocol_error")


async def test_a_second_death_is_told_with_the_last_words(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        served.runner.die("the engine ran out of memory")
        call.reset()

    async with proxy(folder, kind, script) as served:
        answer = await served.ask()
        assert (answer.status, answer.error["message"]) == (502, "the engine ran out of memory")
        assert len(served.engine.received) == 2


async def test_a_runner_addressed_by_its_id_is_not_replaced(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        served.runner.die()
        call.reset()

    async with proxy(folder, kind, script) as served:
        assert (await served.ask(request("/runners/runner-m/v1/completions"))).status == 502
        assert (len(served.engine.received), served.scheduler.granted) == (1, 1)


@pytest.mark.parametrize(
    "sent", [b"", b"HTTP/1.1 200 OK\r\nContent-", b"HTTP/1.1 500 X\r\nContent-Length: 9\r\n\r\noo", b"garbage\r\n\r\n"]
)
async def test_a_living_engine_that_drops_the_request(folder: Path, kind: str, sent: bytes) -> None:
    async def script(call: Call) -> None:
        await call.send(sent)
        call.close()

    async with proxy(folder, kind, script) as served:
        answer = await served.ask()
        assert (answer.status, answer.error["code"][:6]) == (502, "engine")
        assert len(served.engine.received) == 1


async def test_an_idle_connection_that_closes_as_it_is_used_costs_nothing(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        if len(served.engine.received) == 2:
            call.reset()
        else:
            await call.send(OK)

    async with proxy(folder, kind, script) as served:
        assert [(await served.ask()).status for _ in range(3)] == [200, 200, 200]
        assert len(served.engine.received) == 4


async def test_a_kept_connection_that_closes_long_after_the_request_lost_the_answer(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server elsewhere that ends what takes a minute may have computed it."""

    async def script(call: Call) -> None:
        if len(served.engine.received) == 1:
            await call.send(OK)
        else:
            monkeypatch.setattr(exchange, "perf_counter", lambda: perf_counter() + 60)
            call.close()

    async with proxy(folder, kind, script) as served:
        assert [(await served.ask()).status for _ in range(2)] == [200, 502]
        assert (len(served.engine.received), served.engine.connections) == (2, 1)


async def test_an_engine_that_hangs_up_after_each_stream(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + event("a") + b"0\r\n\r\n")
        call.close()

    async with proxy(folder, kind, script) as served:
        answers = [await served.ask(request(stream=True)) for _ in range(4)]
        assert [(answer.status, answer.body, answer.complete) for answer in answers] == [
            (200, b"data: a\n\n", True)
        ] * 4
        assert len(served.engine.received) == 4


async def test_an_idle_connection_is_not_taken_for_stale_after_a_byte(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(OK if len(served.engine.received) == 1 else b"H")
        if len(served.engine.received) == 2:
            call.reset()

    async with proxy(folder, kind, script) as served:
        assert [(await served.ask()).status for _ in range(2)] == [200, 502]
        assert len(served.engine.received) == 2


@pytest.mark.parametrize("died", [False, True])
@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (event("a"), True),
        (event("a") + event("€"), True),
        (event("a") + chunk(b"data: half"), False),
        (event("a") + chunk(b"data: \xe2\x82"), False),
        (chunk(b"data: a\n"), False),
    ],
)
async def test_a_stream_that_breaks_off(folder: Path, kind: str, sent: bytes, told: bool, died: bool) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + sent)
        if died:
            served.runner.die("the engine was killed")
        call.close()

    async with proxy(folder, kind, script) as served:
        answer = await served.ask(request(stream=True))
        assert b"[DONE]" not in answer.body
        assert (b"event: error\ndata: {" in answer.body, answer.complete) == (told, told)
        if told:
            assert (b'"message":"the engine was killed"' in answer.body) is died
            assert answer.body.endswith(b"\n\n")


async def test_a_stream_whose_engine_dies_before_its_first_token_is_asked_again(folder: Path, kind: str) -> None:
    """Some engines send their head before they have read the prompt."""

    async def script(call: Call) -> None:
        await call.send(SSE)
        if len(served.engine.received) == 1:
            dead = served.runner
            served.scheduler.runner = served.runner = FakeRunner(dead.endpoint)
            dead.die()
            call.reset()
        else:
            await call.send(event("a") + b"0\r\n\r\n")

    async with proxy(folder, kind, script) as served:
        answer = await served.ask(request(stream=True))
        assert (answer.status, answer.body, answer.complete) == (200, b"data: a\n\n", True)
        assert len(served.engine.received) == 2


async def test_a_stream_that_breaks_before_its_first_token_has_a_status(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE)
        call.close()

    async with proxy(folder, kind, script) as served:
        assert (await served.ask(request(stream=True))).status == 502


async def test_a_stream_without_a_single_event_is_passed_on(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE)
        await call.send(b"0\r\n\r\n")

    async with proxy(folder, kind, script) as served:
        answer = await served.ask(request(stream=True))
        assert (answer.status, answer.body, answer.complete) == (200, b"", True)


@pytest.mark.parametrize(
    ("media", "stream"), [(b"application/json", False), (b"audio/wav", True), (b"application/x-ndjson", True)]
)
async def test_no_event_is_written_into_another_answer(folder: Path, kind: str, media: bytes, stream: bool) -> None:
    """A part of a sound must not look like the whole."""

    async def script(call: Call) -> None:
        await call.send(SSE.replace(b"text/event-stream", media) + chunk(b'{"a": "\n\n'))
        call.close()

    async with proxy(folder, kind, script) as served:
        answer = await served.ask(request(stream=stream))
        assert (answer.body, answer.complete) == (b'{"a": "\n\n', False)


async def test_a_break_inside_a_chunk_gets_no_event(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + event("a") + b"20\r\ndata: half")
        call.close()

    async with proxy(folder, kind, script) as served:
        answer = await served.ask(request(stream=True))
        assert (answer.complete, b"error" in answer.body) == (False, False)


async def test_a_sized_answer_that_breaks_off(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
        call.close()

    async with proxy(folder, kind, script) as served:
        answer = await served.ask()
        assert (answer.status, answer.body, answer.complete) == (200, b"abc", False)


async def test_a_stream_of_http_1_0_that_breaks_off_within_an_event_is_reset(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + event("a") + half)
        call.close()

    half = b""
    async with proxy(folder, kind, script) as served:
        client = await served.connect(tcp=True)
        await client.send(request(stream=True, http="1.0", Host=served.host()))
        assert b"data: a\n\nevent: error\ndata: {" in await client.reader.read()
        half = chunk(b"data: half")
        client = await served.connect(tcp=True)
        await client.send(request(stream=True, http="1.0", Host=served.host()))
        with pytest.raises(ConnectionResetError):
            await client.reader.read()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/api/chat"])
async def test_clients_that_read_a_whole_answer_get_the_reason(folder: Path, path: str) -> None:
    """They drop what they have not read of a connection that is reset. The connection answers another request."""

    async def script(call: Call) -> None:
        if b"fine" in call.request.body:
            await call.send(OK)
            return
        await call.send(SSE + event('{"choices": [{"delta": {"content": "so far"}, "text": "so far"}]}'))
        served.runner.die("the engine was killed")
        call.close()

    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "input": "hello", "max_tokens": 9}
    async with proxy(folder, "fast", script) as served:
        url = f"http://{served.host()}"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            async with session.post(url + path, json=body | {"stream": True}) as answer:
                assert answer.status == 200
                heard = await answer.read()
            assert b"so far" in heard
            assert b"the engine was killed" in heard.rpartition(b"so far")[2]
            async with session.post(url + CHAT, json=body | {"user": "fine"}) as answer:
                assert await answer.json() == {"ok": True}
        async with httpx.AsyncClient(trust_env=False, timeout=HUNG) as client:
            found = await client.post(url + path, json=body | {"stream": True})
            assert (found.status_code, b"the engine was killed" in found.content) == (200, True)


async def test_an_engine_that_answers_twice_harms_nobody(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(OK + OK)

    async with proxy(folder, kind, script) as served:
        client = await served.connect()
        answer = await client.ask()
        assert (answer.status, answer.complete) == (502, True)
        served.engine.script = answer_ok
        assert (await client.ask()).body == b'{"ok":true}'


async def test_an_endless_error_is_cut(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 400 X\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            await call.send(chunk(b"x" * 65536))

    async with proxy(folder, kind, script) as served:
        assert (await served.ask()).status == 502
        await served.engine.until(lambda e: e.open == 0)


async def test_no_engine_listens(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        (folder / "engine.sock").unlink()
        answer = await served.ask()
        assert (answer.status, answer.error["code"]) == (502, "engine_failed")


async def test_one_crash_ends_many_requests_once_each(folder: Path, kind: str) -> None:
    arrived = asyncio.Event()

    async def script(call: Call) -> None:
        if len(served.engine.received) == 8:
            served.runner.die()
            served.scheduler.runner = spare
            arrived.set()
        await arrived.wait()
        call.reset()

    async with proxy(folder, kind, script) as served, scripted_engine(folder / "spare.sock") as second:
        spare = FakeRunner(second.endpoint)
        answers = await asyncio.gather(*(served.ask() for _ in range(8)))
        assert [a.status for a in answers] == [200] * 8
        assert len(second.received) == 8
        spare.upstream.close()
