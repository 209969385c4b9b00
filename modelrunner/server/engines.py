"""/engines: what runs, what it takes, ending it; installing engines."""

import asyncio

from aiohttp import web

from modelrunner import api
from modelrunner.backend import InstallProgress
from modelrunner.errors import BadRequest
from modelrunner.registry import BackendRegistry
from modelrunner.scheduler import Scheduler
from modelrunner.server.installs import Installer
from modelrunner.server.messages import json_response, read_json
from modelrunner.server.statuses import Statuses
from modelrunner.server.streaming import Report, stream_progress
from modelrunner.store import Store


class EngineRoutes:
    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        registry: BackendRegistry,
        statuses: Statuses,
        installer: Installer,
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._registry = registry
        self._statuses = statuses
        self._installer = installer

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/engines/status", self.status),
            web.get("/engines/ps", self.ps),
            web.get("/engines/df", self.df),
            web.post("/engines/unload", self.unload),
            web.post("/engines/{action:install|update|uninstall}-backend", self.install),
        ]

    async def status(self, request: web.Request) -> web.Response:
        return json_response(await self._statuses())

    async def ps(self, request: web.Request) -> web.Response:
        return json_response(self._scheduler.runners())

    async def df(self, request: web.Request) -> web.Response:
        models, total, partial = await asyncio.to_thread(self._store.disk_usage)
        backends = [
            api.BackendUsage(b.name, await asyncio.to_thread(b.version), await b.disk_usage()) for b in self._registry
        ]
        size = sum(backend.size for backend in backends)
        return json_response(api.DiskUsage(models, backends, total, size, partial))

    async def unload(self, request: web.Request) -> web.Response:
        wanted = await read_json(request, api.UnloadRequest)
        if not (wanted.all or wanted.backend or wanted.models):
            raise BadRequest("say what to unload: all, a backend, or models", param="models")
        if wanted.backend:
            self._registry.get(wanted.backend)
        ids = [self._store.get(model).id for model in wanted.models]
        done = await self._scheduler.unload(all=wanted.all, backend=wanted.backend, model_ids=ids, force=wanted.force)
        return json_response(done)

    async def install(self, request: web.Request) -> web.StreamResponse:
        wanted = await read_json(request, api.InstallRequest)
        action = request.match_info["action"]
        self._registry.get(wanted.backend)
        options = {"build": True} if wanted.build else {}
        if options and action == "uninstall":
            raise BadRequest("build is an option of installing and updating", param="build")

        async def work(report: Report) -> api.Progress:
            def step(progress: InstallProgress) -> None:
                report(api.Progress("progress", progress.message, progress.total, progress.current, phase=action))

            return api.Progress("success", await self._installer.run(action, wanted.backend, options, step))

        return await stream_progress(request, work, mode="install")
