"""/engines/_configure: how each model is run. A change is judged by the backend and the model before anything is kept,
and holds for the next load, or at once with `apply: "restart"`."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any

from aiohttp import web

from modelrunner import api
from modelrunner.backend import Backend
from modelrunner.errors import BadRequest, Misdirected, ModelRunnerError
from modelrunner.modelconfig import ModelConfiguration, table_name, unknown, with_raw_flags
from modelrunner.registry import BackendRegistry
from modelrunner.scheduler import Scheduler, Target
from modelrunner.server.configurations import Configurations, Entry
from modelrunner.server.messages import json_response, read_json
from modelrunner.server.options import backend_options, check_backends
from modelrunner.server.resolve import Resolver, Tables, folded, main_mode
from modelrunner.store import Store
from modelrunner.types import Bundle, Mode, RunSpec


class Judge:
    """Says whether a model can be run as it is configured. Slow: it may look into files."""

    def __init__(self, registry: BackendRegistry, resolver: Resolver) -> None:
        self._registry = registry
        self._resolver = resolver

    def check_backends(self, tables: Mapping[str, Any], place: Callable[..., str]) -> None:
        """The tables of the backends themselves; `place` says where a key stands. Raises `ConfigurationError`."""
        check_backends(tables, self._registry, place)

    def check_options(self, settings: ModelConfiguration) -> None:
        """The tables that only backends understand. Raises `BadRequest`."""
        tables = {table_name(backend.name) for backend in self._registry}
        for name in settings.options.keys() - tables:
            raise unknown(name, tables)
        for backend in self._registry:
            backend_options(backend, settings)

    def backend(self, bundle: Bundle, posted: ModelConfiguration, tables: Tables | None = None) -> Backend:
        """The one that would run it. Raises `BackendNotFound`, `BackendUnavailable`, `UnsupportedModel`."""
        name = posted.backend or self._resolver.from_file(bundle.model_id, tables).backend
        return self._registry.choose(bundle) if name is None else self._registry.get(name)

    def target(self, bundle: Bundle, mode: Mode, posted: Entry, tables: Tables | None = None) -> Target:
        """What a request would ask for, found fit. Raises `BadRequest`, `Misdirected`, `NotImplementedHere`, and
        `ModelNotFound` for a draft model that is not here."""
        backend = self.backend(bundle, posted.configuration, tables)
        target = self._resolver.target(backend, bundle, mode, posted, tables)
        _check(self._resolver, backend, target.spec)
        return target


def _check(resolver: Resolver, backend: Backend, spec: RunSpec) -> None:
    bundle = spec.bundle
    if bundle.format not in backend.formats:
        raise Misdirected(f"{backend.name} cannot serve {bundle.format} models", param="backend")
    resolver.check_mode(backend, bundle, bundle.name, spec.mode)
    backend.check_flags(spec.flags, spec.mode)
    backend.check(spec)


class ConfigurationRoutes:
    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        registry: BackendRegistry,
        configurations: Configurations,
        resolver: Resolver,
        judge: Judge,
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._registry = registry
        self._configurations = configurations
        self._resolver = resolver
        self._judge = judge

    def routes(self) -> list[web.RouteDef]:
        return [
            route
            for path in ("/engines/_configure", "/engines/{backend}/_configure")
            for route in (web.post(path, self.configure), web.get(path, self.show))
        ]

    async def configure(self, request: web.Request) -> web.Response:
        wanted = await read_json(request, api.ConfigureRequest)
        patch = await read_json(request, dict[str, Any])
        for name in api.ConfigureRequest.__struct_fields__:
            patch.pop(name, None)
        patch = _with_backend(patch, request.match_info.get("backend"))
        mode = Mode(wanted.mode) if wanted.mode else None
        bundle = await asyncio.to_thread(self._store.bundle, wanted.model)
        entry = await self.change(bundle.model_id, patch, mode, restart=wanted.apply == "restart")
        return json_response(self._shown(bundle.model_id, mode, entry), status=202)

    async def change(
        self, model: str, patch: Mapping[str, Any], mode: Mode | None = None, *, restart: bool = False
    ) -> Entry:
        """Judges a merge patch, keeps it, and puts it into force. A change that has begun is ended, whether the caller
        waits for it or not. Raises what `Judge` and, for a restart, `Scheduler.acquire` raise; then nothing is
        changed."""
        bundle = await asyncio.to_thread(self._store.bundle, model)
        return await asyncio.shield(self._change(bundle, mode, patch, restart=restart))

    async def show(self, request: web.Request) -> web.Response:
        """`?model=` one of them; without it all whose model is still here."""
        only = self._store.get(request.query["model"]).id if "model" in request.query else None
        backend = request.match_info.get("backend")
        if backend is not None:
            self._registry.get(backend)
        here = {model.id for model in self._store.list()}
        found = []
        for model_id, mode, entry in self._configurations:
            if model_id in here and only in (None, model_id):
                bundle = await asyncio.to_thread(self._store.bundle, model_id)
                if backend in (None, self._resolver.backend_of(None, bundle, mode).name):
                    found.append(self._shown(model_id, mode, entry))
        return json_response(found)

    async def _change(self, bundle: Bundle, mode: Mode | None, patch: Mapping[str, Any], *, restart: bool) -> Entry:
        before = self._configurations.get(bundle.model_id, mode)
        named = mode or main_mode(bundle)
        after = await asyncio.to_thread(self._patched, before.configuration, bundle, mode, patch)
        entry = self._configurations.draft(before, after)
        running = self._scheduler.modes(bundle.model_id)
        targets = []
        if restart or entry.revision != before.revision:
            concerned = {mode} if mode else {named, *running, *self._configurations.modes(bundle.model_id)}
            for each in concerned:
                posted = self._layered(bundle.model_id, each, mode, entry)
                targets.append(await asyncio.to_thread(self._judge.target, bundle, each, posted))
        with ExitStack() as leases:
            if restart:
                late = [t for t in targets if t.key.mode in running and not self._scheduler.has(t)]
                await self._restart(late, leases)
            await self._configurations.keep(bundle.model_id, mode, before, entry)
            if restart:
                for target in targets:
                    self._scheduler.retire(target)
        if entry != before:
            self._tell(bundle, entry, patch)
        return entry

    def _patched(
        self, before: ModelConfiguration, bundle: Bundle, mode: Mode | None, patch: Mapping[str, Any]
    ) -> ModelConfiguration:
        """With flags that say what a field says in that field."""
        patch = with_raw_flags(patch)
        after = before.merged(patch)
        self._judge.check_options(after)
        layered = self._layered(bundle.model_id, mode or main_mode(bundle), mode, Entry(0, after))
        return before.merged(folded(self._judge.backend(bundle, layered.configuration), patch))

    def _layered(self, model_id: str, each: Mode, changed: Mode | None, entry: Entry) -> Entry:
        """What would hold in the mode `each` with `entry` in the place of what is set for `changed`."""
        if changed is None:
            own = self._configurations.get(model_id, each)
            return Entry(max(own.revision, entry.revision), own.configuration.over(entry.configuration))
        general = self._configurations.get(model_id)
        return Entry(entry.revision, entry.configuration.over(general.configuration))

    async def _restart(self, targets: Collection[Target], leases: ExitStack) -> None:
        """Holds a runner for each of `targets`, or none of them is left and what was there serves on."""
        for target in targets:
            try:
                leases.enter_context(await self._scheduler.restart(target))
            except ModelRunnerError as error:
                for started in targets:
                    self._scheduler.discard(started)
                what = f"{target.name} did not start with the new configuration, and nothing was changed"
                raise error.saying(f"{what}: {error.message}") from error

    def _tell(self, bundle: Bundle, entry: Entry, patch: Mapping[str, Any]) -> None:
        """Those whom it concerns at once."""
        retain(self._scheduler, self._resolver, bundle.model_id)
        name = bundle.name
        self._scheduler.events.emit("configure", model=name, reason=", ".join(sorted(patch)), revision=entry.revision)

    def _shown(self, model_id: str, mode: Mode | None, entry: Entry) -> api.Configuration:
        model = self._store.get(model_id)
        return api.Configuration(model.name, mode, entry.revision, entry.configuration.as_dict())


def retain(scheduler: Scheduler, resolver: Resolver, model_id: str) -> None:
    """What never needs another load holds at once for the runners that there are."""
    for mode in scheduler.modes(model_id):
        settings = resolver.settings(model_id, mode)
        scheduler.retain(model_id, mode, resolver.keep_alive(settings), pinned=bool(settings.pin))


def _with_backend(patch: dict[str, Any], in_path: str | None) -> dict[str, Any]:
    """The backend of the path counts as one in the body. Raises `BadRequest` where they differ."""
    if in_path is None:
        return patch
    if patch.get("backend", in_path) != in_path:
        raise BadRequest(f"the path says backend {in_path}, the body {patch['backend']}", param="backend")
    return patch | {"backend": in_path}
