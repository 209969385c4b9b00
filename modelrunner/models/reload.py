"""`modelrunner reload`: reads the configuration file again, and applies only its changes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from modelrunner.config.locations import ConfigurationError
from modelrunner.config.modelconfig import ModelConfiguration
from modelrunner.errors import BackendNotFound, BadRequest, InvalidReference, ModelRunnerError
from modelrunner.models.configurations import ModelSettings, Tables
from modelrunner.models.configurator import SettingParts, Validator
from modelrunner.models.resolve import main_mode
from modelrunner.scheduler import Target
from modelrunner.store import Store
from modelrunner.types import Bundle, Hours
from modelrunner.units import format_bytes

log = logging.getLogger(__name__)


class Effect(StrEnum):
    """The effect of a changed setting."""

    AT_ONCE = "holds at once"
    NEXT_LOAD = "holds from the model's next load"
    RUNNER_ENDS = "its runner ends after its last request; the next request starts a new one"
    RESTART = "needs a restart of the daemon"


@dataclass(frozen=True, slots=True)
class FileSettings:
    """The settings in the file: `values` by name, the models' tables apart. `place` returns the place of a key in the
    file."""

    values: Mapping[str, Any]
    models: Tables
    place: Callable[..., str]


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting with a new value in the file. `name` is that of the setting or, with `of_model`, of a model, whose
    changed fields are `before` and `after`."""

    name: str
    before: Any
    after: Any
    effect: Effect
    of_model: bool = False


@dataclass(frozen=True, slots=True)
class _ModelChange:
    model_id: str
    reference: str
    reloads: bool
    change: SettingChange


# Applies a setting, or returns the work that does so. It is called with all values.
Setter = Callable[[Mapping[str, Any]], Awaitable[None] | None]


class Reloader:
    """`read` reads the settings again; raises `ConfigurationError`. A setting without one of the `setters`, by name,
    applies from the daemon's next start."""

    def __init__(
        self,
        current: FileSettings,
        read: Callable[[], FileSettings],
        setters: Mapping[str, Setter],
        parts: SettingParts,
    ) -> None:
        self._current = current
        self._read = read
        self._setters = setters
        self._parts = parts
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def in_background(self) -> None:
        """Reloads after a signal, and writes the result to the log."""
        self._task = asyncio.get_running_loop().create_task(self._reload_and_log())

    async def _reload_and_log(self) -> None:
        try:
            changes = await self.reload()
        except ModelRunnerError as error:
            log.error("nothing was reloaded: %s", error)
            return
        for change in changes:
            log.info("reloaded: %s: %s -> %s, %s", change.name, change.before, change.after, change.effect)

    async def reload(self, *, dry_run: bool = False) -> list[SettingChange]:
        """Returns the changes in the file, and applies them unless `dry_run` is set. A reload that has begun is
        finished even if the caller is cancelled. Raises `BadRequest` for a wrong file; then nothing is changed."""
        return await asyncio.shield(asyncio.ensure_future(self._reload(dry_run=dry_run)))

    async def _reload(self, *, dry_run: bool) -> list[SettingChange]:
        async with self._lock:
            try:
                new = await asyncio.to_thread(self._read)
                wanted = self._parts.configurations.settings.with_tables(new.models)
                await asyncio.to_thread(check_tables, new, self._parts.store, wanted, self._parts.validator)
                await self._check_memory(new, wanted)
            except ConfigurationError as error:
                raise BadRequest(f"{error.message}; the running configuration stays as it is") from error
            settings, models = self._settings(new), await asyncio.to_thread(self._models, wanted)
            if not dry_run:
                await self._apply(new, settings, models)
            return [*settings, *(model.change for model in models)]

    async def _check_memory(self, new: FileSettings, wanted: ModelSettings) -> None:
        """Raises `ConfigurationError` for models that are to be in memory together and cannot: those of a group, and
        those that are pinned or preloaded at an hour. Sets that are not new are not checked: what other programs hold
        today must not keep other settings from being applied."""
        here = [model.id for model in await asyncio.to_thread(self._parts.store.list)]
        before = _together(self._current, self._parts.configurations.settings, here)
        for models, key in _together(new, wanted, here).items():
            if models in before:
                continue
            try:
                targets = await asyncio.to_thread(self._targets, models, wanted)
                short = await self._parts.scheduler.diagnostics.shortage(targets)
            except ModelRunnerError:
                continue  # an engine that is not here (yet)
            if short is not None:
                need, room = map(format_bytes, short)
                names = " and ".join(sorted(target.name for target in targets))
                what = f"{names} need {need} together, and there are {room} for all models"
                raise ConfigurationError(f"{new.place(*key)}: {what}: take one out, or give it a smaller context")

    def _targets(self, models: Iterable[str], wanted: ModelSettings) -> list[Target]:
        bundles = map(self._parts.store.bundle, models)
        return [self._parts.validator.target(bundle, main_mode(bundle), wanted) for bundle in bundles]

    def _settings(self, new: FileSettings) -> list[SettingChange]:
        before = self._current.values
        return [
            SettingChange(
                name, *_changed(before[name], value), Effect.AT_ONCE if name in self._setters else Effect.RESTART
            )
            for name, value in new.values.items()
            if value != before[name]
        ]

    def _models(self, wanted: ModelSettings) -> list[_ModelChange]:
        changes, current = [], self._parts.configurations.settings
        here = {model.id: (model.name, model.id) for model in self._parts.store.list()}
        for name in (*current.tables, *wanted.tables):  # engines have models, too
            if (model_id := current.model_id(name)) is not None:
                here.setdefault(model_id, (name, name))
        for model_id, (name, reference) in here.items():
            before, after = current.of(model_id), wanted.of(model_id)
            if before != after:
                reloads = before.for_the_engine() != after.for_the_engine()
                effect = Effect.AT_ONCE
                if reloads:
                    effect = Effect.RUNNER_ENDS if self._parts.scheduler.modes(model_id) else Effect.NEXT_LOAD
                change = SettingChange(name, *_difference(before, after), effect, of_model=True)
                changes.append(_ModelChange(model_id, reference, reloads, change))
        return changes

    async def _apply(self, new: FileSettings, settings: list[SettingChange], models: list[_ModelChange]) -> None:
        await self._parts.configurations.renew([model.model_id for model in models if model.reloads])
        for change in settings:
            setter = self._setters.get(change.name)
            if setter is not None and (work := setter(new.values)) is not None:
                await work
        await asyncio.to_thread(self._parts.store.look)  # a disk may have been mounted
        # Changes that could not be applied are reported again by the next reload.
        holds = {name: value for name, value in new.values.items() if name in self._setters}
        self._current = FileSettings({**self._current.values, **holds}, new.models, new.place)
        self._parts.configurations.set_tables(new.models)
        for model in models:
            if model.reloads:
                await self._replace(model)
            self._parts.scheduler.events.emit("configure", model=model.change.name, reason=model.change.effect)
        loaded = {model_id for runner in self._parts.scheduler.runners() for model_id in runner.models}
        for model_id in {*loaded, *(here.id for here in self._parts.store.list())}:
            self._parts.retain(model_id)

    async def _replace(self, model: _ModelChange) -> None:
        """Drains the model's runners; the requests that wait for them get new runners."""
        for mode in self._parts.scheduler.modes(model.model_id):
            await self._parts.resolver.prepare(None, model.reference, mode)
            self._parts.scheduler.retire(self._parts.resolver(None, model.reference, mode))


def check_tables(read: FileSettings, store: Store, wanted: ModelSettings, validator: Validator) -> None:
    """Raises `ConfigurationError` for the first invalid table of a backend or of a model. The table of an absent model
    is checked as far as possible. Reads files."""
    validator.check_backends(read.values["backends"], read.place)
    validator.check_engines(read.values["engines"])
    for reference, table in read.models.items():
        try:
            validator.check_options(table)
            bundle = _bundle(store, reference)
            if bundle is not None:
                validator.target(bundle, main_mode(bundle), wanted)
        except (BadRequest, BackendNotFound) as error:
            if isinstance(error, BackendNotFound) and table.backend in read.values["engines"]:
                continue  # the engine comes with the same file
            key = ["models", reference, *(error.param or "").split(".")]
            raise ConfigurationError(f"{read.place(*key)}: {error.message}") from None
        except ModelRunnerError:
            continue  # an engine or a draft model that is not here (yet)


def _together(read: FileSettings, settings: ModelSettings, here: Collection[str]) -> dict[frozenset[str], list[str]]:
    """Returns the IDs of models that are to be in memory at the same time, of the models that are `here`, each with
    the key of the file that says so."""
    sets = {}
    for name, group in read.values["groups"].items():
        sets[frozenset(here).intersection(map(settings.model_id, group.models))] = ["groups", name]
    held = {id: one for id in here if (one := settings.of(id)).pin or one.preload}
    # The most are there at the beginning of somebody's hours, if anybody has some.
    for minute in {Hours.parse(one.hours).begin % 1440 for one in held.values() if one.hours} or {0}:
        sets.setdefault(frozenset(id for id, one in held.items() if one.holds(minute)), ["models"])
    return sets


def _bundle(store: Store, reference: str) -> Bundle | None:
    try:
        return store.bundle(store.whole(reference)[0].id)
    except InvalidReference:
        raise
    except ModelRunnerError:  # not here (yet), or damaged
        return None


def _changed(before: Any, after: Any) -> tuple[Any, Any]:
    """Returns both values; of tables by name, such as those of engines, only those that differ."""
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        return before, after
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return {n: before[n] for n in names if n in before}, {n: after[n] for n in names if n in after}


def _difference(before: ModelConfiguration, after: ModelConfiguration) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields of each that the other lacks, or has with another value."""
    mine, other = _changed(before.as_dict(), after.as_dict())
    return mine, other
