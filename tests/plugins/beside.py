"""A daemon in the test's own process, with a plug-in that can misbehave beside another backend."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from modelrunner.backend import Backend
from modelrunner.config.settings import Settings
from modelrunner.daemon.app import serve
from modelrunner.plugins.isolation import IsolatedBackend
from modelrunner.plugins.registry import BackendRegistry
from tests.plugins.rogue import Rogue, released
from tests.waiting import HUNG


class Daemon:
    def __init__(self, session: aiohttp.ClientSession, rogue: Rogue) -> None:
        self.session = session
        self.rogue = rogue

    async def chat(self, path: str, model: str, **fields: Any) -> tuple[int, Any]:
        """Asks at `path`, "/v1" or "/engines/NAME/v1". Returns the status and the answer's JSON."""
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1} | fields
        async with self.session.post(f"{path}/chat/completions", json=body) as answer:
            return answer.status, await answer.json()


@asynccontextmanager
async def beside(good: Backend, settings: Settings, *, limit: float) -> AsyncIterator[Daemon]:
    """Serves with `good` and a `Rogue`, each call of which may take `limit` seconds."""
    rogue = Rogue(settings.data_dir.parent)
    backends = {
        good.name: IsolatedBackend(good, answer_limit=HUNG, work_limit=HUNG),
        rogue.name: IsolatedBackend(rogue, answer_limit=limit, work_limit=limit),
    }
    ready = asyncio.Event()
    serving = asyncio.create_task(serve(settings, ready=ready.set, registry=BackendRegistry(backends)))
    await ready.wait()
    path = str(settings.runtime_dir / "modelrunner.sock")
    released.clear()
    async with aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(path)) as session:
        try:
            yield Daemon(session, rogue)
        finally:
            released.set()
            async with session.post("/shutdown") as answer:
                assert answer.status == 202
    await serving
    for backend in backends.values():
        backend.close(patience=HUNG)
