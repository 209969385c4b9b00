"""Routes that keep models in memory, or out of memory: preload, pin, pause."""

from aiohttp import web

from modelrunner import wire
from modelrunner.api import wireforms
from modelrunner.api.documented import PROGRESS, documented
from modelrunner.api.messages import json_response, read_json
from modelrunner.api.middleware import owner_of
from modelrunner.api.streaming import stream_progress
from modelrunner.models.residency import Preloader, Residency
from modelrunner.progress import ProgressReport


class ResidencyRoutes:
    def __init__(self, residency: Residency, preloader: Preloader) -> None:
        self._residency = residency
        self._preloader = preloader

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/engines/preload", self.preload),
            web.post("/engines/{action:pin|unpin}", self.pin),
            web.post("/engines/pause", self.pause),
            web.post("/engines/resume", self.resume),
        ]

    @documented(PROGRESS, body=wire.ModelName, errors=(412, 421, 422, 502, 504, 507))
    async def preload(self, request: web.Request) -> web.StreamResponse:
        """Loads a model, and ends when it is ready."""
        wanted = await read_json(request, wire.ModelName)

        async def load(report: ProgressReport) -> wire.Progress:
            name = await self._preloader.load(wanted.model, report, owner=owner_of(request))
            return wire.Progress("success", f"{name} is loaded", model=name)

        return await stream_progress(request, load, mode="preload")

    @documented(wire.ModelState, body=wire.ModelName, errors=(422,))
    async def pin(self, request: web.Request) -> web.Response:
        """Pins a model, so that it is never evicted for another model; or unpins it."""
        model, pin = (await read_json(request, wire.ModelName)).model, request.match_info["action"] == "pin"
        residency = await self._residency.pin(model, pin=pin)
        what = "is never evicted" if pin else "is evicted where another model needs the memory"
        return json_response(wireforms.model_state(residency, what))

    @documented(wire.ModelState, body=wire.ModelName)
    async def pause(self, request: web.Request) -> web.Response:
        """Unloads a model after its last answer; its requests wait."""
        residency = await self._residency.pause((await read_json(request, wire.ModelName)).model)
        return json_response(wireforms.model_state(residency, "is paused: its requests wait for `modelrunner resume`"))

    @documented(wire.ModelState, body=wire.ModelName)
    async def resume(self, request: web.Request) -> web.Response:
        """Ends a pause."""
        residency = self._residency.resume((await read_json(request, wire.ModelName)).model)
        return json_response(wireforms.model_state(residency, "answers again: its next request loads it"))
