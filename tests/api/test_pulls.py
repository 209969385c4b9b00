"""Pulls as clients of the daemon see them: slow sources, work that is stuck, leftovers."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web

from modelrunner.concurrency import threads
from modelrunner.concurrency.threads import HASHING
from tests.api.conftest import Daemon, StartDaemon
from tests.pull.hub import Fault, Hub, Repository, sha256
from tests.pull.models import gguf
from tests.waiting import HUNG

CHAT = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
NAME = "hf.co/Org/Tiny-GGUF"


@pytest.fixture
async def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    async with Hub().running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        hub.repositories["Org/Tiny-GGUF"] = Repository({"tiny-Q4_K_M.gguf": gguf(3 << 20)})
        yield hub


async def create(daemon: Daemon, body: dict[str, Any]) -> dict[str, Any]:
    """The last line of a pull's progress, or the error."""
    async with daemon.unix.post("/models/create", json=body, headers={"Accept": "application/json"}) as answer:
        lines = [json.loads(line) async for line in answer.content]
        return lines[-1]  # type: ignore[no-any-return]


async def test_forty_slow_look_ups_keep_nobody_waiting(start_daemon: StartDaemon, hub: Hub) -> None:
    everybody, asked = asyncio.Event(), 0

    async def slow(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked == 40:
            everybody.set()
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.01)

    hub.listing = slow
    daemon = await start_daemon(models={"smol": 0})
    pulls = [asyncio.create_task(create(daemon, {"from": NAME, "name": f"m{n}"})) for n in range(40)]
    async with asyncio.timeout(HUNG):
        await everybody.wait()
        for path in ("/engines/status", "/engines/df", "/ready", "/models"):
            async with daemon.unix.get(path) as answer:
                assert answer.status == 200, await answer.text()
        async with daemon.unix.post("/v1/chat/completions", json=CHAT) as answer:
            assert answer.status == 200
    for pull in pulls:
        pull.cancel()
    await asyncio.wait(pulls)
    hub.listing = None
    assert (await create(daemon, {"from": NAME}))["type"] == "success"


async def test_models_that_are_hashed_keep_nobody_waiting(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    gate = threading.Event()
    held = [HASHING.submit(gate.wait, 60) for _ in range(20)]
    try:
        async with asyncio.timeout(HUNG):
            for path in ("/engines/df", "/ready", "/models/smol/fit"):
                async with daemon.unix.get(path) as answer:
                    assert answer.status == 200, await answer.text()
            async with daemon.unix.post("/v1/chat/completions", json=CHAT) as answer:
                assert answer.status == 200
    finally:
        gate.set()
        for one in held:
            one.result()


async def test_threads_that_are_stuck_make_the_daemon_unready(
    start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = await start_daemon()
    monkeypatch.setattr(threads, "_LATE", 0.0)
    gate, loop = threading.Event(), asyncio.get_running_loop()
    held = [loop.run_in_executor(None, gate.wait, 60) for _ in range(20)]
    async with daemon.unix.get("/ready") as answer:
        told = await answer.json()
    gate.set()
    await asyncio.gather(*held)
    assert (answer.status, told["status"]) == (503, "error")
    assert "the threads for files are stuck" in told["reason"]


async def test_what_an_unfinished_pull_left_can_be_removed(start_daemon: StartDaemon, hub: Hub) -> None:
    daemon = await start_daemon()
    hub.faults.extend([Fault(cut=1 << 20), Fault(status=404)])
    assert (await create(daemon, {"from": NAME}))["type"] == "error"
    async with daemon.unix.get("/engines/df") as answer:
        assert (await answer.json())["partial"] >= 1 << 20
    async with daemon.unix.post("/models/prune") as answer:
        done = await answer.json()
        assert (answer.status, done["freed"]) == (200, 1 << 20)
        assert [(item["kind"], item["size"]) for item in done["removed"]] == [("unfinished download", 1 << 20)]
    async with daemon.unix.get("/engines/df") as answer:
        assert (await answer.json())["partial"] == 0


@pytest.mark.parametrize("name", ["smollm", "hf.co/org/repo", "pypi:llm-x", "registry.example/a/b"])
async def test_a_model_that_is_not_here_is_told_to_be_pulled(start_daemon: StartDaemon, name: str) -> None:
    daemon = await start_daemon()
    async with daemon.unix.post("/v1/chat/completions", json={**CHAT, "model": name}) as answer:
        assert answer.status == 404
        assert f"`modelrunner pull {name}`" in (await answer.json())["error"]["message"]


async def test_a_path_is_answered_with_the_command_to_use(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    async with daemon.unix.post("/models/create", json={"from": "./x.gguf"}) as answer:
        assert answer.status == 400
        assert "modelrunner package --gguf ./x.gguf NAME" in (await answer.json())["error"]["message"]


async def test_a_pull_ends_while_an_answer_never_does(start_daemon: StartDaemon, hub: Hub, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--token-gate", str(tmp_path / "never"))
    async with asyncio.timeout(HUNG), daemon.unix.post("/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
        await answer.content.readline()
        assert (await create(daemon, {"from": NAME}))["type"] == "success"
        assert not answer.content.at_eof()


async def test_pulls_under_way_are_listed_and_cancelled(start_daemon: StartDaemon, hub: Hub) -> None:
    daemon = await start_daemon()
    hub.faults.append(Fault(hold=asyncio.Event()))
    waiting = [asyncio.create_task(create(daemon, {"from": NAME})) for _ in range(2)]
    async with asyncio.timeout(HUNG):
        await hub.held.wait()
        async with daemon.unix.get("/pulls") as answer:
            (pull,) = await answer.json()
        assert (pull["model"], pull["from"]) == (NAME.lower(), NAME)
        async with daemon.unix.delete(f"/pulls/{NAME}") as answer:
            assert (answer.status, await answer.json()) == (200, {"cancelled": NAME.lower()})
        for task in waiting:
            last = await task
            assert (last["type"], last["error"]["code"]) == ("error", "request_cancelled")
    async with daemon.unix.get("/pulls") as answer:
        assert await answer.json() == []
    async with daemon.unix.delete(f"/pulls/{NAME}") as answer:
        assert answer.status == 404
    hub.contents.clear()
    assert (await create(daemon, {"from": NAME}))["type"] == "success"
    assert 0 < hub.sent < 3 << 20  # it went on


async def test_progress_tells_rate_and_remaining_time_of_the_file_and_the_whole(
    start_daemon: StartDaemon, hub: Hub
) -> None:
    daemon = await start_daemon()
    hub.faults.append(Fault(trickle=True))
    headers = {"Accept": "application/json"}
    async with (
        asyncio.timeout(HUNG),
        daemon.unix.post("/models/create", json={"from": NAME}, headers=headers) as answer,
    ):
        async for line in answer.content:
            told = json.loads(line)
            layer = told.get("layer", {})
            if "remaining" in told and "remaining" in layer:
                break
    assert told["total"] > told["current"] > 0
    assert told["remaining"] == pytest.approx((told["total"] - told["current"]) / told["rate"], rel=0.1, abs=0.2)


async def test_where_a_model_is_from_and_whether_it_is_the_newest(start_daemon: StartDaemon, hub: Hub) -> None:
    daemon = await start_daemon()
    pulled = (await create(daemon, {"from": NAME}))["model"]
    async with daemon.unix.get(f"/models/{pulled}") as answer:
        (origin,) = (await answer.json())["origins"]
    assert origin == {"name": pulled, "from": NAME, "version": hub.repositories["Org/Tiny-GGUF"].commit}
    for query in ("", f"?model={pulled}"):
        async with daemon.unix.get(f"/updates{query}") as answer:
            assert await answer.json() == [{"name": pulled, "from": NAME, "newer": False, "reason": ""}]
    async with daemon.tcp.get("/models/search?q=tiny&limit=3") as answer:
        (found,) = await answer.json()
    assert found["name"] == "hf.co/Org/Tiny-GGUF"
    assert found["quantizations"] == ["Q4_K_M"]
    for query in ("", "?q=", "?q=x&format=onnx", "?q=x&limit=many", "?q=" + "x" * 500):
        async with daemon.tcp.get(f"/models/search{query}") as answer:
            assert answer.status == 400


async def test_a_model_is_shown_at_its_source_and_not_pulled(start_daemon: StartDaemon, hub: Hub) -> None:
    repository = hub.repositories["Org/Tiny-GGUF"]
    repository.tags = ["gguf", "license:apache-2.0"]
    daemon = await start_daemon(models={"smol": 0})
    async with daemon.tcp.get(f"/models/{NAME}/show?remote=true") as answer:
        shown = await answer.json()
    assert (shown["tags"], shown["version"]) == (["hf.co/org/tiny-gguf"], repository.commit)
    assert (shown["license"], list(shown["files"])) == (["apache-2.0"], ["tiny-Q4_K_M.gguf"])
    assert (shown["config"]["format"], shown["config"]["architecture"]) == ("gguf", "llama")
    async with daemon.tcp.get(f"/models/{NAME}?remote=true") as answer:
        model = await answer.json()
    assert (model["id"], model["tags"], model["config"]) == ("", shown["tags"], shown["config"])
    address = quote(f"{hub.endpoint}/Org/Tiny-GGUF/resolve/main/tiny-Q4_K_M.gguf#sha256={'0' * 64}", safe="")
    async with daemon.unix.get(f"/models/{address}/show?remote=true") as answer:
        assert list((await answer.json())["files"]) == ["tiny-Q4_K_M.gguf"]
    async with daemon.unix.get(f"/models/{address}/fit") as answer:
        assert (await answer.json())["disk"]["needed"] == len(repository.files["tiny-Q4_K_M.gguf"])
    for name, status in (
        ("hf.co/Org/Nothing", 404),
        ("https%3A%2F%2Fx.example%2Fm.gguf", 400),
        ("file:%2F%2F%2Fx", 400),
    ):
        async with daemon.tcp.get(f"/models/{name}/show?remote=true") as answer:
            assert answer.status == status, await answer.text()
    async with daemon.tcp.get("/models") as answer:
        assert [found["tags"] for found in await answer.json()] == [["smol"]]


async def test_a_file_at_an_address_is_pulled_by_its_digest(start_daemon: StartDaemon, hub: Hub) -> None:
    data = hub.repositories["Org/Tiny-GGUF"].files["tiny-Q4_K_M.gguf"]
    address = f"{hub.endpoint}/Org/Tiny-GGUF/resolve/main/tiny-Q4_K_M.gguf"
    daemon = await start_daemon()
    assert (await create(daemon, {"from": address}))["error"]["code"] == "invalid_reference"
    told = await create(daemon, {"from": f"{address}#sha256={sha256(data)}", "name": "mine"})
    assert (told["type"], told["model"]) == ("success", "mine")
    async with daemon.unix.get("/metrics") as answer:
        pairs = [line.split() for line in (await answer.text()).splitlines()]
    assert [float(pair[1]) for pair in pairs if pair[0] == "modelrunner_pulled_bytes_total"] == [len(data)]
