"""/engines: runners and their memory, unloading, disk usage, and the installation of engines."""

from aiohttp import web

from modelrunner import wire
from modelrunner.api import wireforms
from modelrunner.api.messages import check_query, json_response, read_json
from modelrunner.api.streaming import stream_progress
from modelrunner.errors import BadRequest
from modelrunner.models.disk import DiskMeter
from modelrunner.models.installs import Installer
from modelrunner.models.residency import Residency
from modelrunner.models.statuses import Statuses
from modelrunner.scheduler import Scheduler
from modelrunner.types import ProgressReport


class EngineRoutes:
    def __init__(
        self, scheduler: Scheduler, residency: Residency, disk: DiskMeter, statuses: Statuses, installer: Installer
    ) -> None:
        self._scheduler = scheduler
        self._residency = residency
        self._disk = disk
        self._statuses = statuses
        self._installer = installer

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/engines/status", self.status),
            web.get("/engines/ps", self.ps),
            web.get("/engines/df", self.df),
            web.post("/engines/prune", self.prune),
            web.post("/engines/unload", self.unload),
            web.post("/engines/{action:install|update|uninstall}-backend", self.install),
        ]

    async def status(self, request: web.Request) -> web.Response:
        return json_response({name: str(status) for name, status in (await self._statuses()).items()})

    async def ps(self, request: web.Request) -> web.Response:
        return json_response([wireforms.runner(view) for view in self._scheduler.runners()])

    async def df(self, request: web.Request) -> web.Response:
        return json_response(wireforms.disk_usage(await self._disk.usage()))

    async def prune(self, request: web.Request) -> web.Response:
        check_query(request)
        return json_response(wire.PruneResponse(await self._disk.forget_conversations()))

    async def unload(self, request: web.Request) -> web.Response:
        wanted = await read_json(request, wire.UnloadRequest)
        done = await self._residency.unload(
            all=wanted.all, backend=wanted.backend, models=wanted.models, force=wanted.force
        )
        return json_response(wireforms.unloaded(done))

    async def install(self, request: web.Request) -> web.StreamResponse:
        wanted = await read_json(request, wire.InstallRequest)
        action = request.match_info["action"]
        options = {"build": True} if wanted.build else {}
        if options and action == "uninstall":
            raise BadRequest("build is an option of installing and updating", param="build")

        async def work(report: ProgressReport) -> wire.Progress:
            return wire.Progress("success", await self._installer.run(action, wanted.backend, options, report))

        return await stream_progress(request, work, mode="install")
