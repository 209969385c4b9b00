"""Heads that are wrong, tricky or hostile. Each is refused in our shape, the engine sees nothing of it, and what
follows on the connection is not taken for a request unless its start is certain."""

import asyncio
from pathlib import Path

import pytest

from tests.gateway.fakes import chunk
from tests.gateway.harness import CHAT, proxy, request

BODY = b'{"model":"m"}'
SMUGGLED = request(body={"model": "m", "smuggled": True})


def raw(*lines: bytes, first: bytes = b"POST /v1/chat/completions HTTP/1.1", body: bytes = BODY) -> bytes:
    return b"\r\n".join((first, *lines, b"", b"")) + body


HOST, LENGTH = b"Host: test", b"Content-Length: 13"
HEADS = {
    "two lengths": (raw(HOST, LENGTH, b"Content-Length: 1"), 400),
    "the same length twice": (raw(HOST, LENGTH, LENGTH), 400),
    "a list of lengths": (raw(HOST, b"Content-Length: 13, 13"), 400),
    "length with a plus": (raw(HOST, b"Content-Length: +13"), 400),
    "length below zero": (raw(HOST, b"Content-Length: -1"), 400),
    "length in hex": (raw(HOST, b"Content-Length: 0xd"), 400),
    "length with an underscore": (raw(HOST, b"Content-Length: 1_3"), 400),
    "length beyond 64 bits": (raw(HOST, b"Content-Length: 99999999999999999999999"), 400),
    "empty length": (raw(HOST, b"Content-Length: "), 400),
    "length and chunks": (raw(HOST, LENGTH, b"Transfer-Encoding: chunked"), 400),
    "chunks and length": (raw(HOST, b"Transfer-Encoding: chunked", LENGTH), 400),
    "chunked twice": (raw(HOST, b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"), 400),
    "chunked, identity": (raw(HOST, b"Transfer-Encoding: chunked, identity"), 400),
    "xchunked": (raw(HOST, b"Transfer-Encoding: xchunked"), 400),
    "a vertical tab before chunked": (raw(HOST, b"Transfer-Encoding: \x0bchunked"), 400),
    "chunks in HTTP/1.0": (
        raw(HOST, b"Transfer-Encoding: chunked", first=b"POST /v1/completions HTTP/1.0", body=b"0\r\n\r\n"), 400),
    "space before the colon": (raw(HOST, b"Content-Length : 13"), 400),
    "a folded line": (raw(HOST, b"X: a", b" b", LENGTH), 400),
    "a folded first line": (raw(b" Host: test", LENGTH), 400),
    "NUL in a value": (raw(HOST, b"X: a\0b", LENGTH), 400),
    "CR in a value": (raw(HOST, b"X: a\rb", LENGTH), 400),
    "LF alone": (raw(HOST, b"X: a\nY: b", LENGTH), 400),
    "LF alone all through": (raw(HOST, LENGTH).replace(b"\r\n", b"\n"), 400),
    "a name with a bracket": (raw(HOST, b"X(: a", LENGTH), 400),
    "no name": (raw(HOST, b": a", LENGTH), 400),
    "two hosts": (raw(HOST, b"Host: other", LENGTH), 400),
    "the same host twice": (raw(HOST, HOST, LENGTH), 400),
    "no host": (raw(LENGTH), 400),
    "HTTP/2.0": (raw(HOST, LENGTH, first=b"POST /v1/completions HTTP/2.0"), 400),
    "HTTP/1.2": (raw(HOST, LENGTH, first=b"POST /v1/completions HTTP/1.2"), 400),
    "HTTP/0.9": (raw(HOST, LENGTH, first=b"POST /v1/completions"), 400),
    "two spaces": (raw(HOST, LENGTH, first=b"POST  /v1/completions HTTP/1.1"), 400),
    "a tab": (raw(HOST, LENGTH, first=b"POST\t/v1/completions HTTP/1.1"), 400),
    "a path without a slash": (raw(HOST, LENGTH, first=b"POST v1/completions HTTP/1.1"), 400),
    "a fragment": (raw(HOST, LENGTH, first=b"POST /v1/completions#x HTTP/1.1"), 400),
    "another scheme": (raw(HOST, LENGTH, first=b"POST ftp://test/v1/completions HTTP/1.1"), 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n", 400),
    "CONNECT": (raw(HOST, first=b"CONNECT test:80 HTTP/1.1", body=b""), 405),
    "TRACE": (raw(HOST, first=b"TRACE / HTTP/1.1", body=b""), 405),
    "an unknown method": (raw(HOST, LENGTH, first=b"BREW /v1/completions HTTP/1.1"), 501),
    "a method of WebDAV": (raw(HOST, LENGTH, first=b"PROPFIND /v1/completions HTTP/1.1"), 501),
    "a method in small letters": (raw(HOST, LENGTH, first=b"post /v1/completions HTTP/1.1"), 501),
    "a web socket": (raw(HOST, b"Connection: Upgrade", b"Upgrade: websocket",
                         first=b"GET /v1/realtime HTTP/1.1", body=b""), 501),
    "a large header": (raw(HOST, LENGTH, b"X: " + b"a" * 70000), 431),
    "many headers": (raw(HOST, LENGTH, *(b"X-%d: a" % i for i in range(200))), 431),
}  # fmt: skip


@pytest.mark.parametrize(("head", "status"), HEADS.values(), ids=HEADS.keys())
async def test_a_wrong_head_is_refused_and_ends_the_connection(
    folder: Path, kind: str, head: bytes, status: int
) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        await client.send(head + SMUGGLED)
        answer = await client.answer()
        assert (answer.status, answer.complete) == (status, True)
        assert answer.error["message"]
        assert await client.closed() == b""
        assert served.engine.received == []


CHUNKED = f"POST {CHAT} HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
CHUNKS = {
    "no size": b"zz\r\n",
    "a size with a plus": b"+d\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a size in 0x": b"0xd\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a size beyond 64 bits": b"1000000000000000d\r\n" + BODY + b"\r\n0\r\n\r\n",
    "LF after the size": b"d\n" + BODY + b"\r\n0\r\n\r\n",
    "a longer chunk": b"c\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a shorter chunk": b"e\r\n" + BODY + b"\r\n0\r\n\r\n",
    "spaces before the size": b" d\r\n" + BODY + b"\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("body", CHUNKS.values(), ids=CHUNKS.keys())
async def test_chunks_that_are_none(folder: Path, kind: str, body: bytes) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        await client.send(CHUNKED + body)
        answer = await client.answer()
        assert answer.status == 400
        assert answer.error["code"] == "bad_request"
        assert served.engine.received == []


async def test_chunks_beyond_the_limit(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()

        async def flood() -> None:
            await client.send(CHUNKED)
            while True:
                await client.send(chunk(b" " * (1 << 20)))

        flooding = asyncio.ensure_future(flood())
        answer = await client.head()
        assert answer.status == 413
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)


async def test_one_empty_line_before_a_request_is_forgiven(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        assert (await client.ask(b"\r\n" + request())).status == 200
        assert (await client.ask(b"\r\n" + request())).status == 200


async def test_a_refused_head_request_gets_no_body(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        await client.send(request("/health", b"", method="HEAD", Content_Length="x"))
        head, _, body = (await client.closed()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert body == b""


async def test_the_answer_is_read_though_the_body_was_not(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        large = b"x" * (2 << 20)
        sending = asyncio.ensure_future(client.send(request(Content_Length=str(64 << 20), body=b"") + large))
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (413, "payload_too_large")
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


HOSTS = {
    "a stranger": (request(Host="evil.example"), 403),
    "our name with another port, as a tunnel has": (request(Host="localhost:1"), 200),
    "our name without a port": (request(Host="localhost"), 200),
    "a name that only begins like ours": (request(Host="localhost.evil.example:PORT"), 403),
    "an absolute target that is a stranger": (request(f"http://evil.example{CHAT}", Host="localhost:PORT"), 403),
    "a host that is a stranger, an absolute target that is not": (
        request(f"http://localhost:PORT{CHAT}", Host="evil.example"), 403),
    "user and password": (request(f"http://a:b@localhost:PORT{CHAT}", Host="localhost:PORT"), 403),
    "ours": (request(Host="LocalHost:PORT"), 200),
    "ours by address": (request(Host="[::1]:PORT"), 200),
    "ours by absolute target": (request(f"http://127.0.0.1:PORT{CHAT}", Host="localhost:PORT"), 200),
    "ours by absolute target of TLS": (request(f"https://127.0.0.1:PORT{CHAT}", Host="localhost:PORT"), 200),
    "a stranger by absolute target of TLS": (request(f"https://evil.example{CHAT}", Host="localhost:PORT"), 403),
    "a page": (request(Host="localhost:PORT", Origin="http://evil.example", Content_Type="application/json"), 403),
    "a page from nowhere": (request(Host="localhost:PORT", Origin="null", Content_Type="application/json"), 403),
    "an allowed page": (request(Host="localhost:PORT", Origin="https://chat.example",
                                Content_Type="application/json; charset=utf-8"), 200),
    "an allowed page that does not say JSON": (request(Host="localhost:PORT", Origin="https://chat.example",
                                                       Content_Type="text/plain"), 415),
    "a page on any port": (request(Host="localhost:PORT", Origin="http://localhost:3000",
                                   Content_Type="application/json"), 200),
    "our own page": (request(Host="localhost:PORT", Origin="http://localhost:PORT",
                             Content_Type="application/json"), 200),
}  # fmt: skip


@pytest.mark.parametrize(("ask", "status"), HOSTS.values(), ids=HOSTS.keys())
async def test_hosts_and_origins_on_tcp(folder: Path, kind: str, ask: bytes, status: int) -> None:
    async with proxy(folder, kind, origins=("https://chat.example", "http://localhost:*")) as served:
        answer = await served.ask(ask.replace(b"PORT", str(served.port).encode()), tcp=True)
        assert answer.status == status
        allowed = answer.headers.get("access-control-allow-origin")
        assert (allowed is not None) == (status != 403 and b"Origin" in ask)
        assert len(served.engine.received) == (status == 200)
        if status == 200:
            assert answer.headers["vary"] == "Origin"


async def test_any_host_will_do_on_the_unix_socket(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        assert (await served.ask(request(Host="whatever"))).status == 200
