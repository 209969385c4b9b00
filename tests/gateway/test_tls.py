"""TLS on the TCP listener, where it differs from TCP alone."""

import asyncio
import os
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from modelrunner.cli.client import Client
from modelrunner.config.locations import ConfigurationError
from modelrunner.daemon.certificates import Certificate, self_signed
from modelrunner.errors import BadRequest, DaemonUnreachable
from tests.gateway.fakes import SSE, Call, event, until
from tests.gateway.harness import proxy, request


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
        await call.send(event("a"))
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
            assert b"ready" in await asyncio.to_thread(Client(f"{address}#{pin}").fetch, "GET", "/health")
        for other in (f"{address}#{'0' * 64}", address):
            with pytest.raises(DaemonUnreachable, match="certificate"):
                await asyncio.to_thread(Client(other).fetch, "GET", "/health")
    for bad in (f"{address}#12", f"http://127.0.0.1:1#{wanted}"):
        with pytest.raises(BadRequest, match="fingerprint"):
            Client(bad)
