"""Streams that go on in another connection: in a whole daemon, with the fake engine."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from modelrunner.gateway.interceptors import resumable_streams as streams
from tests.api.conftest import Daemon, StartDaemon
from tests.gateway.fakes import until
from tests.waiting import HUNG

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "smol", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
ASKED = {"X-Resumable": "true", "X-Request-ID": "r1"}


@pytest.fixture
async def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


@pytest.fixture
async def daemon(start_daemon: StartDaemon, gate: Path) -> Daemon:
    made = await start_daemon(models={"smol": 0})
    made.backend.knobs = ("--tokens", "5", "--token-gate", str(gate), "--record", str(gate.parent / "record"))
    return made


def left(gate: Path) -> bool:
    """True once the engine noticed that its client is gone."""
    return b'"left"' in (gate.parent / "record").read_bytes()


async def first_token(answer: aiohttp.ClientResponse) -> bytes:
    data = b""
    async with asyncio.timeout(HUNG):
        while b"w0" not in data:
            data += await answer.content.readany()
    return data


async def test_a_client_goes_on_where_it_was_cut_off(daemon: Daemon, gate: Path) -> None:
    async with daemon.tcp.post(CHAT, json=BODY, headers=ASKED) as answer:
        place = answer.headers["X-Modelrunner-Stream"]
        assert place == "/v1/streams/r1"
        before = await first_token(answer)
        answer.close()
    gate.touch()
    async with daemon.tcp.get(f"{place}?from={len(before)}") as rest:
        assert rest.headers["Content-Type"] == "text/event-stream"
        after = await rest.read()
    assert [word in before + after for word in (b"w0", b"w1", b"w4", b"[DONE]")] == [True] * 4
    async with daemon.tcp.get(place) as again:
        assert await again.read() == before + after
    async with daemon.tcp.get(f"{place}?from={len(before + after)}") as nothing:
        assert (nothing.status, await nothing.read()) == (200, b"")
    assert not left(gate)


async def test_the_newest_connection_has_the_stream(daemon: Daemon, gate: Path) -> None:
    async with daemon.tcp.post(CHAT, json=BODY, headers=ASKED) as answer:
        await first_token(answer)
        async with daemon.tcp.get("/v1/streams/r1") as second:
            await first_token(second)
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
            async with daemon.tcp.get("/v1/streams/r1") as third:
                await first_token(third)
                gate.touch()
                assert b"[DONE]" in await third.read()


async def test_a_reader_that_falls_behind_loses_the_stream_and_notices(daemon: Daemon) -> None:
    """Also where the stream is complete: the rest of it is missing."""
    daemon.backend.knobs = ("--tokens", "4000")
    async with daemon.tcp.post(CHAT, json=BODY, headers=ASKED) as answer:
        whole = await answer.read()
    assert 400_000 < len(whole) < streams.LIMIT  # more than the sockets hold
    path = str(daemon.settings.runtime_dir / "modelrunner.sock")
    reader, writer = await asyncio.open_unix_connection(path, limit=1 << 10)
    writer.write(b"GET /v1/streams/r1 HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(HUNG):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        async with daemon.unix.get("/v1/streams/r1") as second:
            assert await second.read() == whole
        rest = await reader.read()
    assert not rest.endswith(b"0\r\n\r\n")
    writer.close()


async def test_a_look_at_the_head_takes_no_stream_over(daemon: Daemon, gate: Path) -> None:
    async with daemon.tcp.post(CHAT, json=BODY, headers=ASKED) as answer:
        await first_token(answer)
        async with daemon.tcp.head("/v1/streams/r1") as look:
            assert (look.status, look.headers["Allow"]) == (405, "DELETE,GET")
        gate.touch()
        assert b"[DONE]" in await answer.read()


@pytest.mark.parametrize("headers", [{}, {"X-Resumable": "no"}])
async def test_only_where_it_was_asked_for(daemon: Daemon, gate: Path, headers: dict[str, str]) -> None:
    gate.touch()
    async with daemon.tcp.post(CHAT, json=BODY, headers={"X-Request-ID": "r1", **headers}) as answer:
        assert "X-Modelrunner-Stream" not in answer.headers
        await answer.read()
    async with daemon.tcp.post(CHAT, json=BODY | {"stream": False}, headers=ASKED) as plain:
        assert "X-Modelrunner-Stream" not in plain.headers
    async with daemon.tcp.get("/v1/streams/r1") as answer:
        assert answer.status == 404


async def test_bad_questions(daemon: Daemon, gate: Path) -> None:
    gate.touch()
    async with daemon.tcp.post(CHAT, json=BODY, headers=ASKED) as answer:
        await answer.read()
    for query, status in (("?from=-1", 400), ("?from=x", 400), ("?from=999999", 400), ("?from=9999999999", 400)):
        async with daemon.tcp.get(f"/v1/streams/r1{query}") as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (status, "from")
    async with daemon.tcp.get("/v1/streams/r2") as answer:
        assert answer.status == 404
    async with daemon.tcp.post(CHAT, json=BODY, headers=ASKED) as answer:  # an ID that is taken
        assert "X-Modelrunner-Stream" not in answer.headers


async def test_a_stream_without_a_client_ends(start_daemon: StartDaemon, gate: Path) -> None:
    daemon = await start_daemon(models={"smol": 0}, streams_age=0.0)
    daemon.backend.knobs = ("--tokens", "5", "--token-gate", str(gate), "--record", str(gate.parent / "record"))
    async with daemon.tcp.post(CHAT, json=BODY, headers=ASKED) as answer:
        await first_token(answer)
        answer.close()
    await until(lambda: left(gate))
    async with daemon.tcp.get("/v1/streams/r1") as gone:
        assert gone.status == 404


async def test_a_stream_that_fails_ends_with_its_error_for_whoever_reads_it_later(daemon: Daemon) -> None:
    daemon.backend.knobs = ("--tokens", "5", "--die", "2")
    async with daemon.tcp.post(CHAT, json=BODY, headers=ASKED) as answer:
        told = await answer.read()
    assert told.rpartition(b"event: error\ndata: ")[0]
    async with daemon.tcp.get("/v1/streams/r1") as again:
        assert await again.read() == told


async def test_another_key_sees_no_stream(daemon: Daemon, gate: Path) -> None:
    gate.touch()
    keys = []
    for name in ("a", "b"):
        async with daemon.unix.post("/keys", json={"name": name, "scopes": ["inference"]}) as made:
            keys.append({"Authorization": f"Bearer {(await made.json())['text']}"})
    async with daemon.tcp.post(CHAT, json=BODY, headers=ASKED | keys[0]) as answer:
        await answer.read()
    for head, status in ((keys[1], 404), (keys[0], 200)):
        async with daemon.tcp.get("/v1/streams/r1", headers=head) as found:
            assert found.status == status
    async with daemon.unix.get("/v1/streams/r1") as owner:
        assert owner.status == 200


async def test_a_stream_is_ended_by_its_owner_alone(daemon: Daemon, gate: Path) -> None:
    keys = []
    for name in ("a", "b"):
        async with daemon.unix.post("/keys", json={"name": name, "scopes": ["inference"]}) as made:
            keys.append({"Authorization": f"Bearer {(await made.json())['text']}"})
    async with daemon.tcp.post(CHAT, json=BODY, headers=ASKED | keys[0]) as answer:
        await first_token(answer)
        async with daemon.tcp.delete("/v1/streams/r1", headers=keys[1]) as refused:
            assert refused.status == 404
        async with daemon.tcp.delete("/v1/streams/r1", headers=keys[0]) as ended:
            assert (ended.status, await ended.json()) == (200, {"cancelled": "r1"})
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    await until(lambda: left(gate))
    for method in ("GET", "DELETE"):
        async with daemon.tcp.request(method, "/v1/streams/r1", headers=keys[0]) as gone:
            assert gone.status == 404


async def test_a_client_may_come_back_before_the_answer_begins(daemon: Daemon, gate: Path) -> None:
    hold = gate.parent / "hold"
    daemon.backend.knobs = ("--tokens", "5", "--hold", str(hold), "--record", str(gate.parent / "record"))
    asking = asyncio.create_task(daemon.tcp.post(CHAT, json=BODY, headers=ASKED).__aenter__())
    await until(lambda: (gate.parent / "record").exists() and b'"body"' in (gate.parent / "record").read_bytes())
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    coming = asyncio.create_task(daemon.tcp.get("/v1/streams/r1").__aenter__())
    await asyncio.sleep(0)
    hold.touch()
    async with asyncio.timeout(HUNG):
        answer = await coming
        assert answer.status == 200
        assert b"[DONE]" in await answer.read()
