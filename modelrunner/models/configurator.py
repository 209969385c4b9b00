"""Changes and shows the settings of models. The backend and the model's header validate a change before it is
stored."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from modelrunner import wire
from modelrunner.backend import Backend, ChecksRuns, TakesFlags, check_context
from modelrunner.config.locations import ConfigurationError
from modelrunner.config.modelconfig import ModelConfiguration, schema, table_name, unknown, with_raw_flags
from modelrunner.errors import BadRequest, InvalidReference, Misdirected, ModelNotFound, ModelRunnerError
from modelrunner.models.abilities import as_stored
from modelrunner.models.backendtables import backend_options, check_settings
from modelrunner.models.configurations import Configurations, ModelSettings, PostedConfiguration
from modelrunner.models.resolve import Resolver
from modelrunner.models.runspecs import folded, in_effect
from modelrunner.plugins.isolation import interface_of
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.scheduler import Scheduler, Target
from modelrunner.schema import nearest
from modelrunner.store import Store, StoredModel
from modelrunner.types import DECLARED, Bundle, Mode, RunSpec


class Validator:
    """Decides whether a model can be run with its configuration: before a change is stored, and before a file is
    applied. Its methods may read files: call them in a thread."""

    def __init__(self, registry: BackendRegistry, resolver: Resolver) -> None:
        self._registry = registry
        self._resolver = resolver

    def check_backends(self, tables: Mapping[str, Any], place: Callable[..., str]) -> None:
        """Checks the `[backends."NAME"]` tables as `check_settings` does; a table of an unknown backend is an error,
        too. `place` says where in the file a key stands. Raises `ConfigurationError`."""
        known = {backend.name for backend in self._registry} | self._registry.errors.keys()
        for name in tables.keys() - known:
            raise ConfigurationError(f"{place('backends', name)}: there is no backend {name!r}{nearest(name, known)}")
        for backend in self._registry:
            check_settings(backend, tables.get(backend.name, {}), place)

    def check_engines(self, names: Iterable[str]) -> None:
        """Raises `ConfigurationError` for an engine of the configuration file with the name of a backend."""
        for name in names:
            self._registry.check_free(name)

    def tables(self) -> set[str]:
        """Returns the names of the backends' own tables."""
        return {table_name(backend.name) for backend in self._registry}

    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of a model's settings, with the backends' own tables."""
        tables = {table_name(backend.name): backend.options_model.model_json_schema() for backend in self._registry}
        return schema([backend.name for backend in self._registry], tables)

    def check_options(self, settings: ModelConfiguration) -> None:
        """Checks the tables that only backends understand. Raises `BadRequest`."""
        tables = self.tables()
        for name in settings.options.keys() - tables:
            raise unknown(name, tables)
        for backend in self._registry:
            backend_options(backend, settings)

    def target(self, bundle: Bundle, mode: Mode, settings: ModelSettings) -> Target:
        """Returns the target that a request would get with `settings`, which need not hold yet. Raises `BadRequest`,
        `Misdirected`, `NotImplementedHere`, `ModelNotFound` for a draft model that is not here, and what
        `Resolver.backend_of` raises."""
        backend = self._resolver.configured_backend(bundle, mode, settings)
        target = self._resolver.target(backend, bundle, mode, settings)
        _check(self._resolver, backend, target.spec)
        return target


def _check(resolver: Resolver, backend: Backend, spec: RunSpec) -> None:
    bundle = spec.bundle
    if bundle.format not in (DECLARED, *backend.formats):
        raise Misdirected(f"{backend.name} cannot serve {bundle.format} models", param="backend")
    resolver.check_mode(backend, bundle, bundle.name, spec.mode)
    if flags := interface_of(backend, TakesFlags):
        flags.check_flags(spec.flags, spec.mode)
    elif spec.flags:
        raise BadRequest(f"{backend.name} takes no runtime flags", param="runtime-flags")
    if checks := interface_of(backend, ChecksRuns):
        checks.check(spec)
        return
    check_context(spec)
    if spec.draft is not None or spec.ngram or spec.mtp:
        raise BadRequest(f"{backend.name} has no speculative decoding", param="speculative")


@dataclass(frozen=True, slots=True)
class SettingParts:
    """What a change of models' settings reaches, from a request or from the file."""

    store: Store
    scheduler: Scheduler
    configurations: Configurations
    resolver: Resolver
    validator: Validator

    def retain(self, model_id: str) -> None:
        """Applies the settings that never need another load to the model's present runners."""
        settings = self.configurations.settings
        for mode in self.scheduler.modes(model_id):
            self.scheduler.retain(model_id, mode, self.resolver.retained(settings.of(model_id, mode)))


@dataclass(frozen=True, slots=True)
class _CheckedChange:
    """A checked change of a model's settings."""

    before: PostedConfiguration
    after: PostedConfiguration
    targets: Sequence[Target]
    """What the modes would run that need another load, or are to be restarted."""
    shown: wire.Configuration


class Configurator:
    """A change applies to the next load of the model, or at once with `restart`."""

    def __init__(self, parts: SettingParts) -> None:
        self._parts = parts

    async def change(
        self, reference: str, patch: Mapping[str, Any], mode: Mode | None = None, *, restart: bool = False
    ) -> wire.Configuration:
        """Checks a JSON merge patch, stores it, and applies it. `reference` is a whole name or an ID. A change that has
        begun is completed even if the caller is cancelled. Raises what `Validator.target`, `Configurations.keep` and,
        for a restart, `Scheduler.acquire` raise; then nothing is changed."""
        model = await asyncio.to_thread(self._whole, reference)
        return await asyncio.shield(asyncio.ensure_future(self._change(model, mode, patch, restart=restart)))

    async def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of the settings that `change` takes."""
        return await asyncio.to_thread(self._parts.validator.schema)

    async def show(self, reference: str | None = None, backend: str | None = None) -> list[wire.Configuration]:
        """Returns the model's settings, first for all modes and then for each mode with settings of its own; without a
        `reference`, those of every model with settings. `backend` selects the models that it runs. Raises the errors of
        `Store.get`."""
        return await asyncio.to_thread(self._show, reference, backend)

    def _show(self, reference: str | None, backend: str | None) -> list[wire.Configuration]:
        settings = self._parts.configurations.settings
        listed = []
        for model in self._all() if reference is None else [self._model(reference, self._parts.store.get)]:
            posted = [mode for id, mode, _ in settings if id == model.id]
            if reference is not None or posted or settings.from_file(model.id).as_dict():
                listed += [self._shown(model, mode, settings) for mode in dict.fromkeys([None, *posted])]
        return [shown for shown in listed if backend in (None, (shown.effective or {}).get("backend"))]

    def _whole(self, reference: str) -> StoredModel:
        return self._model(reference, lambda text: self._parts.store.whole(text)[0])

    def _model(self, reference: str, stored: Callable[[str], StoredModel]) -> StoredModel:
        """Returns the model that `stored` finds, else the one that an engine manages itself. Raises what `stored`
        raises."""
        try:
            return stored(reference)
        except (ModelNotFound, InvalidReference):
            for backend, declared in self._parts.resolver.declared(reference):
                return as_stored(declared, backend.name)[0]
            raise

    def _all(self) -> list[StoredModel]:
        declared = [as_stored(model, backend.name)[0] for backend, model in self._parts.resolver.declared()]
        return [*self._parts.store.list(), *declared]

    def _bundle(self, model: StoredModel) -> Bundle:
        """Returns the model's bundle. Raises the errors of `Store.bundle`."""
        if model.format != DECLARED:
            return self._parts.store.bundle(model.id)
        for backend, declared in self._parts.resolver.declared(model.name):
            return declared.bundle(backend.name)
        raise ModelNotFound(f"no engine has {model.name} any more", param="model")

    def _shown(
        self, model: StoredModel, mode: Mode | None, settings: ModelSettings, targets: Sequence[Target] = ()
    ) -> wire.Configuration:
        """`targets` are some that were made with these settings already."""
        effect, problem = None, ""
        try:
            effect = self._in_effect(settings, self._bundle(model), mode, targets)
        except ModelRunnerError as error:
            problem = error.message
        posted, file = settings.posted_for(model.id, mode), settings.from_file(model.id)
        config = posted.configuration.as_dict()
        return wire.Configuration(model.name, mode, posted.revision, config, file.as_dict(), effect, problem)

    def _in_effect(
        self, settings: ModelSettings, bundle: Bundle, mode: Mode | None, targets: Sequence[Target]
    ) -> dict[str, Any]:
        """Returns the settings with the defaults of the backend."""
        mode = mode or self._parts.resolver.mode_of(bundle)
        target = next((target for target in targets if target.key.mode is mode), None)
        if target is None:
            backend = self._parts.resolver.configured_backend(bundle, mode, settings)
            target = self._parts.resolver.target(backend, bundle, mode, settings)
        else:
            backend = self._parts.resolver.backend_of(target.key.backend, bundle)
        configuration = in_effect(backend, settings, bundle.model_id, mode)
        own = {"backend": backend.name, "context-size": target.spec.context_size, "parallel": target.spec.parallel}
        return configuration.as_dict() | own

    async def _change(
        self, model: StoredModel, mode: Mode | None, patch: Mapping[str, Any], *, restart: bool
    ) -> wire.Configuration:
        scheduler = self._parts.scheduler
        running = scheduler.modes(model.id)
        change = await asyncio.to_thread(self._checked, model, mode, patch, running, restart)
        with ExitStack() as leases:
            if restart:
                late = [t for t in change.targets if t.key.mode in running and not scheduler.has(t)]
                await self._restart(late, leases)
            await self._parts.configurations.keep(model.id, mode, change.before, change.after)
            if restart:
                for target in change.targets:
                    scheduler.retire(target)
        if change.after != change.before:
            self._parts.retain(model.id)
            reason, revision = ", ".join(sorted(patch)), change.after.revision
            scheduler.events.emit("configure", model=model.name, reason=reason, revision=revision)
        return change.shown

    def _checked(
        self, model: StoredModel, mode: Mode | None, patch: Mapping[str, Any], running: Collection[Mode], restart: bool
    ) -> _CheckedChange:
        """Checks a change with the present settings. Reads files. Raises as `change`."""
        settings, bundle = self._parts.configurations.settings, self._bundle(model)
        before = settings.posted_for(model.id, mode)
        after = self._patched(settings, bundle, mode, patch)
        reloads = after.for_the_engine() != before.configuration.for_the_engine()
        posted = PostedConfiguration(self._parts.configurations.take_revision() if reloads else before.revision, after)
        wanted = settings.with_posted(model.id, mode, posted)
        concerned: set[Mode] = set()
        if restart or reloads:
            concerned = {mode} if mode else {self._parts.resolver.mode_of(bundle), *running, *settings.modes(model.id)}
        targets = [self._parts.validator.target(bundle, each, wanted) for each in concerned]
        return _CheckedChange(before, posted, targets, self._shown(model, mode, wanted, targets))

    def _patched(
        self, settings: ModelSettings, bundle: Bundle, mode: Mode | None, patch: Mapping[str, Any]
    ) -> ModelConfiguration:
        """Returns the posted settings with the patch, whose runtime flags become fields where a field exists."""
        patch = with_raw_flags(patch)
        before = settings.posted_for(bundle.model_id, mode).configuration
        tables = self._parts.validator.tables()
        after = before.merged(patch, tables)
        self._parts.validator.check_options(after)
        if not patch.get("runtime-flags"):
            return after
        wanted = settings.with_posted(bundle.model_id, mode, PostedConfiguration(0, after))
        backend = self._parts.resolver.configured_backend(bundle, mode or self._parts.resolver.mode_of(bundle), wanted)
        return before.merged(folded(backend, patch), tables)

    async def _restart(self, targets: Collection[Target], leases: ExitStack) -> None:
        """Holds a runner for each of `targets` in the block; if one does not start, none is kept and the old runners
        continue."""
        for target in targets:
            try:
                leases.enter_context(await self._parts.scheduler.restart(target))
            except ModelRunnerError as error:
                for started in targets:
                    self._parts.scheduler.discard(started)
                what = f"{target.name} did not start with the new configuration, and nothing was changed"
                raise error.saying(f"{what}: {error.message}") from error
