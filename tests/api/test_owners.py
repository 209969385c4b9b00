"""Whose requests an engine has seen, as its backend is told: what it saves belongs to that key."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api import test_diagnostics as events
from tests.api.conftest import Daemon, StartDaemon
from tests.api.test_batches import begin, client_of, is_over, line, until
from tests.api.test_keys import CHAT, call, make_key
from tests.waiting import HUNG

EMBED = "/v1/embeddings"


async def ask(daemon: Daemon, key: str, path: str = "/v1/chat/completions", **more: Any) -> None:
    status, told = await call(daemon, "POST", path, key, CHAT | more)
    assert status == 200, told


async def unload(daemon: Daemon) -> tuple[list[str], list[str]]:
    """For whom the runs were loaded and who used them, in their order, by the names of the keys."""
    async with daemon.unix.post("/engines/unload", json={"all": True}) as answer:
        assert answer.status == 200, await answer.text()
    backend = daemon.backend
    told = _names(backend.loaded_for), _names(backend.used_by)
    backend.loaded_for, backend.used_by = [], []
    return told


def _names(owners: list[str | None]) -> list[str]:
    return ["-" if owner is None else owner.partition("#")[0] for owner in owners]


async def owner_after(daemon: Daemon, key: str) -> str | None:
    await ask(daemon, key)
    async with daemon.unix.post("/engines/unload", json={"all": True}):
        return daemon.backend.used_by[-1]


async def preloading(start_daemon: StartDaemon, folder: Path, **more: Any) -> Daemon:
    (folder / "config.toml").write_text('[models."smol"]\npreload = true\n')
    daemon = await start_daemon(**more)
    async with events.feed(daemon, "?since=0") as feed:
        await events.until(feed, "ready")
    return daemon


async def test_without_keys_everything_is_the_daemon_s_owner_s(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await preloading(start_daemon, tmp_path, models={"smol": 0})
    await ask(daemon, "")
    async with daemon.unix.post("/v1/chat/completions", json=CHAT) as answer:
        assert answer.status == 200
    assert await unload(daemon) == ([""], [""])


async def by_name(daemon: Daemon, key: str) -> None:
    await ask(daemon, key)


async def by_runner(daemon: Daemon, key: str) -> None:
    async with daemon.unix.get("/engines/ps") as answer:
        [runner] = await answer.json()
    await ask(daemon, key, f"/runners/{runner['id']}/v1/chat/completions")


async def by_another_family(daemon: Daemon, key: str) -> None:
    await ask(daemon, key, "/v1/messages", max_tokens=4)


async def by_batch(daemon: Daemon, key: str) -> None:
    async with client_of(daemon, key) as client:
        batch = await until(client, await begin(client, [line(0)]), is_over)
        assert batch.status == "completed"


WAYS = [by_name, by_runner, by_another_family, by_batch]


@pytest.mark.parametrize("way", WAYS)
async def test_a_run_that_two_used_is_nobody_s(
    start_daemon: StartDaemon, way: Callable[[Daemon, str], Awaitable[None]]
) -> None:
    daemon = await start_daemon(models={"smol": 0})
    kim, lee = await make_key(daemon, name="kim"), await make_key(daemon, name="lee")
    await ask(daemon, kim)
    await way(daemon, kim)
    assert await unload(daemon) == (["kim"], ["kim"])
    await ask(daemon, kim)
    await way(daemon, lee)
    assert await unload(daemon) == (["kim"], ["-"])


@pytest.mark.parametrize("way", [by_name, by_another_family, by_batch])
async def test_a_load_is_for_the_key_that_asked(
    start_daemon: StartDaemon, way: Callable[[Daemon, str], Awaitable[None]]
) -> None:
    daemon = await start_daemon(models={"smol": 0})
    await way(daemon, await make_key(daemon))
    assert await unload(daemon) == (["kim"], ["kim"])


async def test_the_socket_s_requests_are_the_daemon_s_owner_s(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    kim = await make_key(daemon)
    for headers, owner in (({}, ""), ({"X-API-Key": kim}, "kim")):
        async with daemon.unix.post("/v1/chat/completions", json=CHAT, headers=headers) as answer:
            assert answer.status == 200
        assert await unload(daemon) == ([owner], [owner])


async def test_requests_that_go_together_keep_their_owner(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"smol": 0}, embedding_window=100 * HUNG, embedding_batch=2)
    daemon.backend.knobs = (f"--record={tmp_path}/record",)
    kim = await make_key(daemon)
    for texts in (["alone"], ["one", "two"]):  # the model must be known for that
        bodies = [{"model": "smol", "input": text} for text in texts]
        answers = await asyncio.gather(*(call(daemon, "POST", EMBED, kim, body) for body in bodies))
        assert {status for status, _ in answers} == {200}
    assert await unload(daemon) == (["kim"], ["kim"])
    seen = map(json.loads, (tmp_path / "record").read_text().splitlines())
    inputs = [json.loads(each["body"])["input"] for each in seen if each.get("path") == EMBED]
    assert [len(each) for each in inputs if isinstance(each, list)] == [2]


async def test_two_that_wait_for_one_load(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = (f"--gate={tmp_path}/gate",)
    waiting = [asyncio.create_task(ask(daemon, await make_key(daemon, name=name))) for name in ("kim", "lee")]
    async with asyncio.timeout(HUNG):
        while True:
            async with daemon.unix.get("/engines/now") as answer:
                if (await answer.json())["waiting"] == {"smol": 2}:
                    break
    (tmp_path / "gate").touch()
    await asyncio.gather(*waiting)
    assert await unload(daemon) == (["-"], ["-"])


async def test_what_nobody_asked_for_is_nobody_s_where_there_are_keys(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    before = await start_daemon(models={"smol": 0})
    kim = await make_key(before, scopes=["inference", "admin"])
    async with before.unix.post("/shutdown"):
        await before.task
    daemon = await preloading(start_daemon, tmp_path)
    await ask(daemon, kim)
    assert await unload(daemon) == (["-"], ["kim"])
    async with daemon.tcp.post("/engines/preload", json={"model": "smol"}, headers={"X-API-Key": kim}) as answer:
        assert answer.status == 200
        await answer.read()
    assert await unload(daemon) == (["kim"], ["kim"])


async def test_an_owner_outlives_the_text_of_its_key_and_not_the_key(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    first = await owner_after(daemon, await make_key(daemon))
    async with daemon.unix.post("/keys/kim/rotate") as answer:
        rotated = (await answer.json())["text"]
    assert await owner_after(daemon, rotated) == first
    async with daemon.unix.delete("/keys/kim?open=true") as answer:
        assert answer.status == 200
    remade = await owner_after(daemon, await make_key(daemon))
    assert remade not in (first, "", None)
