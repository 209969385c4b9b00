"""What the inference routes promise, on both lanes."""

import asyncio
from pathlib import Path

import pytest

from modelrunner.errors import InsufficientMemory, QueueFull
from modelrunner.types import KeepAlive
from tests.gateway.fakes import SSE, Call, chunk, event
from tests.gateway.harness import CHAT, proxy, request


async def test_an_answer_passes_through(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        answer = await served.ask()
        assert (answer.status, answer.body, answer.complete) == (200, b'{"ok":true}', True)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"]
        assert answer.headers["server-timing"].startswith("queue;dur=0.0, load;dur=0.0, proxy;dur=")
        [seen] = served.engine.received
        assert (seen.path, seen.body) == (CHAT, request().partition(b"\r\n\r\n")[2])
        assert seen.header("x-request-id") == answer.headers["x-request-id"]


@pytest.mark.parametrize("http", ["1.0", "1.1"])
async def test_a_stream_passes_through_byte_for_byte(folder: Path, kind: str, http: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + event("one"))
        await call.send(chunk(b"data: \xe2\x82") + chunk(b"\xac\n\n"))
        await call.send(event("[DONE]") + b"0\r\n\r\n")

    async with proxy(folder, kind, script) as served:
        answer = await served.ask(request(stream=True, http=http))
        assert answer.body == "data: one\n\ndata: €\n\ndata: [DONE]\n\n".encode()
        assert (answer.complete, answer.headers["content-type"]) == (True, "text/event-stream")
        assert answer.headers["cache-control"] == "no-store"


async def test_a_connection_mixes_both_kinds_pipelined(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        other = request("/health", b"", method="GET")
        await client.send(request() + request(stream=True) + other + request() + other + request())
        bodies = [(await client.answer()).body for _ in range(6)]
        ok, health = b'{"ok":true}', b'{"status": "ready"}'
        assert bodies == [ok, b"data: %b\n\n" % ok, health, ok, health, ok]
        assert len(served.engine.received) == 4


async def test_a_request_may_come_byte_by_byte(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        for byte in request():
            await client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.answer()).status == 200


async def test_a_body_in_chunks_is_joined(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        answer = await served.ask(head + chunk(b'{"mod') + chunk(b'el":"m"}') + b"0\r\n\r\n")
        assert answer.status == 200
        assert served.engine.received[0].body == b'{"model":"m"}'


@pytest.mark.parametrize(
    ("path", "engine_path"),
    [
        ("/v1/completions", "/v1/completions"),
        ("/engines/v1/chat/completions", CHAT),
        ("/engines/fake/v1/chat/completions?x=1", CHAT),
        ("/runners/runner-m/v1/chat/completions", CHAT),
        ("/v1/embeddings", "/v1/embeddings"),
        ("/rerank", "/v1/rerank"),
        ("/engines/rerank", "/v1/rerank"),
        ("/engines/fake/v1/rerank", "/v1/rerank"),
        ("/v1/tokenize", "/tokenize"),
        ("http://test/v1/detokenize", "/detokenize"),
    ],
)
async def test_paths(folder: Path, kind: str, path: str, engine_path: str) -> None:
    async with proxy(folder, kind) as served:
        assert (await served.ask(request(path))).status == 200
        assert served.engine.received[0].path == engine_path


@pytest.mark.parametrize(
    "path",
    ["/props", "/v1/props", "/v1/chat/completions/", "/v1//chat/completions", "/engines/fake/completions", "/slots",
     "/v1/chat%2Fcompletions", "/runners/runner-m/v1/slots", "/engines/../v1/completions/x", "/v1/chat/completions;x"],
)  # fmt: skip
async def test_other_paths_of_an_engine_cannot_be_reached(folder: Path, kind: str, path: str) -> None:
    async with proxy(folder, kind) as served:
        answer = await served.ask(request(path))
        assert (answer.status, answer.error["code"]) == (404, "route_not_found")
        assert served.engine.received == []


async def test_only_post(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        answer = await served.ask(request(CHAT, b"", method="GET"))
        assert (answer.status, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("ask", "status", "code"),
    [
        (request(body={"model": "nope"}), 404, "model_not_found"),
        (request("/engines/vllm/v1/completions"), 421, "misdirected_request"),
        (request("/runners/gone/v1/completions"), 404, "runner_not_found"),
        (request("/runners/runner-m/v1/completions", {"model": "other"}), 421, "misdirected_request"),
        (request("/runners/runner-m/v1/embeddings"), 421, "misdirected_request"),
        (request(body={"messages": []}), 400, "bad_request"),
        (request(body={"model": 3}), 400, "bad_request"),
        (request(body={"model": "m", "keep_alive": "soon"}), 400, "bad_request"),
        (request(body=b"{"), 400, "bad_request"),
        (request(body=b""), 400, "bad_request"),
        (request(body=b"", Content_Length=""), 411, "length_required"),
        (request(Content_Length="33554433"), 413, "payload_too_large"),
        (request(Content_Encoding="gzip"), 415, "unsupported_media_type"),
        (request(Expect="200-ok"), 417, "expectation_failed"),
    ],
)
async def test_refusals(folder: Path, kind: str, ask: bytes, status: int, code: str) -> None:
    async with proxy(folder, kind) as served:
        answer = await served.ask(ask)
        assert (answer.status, answer.error["code"]) == (status, code)
        assert served.engine.received == []


async def test_a_wrong_keep_alive_is_named(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        answer = await served.ask(request(body={"model": "m", "keep_alive": "soon"}))
        assert answer.error["param"] == "keep_alive"


@pytest.mark.parametrize("refusal", [QueueFull("full", retry_after=3), InsufficientMemory("no room")])
async def test_what_the_scheduler_refuses(folder: Path, kind: str, refusal: QueueFull) -> None:
    async with proxy(folder, kind) as served:
        served.scheduler.refusal = refusal
        answer = await served.ask()
        assert (answer.status, answer.error["message"]) == (refusal.status, refusal.message)
        assert answer.headers.get("retry-after") == ("3" if refusal.retry_after else None)


@pytest.mark.parametrize(
    ("engine", "status", "message"),
    [
        ((400, b'{"error":{"message":"bad grammar","code":400}}'), 400, "bad grammar"),
        ((404, b'{"message":"no such thing"}'), 404, "no such thing"),
        ((422, b'{"detail":"field"}'), 400, "field"),
        ((500, b'{"error":{"message":"input is too large to process"}}'), 400, "input is too large to process"),
        ((500, b"oops"), 502, "oops"),
        ((401, b'{"error":{"message":"key"}}'), 502, "key"),
        ((503, b'{"error":{"message":"loading"}}'), 503, "loading"),
        ((302, b""), 502, "the engine answered with status 302, which is no answer to this request"),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_engines_error_has_our_shape(
    folder: Path, kind: str, engine: tuple[int, bytes], status: int, message: str, chunked: bool
) -> None:
    async def script(call: Call) -> None:
        code, body = engine
        length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
        data = (chunk(body) if body else b"") + b"0\r\n\r\n" if chunked else body
        await call.send(b"HTTP/1.1 %d X\r\n%b\r\n\r\n%b" % (code, length, data))

    async with proxy(folder, kind, script) as served:
        answer = await served.ask(request(stream=True))
        if status == 502 and not engine[1] and engine[0] != 302:
            message = f"the engine answered with status {engine[0]}"
        assert (answer.status, answer.complete) == (status, True)
        assert message in answer.error["message"]


async def test_an_engines_headers_are_filtered(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(
            b"HTTP/1.1 200 Fine\r\nContent-Type: text/plain\r\nServer: x\r\nSet-Cookie: a=b\r\n"
            b"Access-Control-Allow-Origin: *\r\nKeep-Alive: 5\r\nX-Request-ID: theirs\r\nContent-Length: 0\r\n\r\n"
        )

    async with proxy(folder, kind, script) as served:
        answer = await served.ask(request(X_Request_ID="ours"))
        assert answer.headers["content-type"] == "text/plain"
        assert answer.headers["x-request-id"] == "ours"
        assert not {"set-cookie", "access-control-allow-origin", "keep-alive"} & set(answer.headers)


@pytest.mark.parametrize("given", ["a b", "x" * 129, "é"])
async def test_an_odd_request_id_is_not_repeated(folder: Path, kind: str, given: str) -> None:
    async with proxy(folder, kind) as served:
        assert (await served.ask(request(X_Request_ID=given))).headers["x-request-id"] != given


async def test_nothing_of_the_clients_head_reaches_the_engine(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        await served.ask(
            request(
                Authorization="Bearer x", Cookie="a", Connection="close, x-secret", X_Secret="1", X_Forwarded_For="1"
            )
        )
        names = {line.partition(b":")[0].lower() for line in served.engine.received[0].head.split(b"\r\n")[1:] if line}
        assert names == {b"host", b"content-type", b"content-length", b"x-request-id"}


async def test_keep_alive_is_the_requests_own(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        await served.ask(request(body={"model": "m", "keep_alive": "10m"}))
        assert served.scheduler.keep_alive == KeepAlive(600.0)
        await served.ask()
        assert served.scheduler.keep_alive is None


async def test_preload_loads_and_asks_the_engine_nothing(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        served.scheduler.is_warm = False
        served.scheduler.gate.set()
        answer = await served.ask(request(X_Preload_Only="true", stream=True))
        assert (answer.status, served.engine.received, served.scheduler.granted) == (200, [], 1)


async def test_a_cold_request_waits(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        served.scheduler.is_warm = False
        client = await served.connect()
        await client.send(request(body={"model": "other"}))
        while not served.scheduler.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        served.scheduler.gate.set()
        answer = await client.answer()
        assert answer.status == 200
        assert answer.headers["server-timing"].startswith("queue;dur=500.0, load;dur=500.0, proxy;dur=")


async def test_a_large_body_and_a_large_answer(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n" + b"y" * 3000000)

    async with proxy(folder, kind, script) as served:
        answer = await served.ask(request(body={"model": "m", "x": "z" * 5000000}))
        assert answer.body == b"y" * 3000000
        assert len(served.engine.received[0].body) > 5000000


async def test_expect_is_answered_before_the_body(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        head, _, body = request(Expect="100-continue").partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await client.ask(body)).status == 200


async def test_expect_is_not_encouraged_for_a_bad_request(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        head = request(Expect="100-continue", Content_Length="99999999999", body=b"")
        await client.send(head)
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 413 ")


async def test_a_waiting_stream_is_kept_alive(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + event("[DONE]") + b"0\r\n\r\n")

    async with proxy(folder, kind, script) as served:
        served.scheduler.is_warm = False
        client = await served.connect()
        await client.send(request(stream=True, X_Progress="events"))
        answer = await client.head()
        first = await client.more(answer)
        assert first.startswith(b"event: modelrunner.progress\ndata: {")
        assert b'"stage":"loading weights","position":1,"expected_seconds":2.0,"waited":' in first
        served.scheduler.gate.set()
        while await client.more(answer):
            pass
        assert answer.body.endswith(b"\n\ndata: [DONE]\n\n")
        assert answer.complete


async def test_a_failure_after_comments_is_an_error_event(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        served.scheduler.is_warm = False
        client = await served.connect()
        await client.send(request(stream=True, X_Progress="events"))
        answer = await client.head()
        await client.more(answer)
        served.scheduler.refusal = InsufficientMemory("no room")
        served.scheduler.gate.set()
        while await client.more(answer):
            pass
        assert b'\n\nevent: error\ndata: {"error":{"message":"no room"' in answer.body
        assert answer.complete


@pytest.mark.parametrize("tcp", [True, False])
async def test_only_the_owner_may_send_the_daemon_into_this_network(folder: Path, tcp: bool) -> None:
    """A mark of requests over TCP, with which sources of models refuse private addresses (tests/oci/test_inside.py)."""
    async with proxy(folder, "fast") as served:
        for _ in range(2):
            asked = request("/public", b"", method="GET", Content_Length="", Host=served.host())
            assert (await served.ask(asked, tcp=tcp)).json() is tcp
