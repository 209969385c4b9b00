"""Clients that offer another protocol than HTTP/1.1 (RFC 9110, 7.8)."""

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.harness import CHAT, Proxy, proxy, request
from tests.waiting import HUNG

OFFERS: dict[str, dict[str, Any]] = {
    "h2c": {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAAB"},
    "h2c and TLS": {"Connection": "keep-alive, Upgrade", "Upgrade": "h2c, TLS/1.3"},
    "without Connection": {"Upgrade": "h2c"},
    "a web socket for a POST": {"Connection": "Upgrade", "Upgrade": "websocket"},
}


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS.keys())
async def test_an_upgrade_is_ignored(folder: Path, kind: str, offer: dict[str, Any]) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        for _ in range(2):
            assert (await client.ask(request(**offer))).status == 200
        assert len(served.engine.received) == 2
        fields = (await client.ask(request("/headers", **offer))).json()
        assert not {"upgrade", "http2-settings", "connection"}.intersection(fields)


async def test_two_fields_of_upgrade(folder: Path, kind: str) -> None:
    """It is a list, and may come in several lines."""
    async with proxy(folder, kind) as served:
        twice = request(Upgrade="h2c").replace(b"Upgrade: h2c\r\n", b"Upgrade: h2c\r\nUpgrade: TLS/1.3\r\n")
        assert (await served.ask(twice)).status == 200


async def test_a_web_socket_is_told_what_is_here_instead(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        asked = request("/v1/realtime", b"", method="GET", Content_Length="", Connection="Upgrade", Upgrade="WebSocket")
        answer = await served.ask(asked)
        assert (answer.status, answer.error["code"]) == (501, "not_implemented")
        assert "no realtime sessions" in answer.error["message"]
        assert "stream" in answer.error["message"]


async def test_http_2_without_asking_ends_with_a_reason(folder: Path, kind: str) -> None:
    """As frames: SETTINGS, then GOAWAY with HTTP_1_1_REQUIRED (RFC 9113, 6.8 and 7)."""
    async with proxy(folder, kind) as served:
        client = await served.connect()
        await client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        frames = await client.closed()
        assert frames[:9] == b"\0\0\0\4\0\0\0\0\0"
        goaway, payload = frames[9:18], frames[18:]
        assert (int.from_bytes(goaway[:3], "big"), goaway[3]) == (len(payload), 7)
        assert int.from_bytes(payload[4:8], "big") == 13
        assert b"HTTP/1.1" in payload[8:]


async def answers_of(command: list[str], served: Proxy) -> tuple[str, str]:
    address = f"http://{served.host()}{CHAT}"
    process = await asyncio.create_subprocess_exec(
        *command, address, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    async with asyncio.timeout(HUNG):
        out, err = await process.communicate()
    return out.decode(), err.decode()


async def test_the_default_client_of_java(folder: Path) -> None:
    """It offers h2c with its first request."""
    java = shutil.which("java") or pytest.skip("no java")
    async with proxy(folder, "fast") as served:
        out, err = await answers_of([java, str(Path(__file__).with_name("DefaultClient.java"))], served)
        assert out.split("\n")[:2] == ["200 HTTP_1_1"] * 2, err


@pytest.mark.parametrize("option", ["--http2", "--http2-prior-knowledge"])
async def test_curl(folder: Path, option: str) -> None:
    curl = shutil.which("curl") or pytest.skip("no curl")
    command = [
        curl,
        "-sSv",
        option,
        "-w",
        " %{http_code}",
        "-H",
        "Content-Type: application/json",
        "-d",
        '{"model":"m"}',
    ]
    async with proxy(folder, "fast") as served:
        out, err = await answers_of(command, served)
        assert out.endswith(" 200") or (option != "--http2" and "GOAWAY, error=13" in err), (out, err)
