"""What an operator decides about one model's memory: loaded now, never evicted, or not loaded for a while."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from modelrunner import api
from modelrunner.scheduler import Scheduler
from modelrunner.server.messages import json_response, read_json
from modelrunner.server.preload import Preloader
from modelrunner.server.streaming import Report, stream_progress
from modelrunner.store import Store

# Changes a model's configuration, by its ID: as `_configure` does.
Configure = Callable[[str, Mapping[str, Any]], Awaitable[object]]


class ResidencyRoutes:
    def __init__(self, store: Store, scheduler: Scheduler, preloader: Preloader, configure: Configure) -> None:
        self._store = store
        self._scheduler = scheduler
        self._preloader = preloader
        self._configure = configure

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/engines/preload", self.preload),
            web.post("/engines/{action:pin|unpin}", self.pin),
            web.post("/engines/{action:pause|resume}", self.pause),
        ]

    async def preload(self, request: web.Request) -> web.StreamResponse:
        wanted = await read_json(request, api.ModelName)

        async def load(report: Report) -> api.Progress:
            name = await self._preloader.load(wanted.model, report)
            return api.Progress("success", f"{name} is loaded", model=name)

        return await stream_progress(request, load, mode="preload")

    async def pin(self, request: web.Request) -> web.Response:
        """Kept in the model's configuration; holds at once, and for runners to come."""
        model = self._store.get((await read_json(request, api.ModelName)).model)
        pin = request.match_info["action"] == "pin"
        await self._configure(model.id, {"pin": pin})
        return json_response(self._state(model, "is never evicted" if pin else "makes room where it must"))

    async def pause(self, request: web.Request) -> web.Response:
        """Pausing answers when the runners are gone, or after the time that a drain may take."""
        model = self._store.get((await read_json(request, api.ModelName)).model)
        if request.match_info["action"] == "pause":
            await asyncio.shield(self._scheduler.pause(model.id))
            return json_response(self._state(model, "is paused: its requests wait for `modelrunner resume`"))
        self._scheduler.resume(model.id)
        return json_response(self._state(model, "answers again: its next request loads it"))

    def _state(self, model: api.Model, what: str) -> api.ModelState:
        states = (runner.state for runner in self._scheduler.runners() if runner.model_id == model.id)
        return api.ModelState(model.name, next(states, "stopped"), f"{model.name} {what}")
