"""/engines: what runs, what it takes, ending it; the models' configurations; installing engines."""

import asyncio

import msgspec
from aiohttp import web

from modelrunner import api
from modelrunner.backend import BackendRegistry, InstallProgress
from modelrunner.errors import BadRequest
from modelrunner.scheduler import Scheduler
from modelrunner.server.configurations import Configurations, Entry, changed
from modelrunner.server.installs import Installer
from modelrunner.server.messages import json_response, read_json
from modelrunner.server.resolve import Resolver, check_settings, main_mode
from modelrunner.server.streaming import Report, stream_progress
from modelrunner.store import Store


class EngineRoutes:
    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        registry: BackendRegistry,
        configurations: Configurations,
        resolver: Resolver,
        installer: Installer,
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._registry = registry
        self._configurations = configurations
        self._resolver = resolver
        self._installer = installer
        self._retiring: set[asyncio.Task[api.UnloadResponse]] = set()

    def routes(self) -> list[web.RouteDef]:
        configure = [
            route
            for path in ("/engines/_configure", "/engines/{backend}/_configure")
            for route in (web.post(path, self.configure), web.get(path, self.configurations))
        ]
        return [
            web.get("/engines/status", self.status),
            web.get("/engines/ps", self.ps),
            web.get("/engines/df", self.df),
            web.post("/engines/unload", self.unload),
            web.post("/engines/{action:install|update|uninstall}-backend", self.install),
            *configure,
        ]

    async def status(self, request: web.Request) -> web.Response:
        statuses = await asyncio.to_thread(self._registry.statuses)  # a backend may ask its engine for its version
        return json_response({name: str(status) for name, status in statuses.items()})

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

    async def configure(self, request: web.Request) -> web.Response:
        wanted = await read_json(request, api.ConfigureRequest)
        wanted = _with_backend(wanted, request.match_info.get("backend"))
        bundle = await asyncio.to_thread(self._store.bundle, wanted.model)
        settings = changed(self._configurations.get(bundle.model_id).configuration, wanted)
        backend = self._resolver.backend_of(settings.backend, bundle)
        check_settings(backend, bundle, main_mode(bundle), settings)
        before = self._configurations.get(bundle.model_id).revision
        entry = await asyncio.shield(self._configurations.configure(bundle.model_id, wanted))
        shown = self._shown(bundle.model_id, str(main_mode(bundle)), entry)
        self._scheduler.events.emit("configure", model=shown.model, revision=entry.revision, config=shown.config)
        if entry.revision != before:
            self._retire(bundle.model_id)
        return json_response(shown, status=202)

    async def configurations(self, request: web.Request) -> web.Response:
        """`?model=` one of them; without it all whose model is still here."""
        only = self._store.get(request.query["model"]).id if "model" in request.query else None
        backend = request.match_info.get("backend")
        if backend is not None:
            self._registry.get(backend)
        here = {model.id for model in self._store.list()}
        found = []
        for model_id, entry in self._configurations.all().items():
            if model_id in here and only in (None, model_id):
                bundle = await asyncio.to_thread(self._store.bundle, model_id)
                if backend in (None, self._resolver.backend_of(None, bundle).name):
                    found.append(self._shown(model_id, str(main_mode(bundle)), entry))
        return json_response(found)

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

    def _retire(self, model_id: str) -> None:
        """Nothing asks for the runners of an older revision any more: they end after their last request."""
        task = asyncio.create_task(self._scheduler.unload(model_ids=[model_id]))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _shown(self, model_id: str, mode: str, entry: Entry) -> api.Configuration:
        model = self._store.get(model_id)
        name = model.tags[0] if model.tags else model.id
        return api.Configuration(name, mode, entry.revision, entry.configuration.as_dict())


def _with_backend(wanted: api.ConfigureRequest, in_path: str | None) -> api.ConfigureRequest:
    """The backend of the path counts as one in the body. Raises `BadRequest` where they differ."""
    if in_path is None:
        return wanted
    if wanted.backend not in (msgspec.UNSET, in_path):
        raise BadRequest(f"the path says backend {in_path}, the body {wanted.backend}", param="backend")
    return msgspec.structs.replace(wanted, backend=in_path)
