"""TLS on the TCP listener, where it differs from TCP alone."""

import asyncio
import gc
import hmac
import itertools
import os
import socket
import ssl
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from modelrunner.cli.client import HttpClient
from modelrunner.config.locations import ConfigurationError
from modelrunner.daemon.certificates import Certificate, self_signed
from modelrunner.errors import BadRequest, DaemonUnreachable, ModelRunnerError
from modelrunner.http.tls import TlsConnection
from tests.gateway.fakes import SSE, Call, chunk, event, until
from tests.gateway.harness import Proxy, only, proxy, request
from tests.waiting import HUNG


async def test_who_speaks_plain_http_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with proxy(folder, "tls") as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request())
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.endswith(b"this port speaks TLS: ask for https://")
        writer.close()
    assert "without TLS" in caplog.text


@pytest.mark.parametrize("hello", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"])
async def test_a_handshake_that_never_ends_is_cut(folder: Path, hello: bytes) -> None:
    async with proxy(folder, "tls") as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(hello)
        await until(lambda: len(served.lanes["tcp"].listener) == 1)
        served.look(served.pipeline.limits.header_timeout - 10)
        assert len(served.lanes["tcp"].listener) == 1
        served.look(served.pipeline.limits.header_timeout + 10)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_garbage_instead_of_a_handshake(folder: Path) -> None:
    async with proxy(folder, "tls") as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"\x16\x03\x01\x00\x05hello" * 10)
        alert = await reader.read()
        assert alert[:1] in (b"", b"\x15")
        writer.close()


async def test_who_leaves_a_stream_is_noticed(folder: Path) -> None:
    async def endless(call: Call) -> None:
        await call.send(SSE)
        await call.send(event("a"))
        await call.left()

    async with proxy(folder, "tls", endless) as served:
        client = await served.connect()
        await client.send(request(stream=True))
        answer = await client.head()
        await client.more(answer)
        await client.leave()
        await until(lambda: served.scheduler.leases == 0)


async def test_an_answer_that_breaks_off_has_no_end(folder: Path) -> None:
    async def broken(call: Call) -> None:
        await call.send(SSE)
        await call.send(event("a") + chunk(b"data: half"))
        call.close()

    async with proxy(folder, "tls", broken) as served:
        answer = await served.ask(request(stream=True))
        assert not answer.complete


async def test_a_new_certificate_drops_no_connection(folder: Path) -> None:
    async with proxy(folder, "tls") as served:
        client = await served.connect()
        before = Certificate(folder / "certificate.pem", folder / "key.pem")
        (folder / "other").mkdir()
        other = self_signed(folder / "other", ())
        os.replace(folder / "other" / "key.pem", folder / "key.pem")
        before.look()  # half of the change: the pair does not fit
        assert before.fingerprint != other.fingerprint
        os.replace(folder / "other" / "certificate.pem", folder / "certificate.pem")
        before.look()
        assert before.fingerprint == other.fingerprint
        assert (await client.ask()).status == 200


def test_a_self_signed_certificate_stays(tmp_path: Path) -> None:
    first = self_signed(tmp_path / "tls", ("models.example",))
    assert self_signed(tmp_path / "tls", ("models.example",)).fingerprint == first.fingerprint
    assert (tmp_path / "tls" / "key.pem").stat().st_mode & 0o077 == 0
    text = ssl._ssl._test_decode_cert(str(tmp_path / "tls" / "certificate.pem"))  # type: ignore[attr-defined]
    assert ("DNS", "models.example") in text["subjectAltName"]


def test_files_that_are_no_certificate(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("hello")
    with pytest.raises(ConfigurationError, match=r"c\.pem"):
        Certificate(tmp_path / "c.pem", tmp_path / "c.pem")


async def test_the_command_line_pins_a_certificate(folder: Path) -> None:
    async with proxy(folder, "tls") as served:
        wanted = Certificate(folder / "certificate.pem", folder / "key.pem").fingerprint
        address = f"https://127.0.0.1:{served.port}"
        colons = ":".join(wanted[at : at + 2] for at in range(0, 64, 2)).upper()
        for pin in (wanted, colons):
            assert b"ready" in await asyncio.to_thread(HttpClient(f"{address}#{pin}").fetch, "GET", "/health")
        for other in (f"{address}#{'0' * 64}", address):
            with pytest.raises(DaemonUnreachable, match="certificate"):
                await asyncio.to_thread(HttpClient(other).fetch, "GET", "/health")
    for bad in (f"{address}#12", f"http://127.0.0.1:1#{wanted}"):
        with pytest.raises(BadRequest, match="fingerprint"):
            HttpClient(bad)


async def test_who_is_refused_costs_no_more_than_the_answer(folder: Path) -> None:
    """Also the clients that never end their handshake, and without a look of the garbage collector."""
    limits = only(per_peer=2)
    async with proxy(folder, "tls", Call.left, limits=limits) as served:
        for _ in range(2):
            await (await served.connect()).send(request(Host=served.host()))
        await served.engine.until(lambda e: len(e.received) == 2)
        made = connections_of(served)
        gc.collect()
        gc.disable()
        try:
            held = []
            for _ in range(100):
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
                writer.write(b"\x16\x03\x01\x02\x00\x01")
                held.append((reader, writer))
            await until(lambda: len(made) == 2 + 100)
            await until(lambda: len([one for one in made if one() is not None]) <= 2 + 32)
            for _, writer in held:
                writer.close()
            refused = await served.connect()
            answer = await refused.answer()
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert await refused.closed() == b""
            await until(lambda: len([one for one in made if one() is not None]) == 2)
        finally:
            gc.enable()


async def test_a_handshake_has_the_size_of_a_head(folder: Path) -> None:
    async with proxy(folder, "tls") as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        hello = b"\x01" + (130_000).to_bytes(3, "big") + bytes(130_000)
        for at in range(0, 96_000, 16_000):
            writer.write(b"\x16\x03\x01" + (16_000).to_bytes(2, "big") + hello[at : at + 16_000])
        with suppress(ConnectionError):
            assert await reader.read() == b""
        await until(lambda: len(served.lanes["tcp"].listener) == 0)
        writer.close()


async def test_alerts_that_nobody_reads_are_bounded(folder: Path) -> None:
    """A client asks for handshakes without end; each is refused with an alert, and none is read."""
    async with proxy(folder, "tls") as served:
        sock, hello = await asyncio.to_thread(shaken, served.port)
        _, writer = await asyncio.open_connection(sock=sock, limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        with pytest.raises(ConnectionError):  # noqa: PT012
            async with asyncio.timeout(HUNG):
                while True:
                    writer.write(b"".join(hello() for _ in range(100)))
                    await writer.drain()
        await until(lambda: len(served.lanes["tcp"].listener) == 0)


def shaken(port: int) -> tuple[socket.socket, Callable[[], bytes]]:
    """Returns a connection with TLS 1.2, and a function that makes a further record with its first message: Python's
    ssl module asks for no second handshake, so the records are made here (RFC 5246, 6.3; RFC 5288, 3)."""
    with tempfile.NamedTemporaryFile("r") as keys:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
        context.keylog_filename = keys.name
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing)
        sock = socket.create_connection(("127.0.0.1", port))
        sent = received = b""
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                data = outgoing.read()
                sent += data
                sock.sendall(data)
                data = sock.recv(1 << 16)
                received += data
                incoming.write(data)
        master = bytes.fromhex(keys.read().split()[-1])
    hello = sent[5 : 5 + int.from_bytes(sent[3:5], "big")]
    label = b"key expansion" + received[11:43] + hello[6:38]
    seed, block = label, b""
    while len(block) < 40:
        seed = hmac.digest(master, seed, "sha256")
        block += hmac.digest(master, seed + label, "sha256")
    cipher, numbers = AESGCM(block[:16]), itertools.count(1)

    def record() -> bytes:
        number = next(numbers).to_bytes(8, "big")
        head = b"\x16\x03\x03"
        sealed = cipher.encrypt(block[32:36] + number, hello, number + head + len(hello).to_bytes(2, "big"))
        return head + (8 + len(sealed)).to_bytes(2, "big") + number + sealed

    return sock, record


def connections_of(served: Proxy) -> list["weakref.ref[TlsConnection]"]:
    """Adds up the connections that the listener has, and will have."""
    listener, made = served.lanes["tcp"].listener, []
    made += [weakref.ref(connection._transport) for connection in listener._connections]  # type: ignore[attr-defined]
    enter = listener.enter

    def entered(connection: Any, transport: Any) -> ModelRunnerError | None:
        made.append(weakref.ref(connection._transport))
        return enter(connection, transport)

    listener.enter = entered  # type: ignore[method-assign]
    return made
