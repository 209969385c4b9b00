"""A plug-in that misbehaves beside a backend that serves: the requests of the other are neither lost nor held up, and
those who ask for the plug-in's models are told its name."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from modelrunner.daemon.app import serve
from modelrunner.plugins.isolation import IsolatedBackend
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.store import Store
from tests.api.conftest import make_settings
from tests.fakes import FakeBackend
from tests.plugins.rogue import FAULTS, Rogue, released
from tests.store.samples import add_model
from tests.waiting import HUNG


class Daemon:
    def __init__(self, session: aiohttp.ClientSession, rogue: Rogue) -> None:
        self.session = session
        self.rogue = rogue

    async def chat(self, backend: str, model: str) -> tuple[int, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        async with self.session.post(f"/engines/{backend}/v1/chat/completions", json=body) as answer:
            return answer.status, await answer.json()


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    settings = make_settings(tmp_path, listen="")
    settings.data_dir.mkdir()
    store = Store(settings.data_dir)
    add_model(store, "good", 0)
    add_model(store, "bad", 1)
    rogue = Rogue(tmp_path)
    good = IsolatedBackend(FakeBackend(tmp_path), answer_limit=HUNG, work_limit=HUNG)
    backends = {"fake": good, "rogue": IsolatedBackend(rogue, answer_limit=1.0, work_limit=1.0)}
    ready = asyncio.Event()
    serving = asyncio.create_task(serve(settings, ready=ready.set, registry=BackendRegistry(backends)))
    await ready.wait()
    path = str(settings.runtime_dir / "modelrunner.sock")
    released.clear()
    async with aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(path)) as session:
        yield Daemon(session, rogue)
        released.set()
        async with session.post("/shutdown") as answer:
            assert answer.status == 202
    await serving
    for backend in backends.values():
        backend.close(patience=HUNG)


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_request_of_another_backend_is_lost_or_waits_for_it(daemon: Daemon, fault: str) -> None:
    """While the plug-in keeps its caller waiting, the other backend answers one request after the other."""
    assert (await daemon.chat("fake", "good"))[0] == 200
    daemon.rogue.fault = fault
    asked = asyncio.create_task(daemon.chat("rogue", "bad"))
    answered = 0
    while not asked.done() or answered < 5:
        assert (await daemon.chat("fake", "good"))[0] == 200
        answered += 1
    status, answer = await asked
    if fault == "disk usage raises":
        assert status == 200
    else:
        assert status in (412, 502)
        assert "rogue" in answer["error"]["message"]


@pytest.mark.parametrize("fault", FAULTS)
async def test_commands_that_look_at_all_backends_go_on(daemon: Daemon, fault: str) -> None:
    daemon.rogue.fault = fault
    for path in ("/engines/status", "/engines/df", "/engines/ps", "/models", "/v1/models", "/version", "/ready"):
        async with daemon.session.get(path) as answer:
            assert answer.status == 200, path
    async with daemon.session.get("/engines/status") as answer:
        statuses = await answer.json()
    assert statuses["fake"].startswith("Running")
    if fault.startswith("status"):
        assert "rogue" in statuses["rogue"]
