"""`modelrunner reload`: what the configuration file says now takes the place of what it said, and only what changed is
touched."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from modelrunner import api
from modelrunner.errors import BackendNotFound, BadRequest, InvalidReference, ModelRunnerError
from modelrunner.locations import ConfigurationError
from modelrunner.modelconfig import ModelConfiguration
from modelrunner.scheduler import Scheduler
from modelrunner.server.configurations import Configurations
from modelrunner.server.configure import Judge, retain
from modelrunner.server.messages import json_response, read_json
from modelrunner.server.resolve import Resolver, Tables, main_mode
from modelrunner.store import Store
from modelrunner.types import Bundle, KeepAlive

log = logging.getLogger(__name__)

_AT_ONCE = "holds at once"
_RESTART = "needs a restart of the daemon"


@dataclass(frozen=True, slots=True)
class Reading:
    """The settings as they were read: values by name, the models' tables apart. `place` says where a key of the file
    stands."""

    values: Mapping[str, Any]
    models: Tables
    place: Callable[..., str]


# Gives the owner of a setting its new value; takes all of them.
Setter = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class _ModelChange:
    model_id: str
    reloads: bool
    shown: api.Change


class Reloader:
    """`read` reads the settings again; raises `ConfigurationError`. A setting that has none of the `setters`, by name,
    holds from the daemon's next start."""

    def __init__(
        self,
        current: Reading,
        read: Callable[[], Reading],
        setters: Mapping[str, Setter],
        *,
        store: Store,
        scheduler: Scheduler,
        configurations: Configurations,
        resolver: Resolver,
        judge: Judge,
    ) -> None:
        self._current = current
        self._read = read
        self._setters = setters
        self._store = store
        self._scheduler = scheduler
        self._configurations = configurations
        self._resolver = resolver
        self._judge = judge
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/engines/reload", self.handle)]

    async def handle(self, request: web.Request) -> web.Response:
        wanted = await read_json(request, api.ReloadRequest) if request.can_read_body else api.ReloadRequest()
        return json_response(await asyncio.shield(self.reload(dry_run=wanted.dry_run)))

    def in_background(self) -> None:
        """For a signal: what comes of it is in the log."""
        self._task = asyncio.get_running_loop().create_task(self._reload_and_log())

    async def _reload_and_log(self) -> None:
        try:
            done = await self.reload()
        except ModelRunnerError as error:
            log.error("nothing was reloaded: %s", error)
            return
        for change in done.changes:
            log.info("reloaded: %s: %s -> %s, %s", change.what, change.from_, change.to, change.effect)

    async def reload(self, *, dry_run: bool = False) -> api.Reloaded:
        """Says what has changed, and unless `dry_run` makes it so. Raises `BadRequest` for what cannot be; then nothing
        was changed."""
        async with self._lock:
            try:
                new = await asyncio.to_thread(self._read)
                await asyncio.to_thread(check_tables, new, self._store, self._configurations, self._judge)
            except ConfigurationError as error:
                raise BadRequest(f"{error.message}; the running configuration stays as it is") from error
            settings, models = self._settings(new), await asyncio.to_thread(self._models, new)
            if not dry_run:
                await self._apply(new, settings, models)
            return api.Reloaded(dry_run, [*settings, *(change.shown for change in models)])

    def _settings(self, new: Reading) -> list[api.Change]:
        before = self._current.values
        return [
            api.Change(name, _shown(before[name]), _shown(value), _AT_ONCE if name in self._setters else _RESTART)
            for name, value in new.values.items()
            if value != before[name]
        ]

    def _models(self, new: Reading) -> list[_ModelChange]:
        found = []
        for model in self._store.list():
            before = self._resolver.settings(model.id)
            after = self._configurations.get(model.id).configuration.over(
                self._resolver.from_file(model.id, new.models)
            )
            if before != after:
                reloads = before.for_the_engine() != after.for_the_engine()
                effect = _AT_ONCE
                if reloads:
                    loaded = self._scheduler.modes(model.id)
                    effect = "its runner is replaced" if loaded else "holds from its next load"
                shown = api.Change(f'models."{model.name}"', *_difference(before, after), effect)
                found.append(_ModelChange(model.id, reloads, shown))
        return found

    async def _apply(self, new: Reading, settings: list[api.Change], models: list[_ModelChange]) -> None:
        for change in settings:
            if setter := self._setters.get(change.what):
                setter(new.values)
        # What could not be put into force is told again the next time.
        holds = {name: value for name, value in new.values.items() if name in self._setters}
        self._current = Reading({**self._current.values, **holds}, new.models, new.place)
        self._resolver.set_file_models(new.models)
        await self._configurations.renew([change.model_id for change in models if change.reloads])
        for model in models:
            if model.reloads:
                await self._replace(model.model_id)
            self._scheduler.events.emit("configure", model=model.shown.what, reason=model.shown.effect)
        for here in self._store.list():
            retain(self._scheduler, self._resolver, here.id)

    async def _replace(self, model_id: str) -> None:
        """Its runners take nothing new; who waits for one gets another."""
        for mode in self._scheduler.modes(model_id):
            await self._resolver.prepare(None, model_id, mode)
            self._scheduler.retire(self._resolver(None, model_id, mode))


def check_tables(reading: Reading, store: Store, configurations: Configurations, judge: Judge) -> None:
    """Raises `ConfigurationError` for the first table of a backend that it does not take, or of a model that cannot be
    run so. One whose model is not here is judged as far as that goes. Reads files."""
    judge.check_backends(reading.values["backends"], reading.place)
    for reference, table in reading.models.items():
        try:
            judge.check_options(table)
            bundle = _bundle(store, reference)
            if bundle is not None:
                mode = main_mode(bundle)
                judge.target(bundle, mode, configurations.effective(bundle.model_id, mode), reading.models)
        except (BadRequest, BackendNotFound) as error:
            key = ["models", reference, *(error.param or "").split(".")]
            raise ConfigurationError(f"{reading.place(*key)}: {error.message}") from None
        except ModelRunnerError:
            continue  # an engine or a draft model that is not here (yet)


def _bundle(store: Store, reference: str) -> Bundle | None:
    try:
        return store.bundle(reference)
    except InvalidReference:
        raise
    except ModelRunnerError:  # not here (yet), or damaged
        return None


def _difference(before: ModelConfiguration, after: ModelConfiguration) -> tuple[str, str]:
    """What each says where the other says something else."""
    mine, other = before.as_dict(), after.as_dict()
    names = [name for name in mine | other if mine.get(name) != other.get(name)]

    def told(fields: Mapping[str, Any]) -> str:
        return ", ".join(f"{name} = {_shown(fields[name])}" for name in names if name in fields)

    return told(mine), told(other)


def _shown(value: Any) -> str:
    value = str(value) if isinstance(value, KeepAlive) else value
    return msgspec.json.encode(value, enc_hook=str).decode()
