"""Hundreds of mutated requests, with h11 as the strict reference: the proxy never takes what h11 refuses, and whatever
reaches the engine is a well-formed request, one for each answer of 200."""

import random
from pathlib import Path

import h11
import pytest

from tests.gateway.fakes import OK, Call
from tests.gateway.harness import CHAT, Client, proxy, request

SEEDS = range(12)
EACH = 60
LINES = [
    b"Content-Length: 13", b"content-length: 5", b"Content-Length: 0", b"Content-Length:13", b"Content-Length: 13 ",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: Chunked", b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding : chunked", b"Transfer-Encoding: identity", b"Host: test", b"Host: other", b"Connection: close",
    b"Connection: keep-alive, Content-Length", b"Keep-Alive: 5", b"TE: trailers", b"Trailer: X", b"X: \x00", b"X: \x80",
    b" X: folded", b"X:\ty", b"X", b"X y: z", b"Expect: 100-continue", b"Content-Type: application/json", b"",
]  # fmt: skip
BYTES = [b"\r", b"\n", b"\r\n", b"\0", b" ", b"\t", b":", b"\x0b", b"0", b"-", b"+", b"_", b"\xff", b";", b","]


def mutated(rng: random.Random) -> bytes:
    data = bytearray(request(http=rng.choice(["1.1", "1.1", "1.1", "1.0"])))
    if rng.random() < 0.3:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        data = bytearray(head + b'd\r\n{"model":"m"}\r\n0\r\n\r\n')
    for _ in range(rng.randint(1, 3)):
        match rng.randrange(5):
            case 0:  # one more line in the head
                at = rng.choice([i for i in range(len(data)) if data[i : i + 2] == b"\r\n"] or [0])
                data[at:at] = b"\r\n" + rng.choice(LINES)
            case 1:
                at = rng.randrange(len(data))
                data[at:at] = rng.choice(BYTES)
            case 2:
                at = rng.randrange(len(data))
                data[at : at + 1] = rng.choice(BYTES)
            case 3:
                at = rng.randrange(len(data))
                del data[at : at + rng.randint(1, 3)]
            case 4:
                at = rng.randrange(len(data))
                data[at:at] = data[at : at + rng.randint(1, 20)]
    return bytes(data)


def requests_by_h11(data: bytes) -> list[tuple[bytes, bytes]]:
    """The path and the body of each complete request until h11 refuses."""
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 17)
    server.receive_data(data)
    found: list[tuple[bytes, bytes]] = []
    path, body = b"", b""
    try:
        while (event := server.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Request):
                path, body = event.target, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                found.append((path, body))
                server.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
                server.send(h11.EndOfMessage())
                if server.our_state is not h11.DONE:
                    break
                server.start_next_cycle()
    except (h11.RemoteProtocolError, h11.LocalProtocolError):
        pass
    return found


async def statuses(client: Client) -> list[int]:
    """Of the answers that come until the connection is closed."""
    client.writer.write_eof()
    raw = await client.closed()
    found: list[int] = []
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(raw)
    parser.receive_data(b"")
    while True:
        try:
            event = parser.next_event()
        except h11.RemoteProtocolError:  # closed without an answer, or in the middle of one
            return found
        if isinstance(event, h11.Response):
            found.append(event.status_code)
        elif isinstance(event, h11.EndOfMessage):
            if parser.their_state is not h11.DONE or not parser.trailing_data[0]:
                return found
            rest = parser.trailing_data[0]
            parser = h11.Connection(h11.CLIENT)
            parser.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
            parser.send(h11.EndOfMessage())
            parser.receive_data(rest)
            parser.receive_data(b"")
        elif isinstance(event, h11.ConnectionClosed) or event is h11.NEED_DATA:
            return found


@pytest.mark.parametrize("seed", SEEDS)
async def test_never_more_lenient_than_h11(folder: Path, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    seen: list[tuple[bytes, bytes]] = []

    async def script(call: Call) -> None:
        engine = h11.Connection(h11.SERVER)  # h11 reads what the engine got: it must be one whole request
        engine.receive_data(call.request.head + call.request.body)
        first = engine.next_event()
        assert isinstance(first, h11.Request)
        seen.append((first.target, call.request.body))
        await call.send(OK)

    async with proxy(folder, kind, script) as served:
        for number in range(EACH):
            data = mutated(rng)
            seen.clear()
            client = await served.connect()
            await client.send(data)
            try:
                found = await statuses(client)
            except TimeoutError:
                pytest.fail(f"never closed: {seed}, {number}, {data!r}")
            await client.leave()
            served.clients.clear()
            allowed = [body for _, body in requests_by_h11(data.lstrip(b"\r\n"))]  # RFC 9112, 2.2
            reached = [body for _, body in seen]
            assert found.count(200) == len(seen), (seed, number, data)
            assert all(body in allowed for body in reached), (seed, number, data, reached, allowed)
