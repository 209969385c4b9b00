"""What a request's head asks for besides its route, and what of it is remembered for the next one."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.fakes import until
from tests.gateway.harness import CHAT, proxy, request

KEY = sha256(b"secret").hexdigest()[:16]


@pytest.mark.parametrize(
    ("headers", "caller", "batch"),
    [
        ({}, "", False),
        ({"X_Caller": "nightly"}, "nightly", False),
        ({"X_Caller": "n" * 100}, "n" * 64, False),
        ({"Authorization": "Bearer secret", "X_Caller": "nightly"}, KEY, False),
        ({"Authorization": "bearer  secret"}, KEY, False),
        ({"X_API_Key": "secret", "X_Priority": "batch"}, KEY, True),
        ({"Authorization": "Basic secret", "X_Priority": "Batch"}, "", True),
        ({"X_Priority": "interactive"}, "", False),
    ],
)
async def test_the_scheduler_learns_who_asks_and_how_urgently(
    folder: Path, kind: str, headers: dict[str, Any], caller: str, batch: bool
) -> None:
    async with proxy(folder, kind) as served:
        served.scheduler.is_warm = False
        served.scheduler.gate.set()
        assert (await served.ask(request(**headers))).status == 200
        assert served.scheduler.asked == [(caller, batch)]


@pytest.mark.parametrize("preload", ["", "true"])
async def test_the_answer_names_the_variant_that_gave_it(folder: Path, kind: str, preload: str) -> None:
    async with proxy(folder, kind) as served:
        plain = await served.ask(request(X_Preload_Only=preload))
        served.scheduler.variant = "context 4096 of 8192"
        other = await served.ask(request(X_Preload_Only=preload))
        assert "x-modelrunner-variant" not in plain.headers
        assert other.headers["x-modelrunner-variant"] == "context 4096 of 8192"


async def test_who_may_ask_can_change_between_two_requests(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, origins=("http://page.test",)) as served:
        client = await served.connect()
        data = request(Origin="http://page.test", Content_Type="application/json")
        assert (await client.ask(data)).headers["access-control-allow-origin"] == "http://page.test"
        served.pipeline.access.allow([], [])
        assert (await client.ask(data)).status == 403


@pytest.mark.parametrize("name", ["Content-Length: ", "content-length: ", "CONTENT-LENGTH:"])
async def test_requests_that_differ_in_their_length_only(folder: Path, kind: str, name: str) -> None:
    bodies = [b'{"model":"m"}', b'{"model":"m","n":1}', b'{"model":"m"}']
    async with proxy(folder, kind) as served:
        client = await served.connect()
        for body in bodies:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: test\r\n{name}{len(body)}\r\nAccept: */*\r\n\r\n"
            assert (await client.ask(head.encode() + body)).status == 200
        assert [seen.body for seen in served.engine.received] == bodies


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize("length", ["", "0"])
async def test_a_connection_closes_when_its_client_says_so(folder: Path, kind: str, method: str, length: str) -> None:
    """Also after a request without a body."""
    async with proxy(folder, kind) as served:
        client = await served.connect()
        await client.send(request("/health", b"", method=method, Content_Length=length, Connection="close"))
        answer = await client.closed()
        assert answer.startswith(b"HTTP/1.1 405 " if method == "POST" else b"HTTP/1.1 200 ")
        assert b"\r\nConnection: close\r\n" in answer


async def test_a_client_that_does_not_know_expect_gets_its_answer_alone(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        head, _, body = request(http="1.0", Expect="100-continue").partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        lane = served.lanes["tcp" if kind == "tls" else "unix"]
        await until(lambda: any(connection._body for connection in lane.listener._connections))  # type: ignore[attr-defined]
        await client.send(body)
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 200 ")


async def test_a_remembered_head_does_not_let_a_body_grow_too_large(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        assert (await client.ask()).status == 200
        limit = served.pipeline.limits.body
        head = f"POST {CHAT} HTTP/1.1\r\nHost: test\r\nContent-Length: {limit + 1}\r\n\r\n"
        assert (await client.ask(head.encode())).status == 413


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat", "/v1/responses"])
async def test_fields_with_our_prefix_are_refused_by_name(folder: Path, path: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": '"modelrunner_tools":'}], "input": "x"}
    async with proxy(folder, "fast") as served:
        answer = await served.ask(request(path, body | {"max_tokens": 1, "modelrunner_tools": ["a"]}))
        assert answer.status == 400
        assert b"modelrunner_tools" in answer.body
        assert not served.engine.received
        if path == CHAT:  # in a text, or deeper, it is no field of ours
            assert (await served.ask(request(path, body | {"metadata": {"modelrunner_tools": 1}}))).status == 200
