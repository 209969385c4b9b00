"""Why a model waits, whether one fits, what is to stay and what happens, as clients see it."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from modelrunner.backend import BackendState, BackendStatus, InstallProgress, ProgressCallback
from modelrunner.types import RequiredMemory, RunSpec
from tests.api.conftest import Daemon, StartDaemon
from tests.fakes import FakeBackend
from tests.pull.hub import Hub, Repository
from tests.pull.index import Index
from tests.pull.models import gguf, wheel
from tests.store.samples import write_gguf
from tests.waiting import HUNG

CHAT = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}


async def get(daemon: Daemon, path: str, status: int = 200) -> Any:
    async with daemon.unix.get(path) as answer:
        body = await answer.json()
        assert answer.status == status, body
        return body


async def post(daemon: Daemon, path: str, body: Any, status: int = 200) -> Any:
    async with daemon.unix.post(path, json=body) as answer:
        told = await answer.json()
        assert answer.status == status, told
        return told


async def progress(daemon: Daemon, path: str, body: Any) -> list[dict[str, Any]]:
    async with daemon.unix.post(path, json=body, headers={"Accept": "application/json"}) as answer:
        return [json.loads(line) async for line in answer.content]


@asynccontextmanager
async def feed(daemon: Daemon, query: str = "", **headers: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    async with daemon.unix.get(f"/engines/events{query}", headers=headers) as answer:
        assert answer.content_type == "text/event-stream"
        yield _events(answer)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    name = ""
    async for line in answer.content:
        field, _, value = line.decode().strip().partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            event = json.loads(value)
            assert event["event"] == name
            yield event


async def until(events: AsyncIterator[dict[str, Any]], kind: str) -> dict[str, Any]:
    async with asyncio.timeout(HUNG):
        async for event in events:
            if event["event"] == kind:
                return event
    raise AssertionError(f"the feed ended before an event {kind}")


async def test_a_load_is_told_as_it_happens_and_again_to_who_comes_back(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    async with feed(daemon) as events:
        await post(daemon, "/v1/chat/completions", CHAT)
        load = await until(events, "load")
        ready = await until(events, "ready")
        assert load["runner"] == ready["runner"] == (await get(daemon, "/engines/ps"))[0]["id"]
        assert ready["details"]["seconds"] >= 0
        await post(daemon, "/engines/unload", {"all": True})
        assert (await until(events, "stop"))["reason"] == "it was unloaded"
    async with feed(daemon, **{"Last-Event-ID": str(load["id"])}) as events:
        assert await anext(events) == ready
    async with feed(daemon, "?since=0&model=smol") as events:
        assert await anext(events) == load


async def test_a_feed_ends_when_the_daemon_does(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    async with feed(daemon) as events:
        await post(daemon, "/shutdown", None, 202)
        assert [event async for event in events] == []
    await daemon.task


async def test_pulls_and_installations_and_configurations_are_events(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    async with feed(daemon) as events:
        await progress(daemon, "/models/create", {"from": "file:///nowhere/x.gguf", "name": "x"})
        assert "there is no file" in (await until(events, "pull"))["reason"]
        await progress(daemon, "/engines/install-backend", {"backend": "fake"})
        assert (await until(events, "install"))["reason"] == "install of fake"
        await post(daemon, "/engines/_configure", {"model": "smol", "keep_alive": "1h"}, 202)
        assert (await until(events, "configure"))["model"] == "smol"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/engines/events?since=soon", 400),
        ("/engines/events?since=" + "9" * 5000, 400),
        ("/engines/events?model=nope", 404),
        ("/engines/why", 400),
        ("/engines/why?model=nope", 404),
        ("/engines/why?model=smol&mode=dance", 400),
        ("/models/file%3A%2F%2F%2Fx/fit", 400),
    ],
)
async def test_odd_questions(start_daemon: StartDaemon, path: str, status: int) -> None:
    daemon = await start_daemon(models={"smol": 0})
    await get(daemon, path, status)


async def test_why_and_fit(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1}, memory_budget=100)
    daemon.backend.memory = RequiredMemory(60)
    why = await get(daemon, "/engines/why?model=smol")
    assert (why["state"], why["waiting_for"], why["needed"]) == ("stopped", None, {"ram": 60, "vram": []})
    await post(daemon, "/v1/chat/completions", CHAT)
    assert (await get(daemon, "/engines/why?model=smol"))["state"] == "ready"
    fit = await get(daemon, "/models/other/fit")
    assert (fit["fits"], fit["would_evict"], fit["disk"]["needed"]) == ("after_eviction", ["smol"], 0)
    assert fit["disk"]["free"] > 0


async def test_a_model_that_is_elsewhere(
    start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = wheel(tmp_path, "llm-big", {"llm_big/m.gguf": os.urandom(3 << 20)})
    daemon = await start_daemon(memory_budget=1 << 20)
    async with Index(tmp_path).running() as index:
        index.hold = asyncio.Event()
        for name, value in {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.url, "PIP_FIND_LINKS": ""}.items():
            monkeypatch.setenv(name, value)
        fit = await get(daemon, "/models/pypi%3Allm-big/fit")
        assert fit["fits"] == "never"
        assert fit["needed"]["ram"] == fit["disk"]["needed"] == path.stat().st_size
        assert "counts the files alone" in fit["reason"]
        await get(daemon, "/engines/why?model=pypi:llm-big", 404)
        pull = asyncio.create_task(progress(daemon, "/models/create", {"from": "pypi:llm-big"}))
        async with asyncio.timeout(HUNG):
            while (why := await _why_or_none(daemon, "pypi:llm-big")) is None:
                pass
        assert (why["state"], why["waiting_for"]) == ("pulling", "pull")
        pull.cancel()
        await asyncio.wait([pull])


async def test_a_model_at_a_hub_is_estimated_by_its_header(
    start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the settings that the configuration file has for it."""
    daemon = await start_daemon(memory_budget=100)

    async def context(spec: RunSpec) -> RequiredMemory:
        return RequiredMemory(min(60, spec.context_size))

    monkeypatch.setattr(daemon.backend, "required_memory", context)
    needed = []
    async with Hub().running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        hub.repositories["Org/Tiny-GGUF"] = Repository({"tiny-Q4_K_M.gguf": gguf(5000)})
        for size in (80, 40):
            (tmp_path / "config.toml").write_text(f'[models."hf.co/Org/Tiny-GGUF"]\ncontext-size = {size}\n')
            await post(daemon, "/engines/reload", {})
            fit = await get(daemon, "/models/hf.co%2FOrg%2FTiny-GGUF/fit")
            assert (fit["fits"], fit["disk"]["needed"]) == ("now", len(gguf(5000)))
            assert "files alone" not in fit["reason"]
            needed.append(fit["needed"]["ram"])
    assert needed == [60, 40]


async def test_why_names_the_engine_that_is_missing(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    for state, told in ((BackendState.NOT_INSTALLED, "failed"), (BackendState.INSTALLING, "installing")):
        daemon.backend.state = BackendStatus(state)
        why = await get(daemon, "/engines/why?model=smol")
        assert (why["state"], why["waiting_for"]) == (told, "install")


async def test_preload_ends_when_the_model_is_ready(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    lines = await progress(daemon, "/engines/preload", {"model": "smol"})
    assert lines[0]["message"].startswith("Loading smol")
    assert (lines[-1]["type"], lines[-1]["model"]) == ("success", "smol")
    [runner] = await get(daemon, "/engines/ps")
    assert (runner["state"], runner["leases"]) == ("ready", 0)
    [line] = await progress(daemon, "/engines/preload", {"model": "smol"})
    assert (line["type"], line["message"]) == ("success", "smol is loaded")  # at once: no line about a load
    assert (await post(daemon, "/engines/preload", {"model": "nope"}, 404))["error"]["code"] == "model_not_found"


async def test_a_pin_holds_at_once_and_after_a_restart(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1}, memory_budget=100)
    daemon.backend.memory = RequiredMemory(60)
    await progress(daemon, "/engines/preload", {"model": "smol"})
    told = await post(daemon, "/engines/pin", {"model": "smol"})
    assert (told["state"], told["message"]) == ("ready", "smol is never evicted")
    assert (await get(daemon, "/engines/ps"))[0]["pinned"]
    assert (await get(daemon, "/engines/why?model=other"))["waiting_for"] == "pin"
    refused = await post(daemon, "/v1/chat/completions", {**CHAT, "model": "other"}, 507)
    assert "pinned" in refused["error"]["message"]
    [shown] = await get(daemon, "/engines/_configure?model=smol")
    assert shown["config"] == {"pin": True}
    await post(daemon, "/engines/unpin", {"model": "smol"})
    await post(daemon, "/v1/chat/completions", {**CHAT, "model": "other"})
    assert [runner["model_name"] for runner in await get(daemon, "/engines/ps")] == ["other"]


async def test_a_paused_models_requests_wait_for_its_resume(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    await progress(daemon, "/engines/preload", {"model": "smol"})
    told = await post(daemon, "/engines/pause", {"model": "smol"})
    assert (told["state"], await get(daemon, "/engines/ps")) == ("stopped", [])
    waiting = asyncio.create_task(post(daemon, "/v1/chat/completions", CHAT))
    async with asyncio.timeout(HUNG):
        while (why := await get(daemon, "/engines/why?model=smol"))["position"] is None:
            pass
    assert (why["state"], why["waiting_for"]) == ("paused", "resume")
    await post(daemon, "/engines/resume", {"model": "smol"})
    assert (await waiting)["object"] == "chat.completion"


async def test_a_model_that_was_removed_and_is_pulled_again_is_not_paused(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = await start_daemon()
    pull = {"from": write_gguf(tmp_path / "a.gguf").as_uri(), "name": "a"}
    await progress(daemon, "/models/create", pull)
    await post(daemon, "/engines/pause", {"model": "a"})
    assert (await get(daemon, "/engines/why?model=a"))["state"] == "paused"
    async with daemon.unix.delete("/models/a") as answer:
        assert answer.status == 200
    await progress(daemon, "/models/create", pull)
    assert (await get(daemon, "/engines/why?model=a"))["state"] == "stopped"


async def test_what_is_to_be_loaded_from_the_start_is(start_daemon: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[models."smol"]\npreload = true\n')
    daemon = await start_daemon(models={"smol": 0})
    async with feed(daemon, "?since=0") as events:
        assert (await until(events, "ready"))["model"] == "smol"
    assert (await get(daemon, "/ready"))["status"] in ("ready", "busy")


async def test_a_preload_that_fails_is_loud_and_tried_again_when_it_is_mended(
    start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def install(self: FakeBackend, report: ProgressCallback, **options: Any) -> None:
        report(InstallProgress("installing"))
        self.state = BackendStatus(BackendState.RUNNING, "fake 1.0")

    monkeypatch.setattr(FakeBackend, "status", lambda self: BackendStatus(BackendState.NOT_INSTALLED))
    (tmp_path / "config.toml").write_text('[models."smol"]\npreload = true\n')
    daemon = await start_daemon(models={"smol": 0})
    async with feed(daemon, "?since=0") as events:
        assert "it could not be loaded at the start" in (await until(events, "refuse"))["reason"]
        unready = await get(daemon, "/ready", 503)
        assert (unready["status"], unready["reason"].startswith("smol is to be loaded")) == ("error", True)
        assert (await get(daemon, "/health"))["status"] == "ready"
        monkeypatch.undo()
        monkeypatch.setattr(FakeBackend, "install", install)
        await progress(daemon, "/engines/install-backend", {"backend": "fake"})
        await until(events, "ready")
    async with asyncio.timeout(HUNG):
        while (await _status(daemon)) != 200:
            pass


async def test_a_model_that_keeps_failing_is_named_and_only_a_needed_one_makes_the_daemon_unready(
    start_daemon: StartDaemon,
) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1})
    await post(daemon, "/v1/chat/completions", {**CHAT, "model": "other"})
    daemon.backend.knobs = ("--crash=no such layer",)
    for _ in range(2):  # the second failure in a row makes a pause of two seconds
        async with asyncio.timeout(HUNG):
            while (await _asked(daemon)) != 502:
                pass
    told = await get(daemon, "/ready")
    assert (told["status"], "smol failed 2 times in a row" in told["reason"]) == ("ready", True)
    await post(daemon, "/engines/pin", {"model": "smol"})
    told = await get(daemon, "/ready", 503)
    assert (told["status"], "smol failed 2 times in a row" in told["reason"]) == ("error", True)
    await post(daemon, "/v1/chat/completions", {**CHAT, "model": "other"})


async def _asked(daemon: Daemon) -> int:
    async with daemon.unix.post("/v1/chat/completions", json=CHAT) as answer:
        return answer.status


async def _why_or_none(daemon: Daemon, model: str) -> Any:
    async with daemon.unix.get(f"/engines/why?model={model}") as answer:
        return await answer.json() if answer.status == 200 else None


async def _status(daemon: Daemon) -> int:
    async with daemon.unix.get("/ready") as answer:
        return answer.status
