"""/engines: runners and their memory, preloading, pins and pauses, unloading, disk usage, and the installation of
engines."""

import msgspec
from aiohttp import web

from modelrunner import wire
from modelrunner.api import wireforms
from modelrunner.api.documented import PROGRESS, documented
from modelrunner.api.messages import json_response, read_json
from modelrunner.api.middleware import owner_of
from modelrunner.api.reach import Reach
from modelrunner.api.streaming import stream_progress
from modelrunner.errors import BadRequest
from modelrunner.models.configurations import Configurations
from modelrunner.models.disk import DiskMeter
from modelrunner.models.installs import Installer, Statuses
from modelrunner.models.library import Library
from modelrunner.models.residency import Preloader, Residency
from modelrunner.models.tuner import Tuner
from modelrunner.progress import ProgressReport
from modelrunner.scheduler import RunnerView, Scheduler
from modelrunner.telemetry.exposition import drafts_of


class EngineRoutes:
    def __init__(
        self,
        library: Library,
        scheduler: Scheduler,
        residency: Residency,
        disk: DiskMeter,
        statuses: Statuses,
        installer: Installer,
        configurations: Configurations,
    ) -> None:
        self._reach = Reach(library)
        self._scheduler = scheduler
        self._residency = residency
        self._disk = disk
        self._statuses = statuses
        self._installer = installer
        self._configurations = configurations

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/engines/status", self.status),
            web.get("/engines/ps", self.ps),
            web.get("/engines/df", self.df),
            web.post("/engines/prune", self.prune),
            web.post("/engines/unload", self.unload),
            web.post("/engines/{action:install|update|uninstall}-backend", self.install),
        ]

    @documented(dict[str, str])
    async def status(self, request: web.Request) -> web.Response:
        """Shows for each backend whether it is running, installing, not installed or faulty."""
        return json_response({name: str(status) for name, status in (await self._statuses()).items()})

    @documented(list[wire.RunnerStatus])
    async def ps(self, request: web.Request) -> web.Response:
        """Lists the runners."""
        runners = self._scheduler.runners()
        drafting = [view for view in runners if self._drafts(view)]
        drafts = await drafts_of(drafting) if drafting else {}
        return json_response([wireforms.runner(view, drafts.get(view.id)) for view in runners])

    def _drafts(self, view: RunnerView) -> bool:
        settings = self._configurations.settings
        return any(settings.of(model_id, view.mode).speculative for model_id in view.models)

    @documented(wire.DiskUsage)
    async def df(self, request: web.Request) -> web.Response:
        """Shows the disk use of models and engines."""
        usage = await self._disk.usage()
        shown = [model for model in usage.models if self._reach.allows(request, model.id, *model.tags)]
        return json_response(msgspec.structs.replace(usage, models=shown))

    @documented(wire.PruneResponse, query={})
    async def prune(self, request: web.Request) -> web.Response:
        """Removes the saved conversations of all models."""
        return json_response(wire.PruneResponse(await self._disk.forget_conversations()))

    @documented(wire.UnloadResponse, body=wire.UnloadRequest)
    async def unload(self, request: web.Request) -> web.Response:
        """Drains runners, and ends them."""
        wanted = await read_json(request, wire.UnloadRequest)
        done = await self._residency.unload(
            all=wanted.all, backend=wanted.backend, models=wanted.models, force=wanted.force
        )
        return json_response(wireforms.unloaded(done))

    @documented(PROGRESS, body=wire.InstallRequest, errors=(409, 412, 501, 502, 504, 507))
    async def install(self, request: web.Request) -> web.StreamResponse:
        """Installs, updates or removes an engine."""
        wanted = await read_json(request, wire.InstallRequest)
        action = request.match_info["action"]
        options = {"build": wanted.build, "variant": wanted.variant}
        options = {name: value for name, value in options.items() if value}
        if options and action == "uninstall":
            name = min(options)
            raise BadRequest(f"{name} is an option of installing and updating", param=name)

        async def work(report: ProgressReport) -> wire.Progress:
            return wire.Progress("success", await self._installer.run(action, wanted.backend, options, report))

        return await stream_progress(request, work, mode="install")


class ResidencyRoutes:
    def __init__(self, residency: Residency, preloader: Preloader, tuner: Tuner) -> None:
        self._residency = residency
        self._preloader = preloader
        self._tuner = tuner

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/engines/preload", self.preload),
            web.post("/engines/tune", self.tune),
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

    @documented(wire.Tuning, body=wire.ModelName, errors=(412, 421, 422, 502, 504, 507))
    async def tune(self, request: web.Request) -> web.Response:
        """Measures what makes a model faster on this machine, which takes minutes, and keeps it."""
        return json_response(await self._tuner.tune((await read_json(request, wire.ModelName)).model))

    @documented(wire.ModelState, body=wire.ModelName, errors=(422,))
    async def pin(self, request: web.Request) -> web.Response:
        """Pins a model, so that it is never evicted for another model; or unpins it."""
        model, pin = (await read_json(request, wire.ModelName)).model, request.match_info["action"] == "pin"
        return json_response(await self._residency.pin(model, pin=pin))

    @documented(wire.ModelState, body=wire.ModelName)
    async def pause(self, request: web.Request) -> web.Response:
        """Unloads a model after its last answer; its requests wait."""
        return json_response(await self._residency.pause((await read_json(request, wire.ModelName)).model))

    @documented(wire.ModelState, body=wire.ModelName)
    async def resume(self, request: web.Request) -> web.Response:
        """Ends a pause."""
        return json_response(self._residency.resume((await read_json(request, wire.ModelName)).model))
