"""Finds the backend, the context and the capabilities of each model: from its runner if it is loaded, else from its
settings; of a model that an engine manages itself, from its backend. Keeps the last check of each."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import msgspec

from modelrunner import wire
from modelrunner.backend import DeclaredModel, Versioned
from modelrunner.errors import BackendNotFound, ModelRunnerError
from modelrunner.jsonfile import JsonFile
from modelrunner.models.configurations import Configurations, ModelSettings
from modelrunner.models.rendering import Renderings
from modelrunner.models.resolve import Resolver, main_mode
from modelrunner.models.runspecs import in_effect
from modelrunner.plugins.isolation import call_backend, interface_of
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.store import Store, StoredModel
from modelrunner.types import DECLARED, Adapter, Bundle, Mode, RunSpec, in_order
from modelrunner.units import format_bytes

MOST_AT_ONCE = 256
"""The most models whose abilities a list of models waits for: about a millisecond each."""
_PATIENCE = 0.5
"""Seconds that a list waits for the models that backends declare."""
_MOST_CHECKS = 1024
"""The most results of checks that are kept; the oldest goes first."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """`backend` serves the requests that name no backend, None if no backend can run the model. `window` is the least
    context size that the model's settings allow, in tokens of prompt and answer together; None if no backend can run
    it. `capabilities` are the model's, in the order of `CAPABILITIES`; `adapters` are the LoRA adapters of its runner
    or its configuration, else those that were packaged with it. `check` is the last one that holds for the model as it
    is now. `mode` is that of a request that names none."""

    backend: str | None = None
    window: int | None = None
    capabilities: tuple[str, ...] = ()
    adapters: tuple[wire.AppliedAdapter, ...] = ()
    check: wire.ModelCheck | None = None
    mode: Mode = Mode.COMPLETION


AbleModel = tuple[StoredModel, Abilities]
"""A model with its abilities."""


def as_they_run(models: Iterable[AbleModel], runs: Mapping[tuple[str, Mode], RunSpec]) -> list[AbleModel]:
    """Returns the models, a loaded one with the abilities of its runner. `runs` are by ID and mode."""
    listed = []
    for model, able in models:
        if (spec := runs.get((model.id, able.mode))) is not None:
            able = _able(spec.bundle, able.mode, able.backend, spec.context_size)
        listed.append((model, able))
    return listed


def _able(bundle: Bundle, mode: Mode, backend: str | None = None, window: int | None = None) -> Abilities:
    adapters = tuple(map(_applied, bundle.adapters))
    return Abilities(backend, window, in_order(bundle.capabilities), adapters, mode=mode)


def _applied(adapter: Adapter) -> wire.AppliedAdapter:
    return wire.AppliedAdapter(adapter.name, adapter.scale, adapter.size)


_NOTHING = Abilities()


class KnownAbilities:
    """Remembers the abilities of each model with its present settings. Finding them takes a millisecond for each model,
    and clients ask for the list of models often. `file` keeps them over restarts: with thousands of models, a list
    shows the abilities that were last known while `learn` finds the changes."""

    def __init__(
        self,
        store: Store,
        resolver: Resolver,
        configurations: Configurations,
        renderings: Renderings,
        file: Path,
        most: int = MOST_AT_ONCE,
    ) -> None:
        self._file = JsonFile(file, dict[str, Abilities], cache=True)
        self._written = self._file.load() or {}
        self._last = self._written
        self._most = most
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forgotten = asyncio.Event()
        self._store = store
        self._resolver = resolver
        self._renderings = renderings
        self._configurations = configurations
        self._settings = configurations.settings
        self._known: dict[str, Abilities] = {}
        self._named: dict[str, str | None] = {}
        self._looks = store.looks
        self._changes = 0
        store.watchers.append(self._store_changed)
        configurations.watchers.append(self._configured)

    def of(self, models: Sequence[StoredModel]) -> list[AbleModel]:
        """Returns each model with its abilities. Reads the disk for new models. If the abilities of more than `most`
        models must be found, returns the last known ones instead, and empty ones for a model of which none are
        known."""
        known = self._known
        unknown = sum(model.id not in known for model in models)
        find = self._find if unknown <= self._most else self._remembered
        return [(model, known.get(model.id) or find(model.id)) for model in models]

    def known(self, models: Sequence[StoredModel]) -> list[AbleModel] | None:
        """Returns each model with its abilities; None if those of one must be found."""
        listed = []
        for model in models:
            if (able := self._known.get(model.id)) is None:
                return None
            listed.append((model, able))
        return listed

    async def learn(self) -> None:
        """Finds the abilities of all models whenever they were forgotten, one after the other, until it is cancelled.
        It leaves half of the time to other work."""
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                self._forgotten.clear()
                for model in self._store.list():
                    if model.id not in self._known:
                        begin = time.monotonic()
                        await asyncio.to_thread(self._find, model.id)
                        await asyncio.sleep(time.monotonic() - begin)
                await asyncio.to_thread(self._write)
                await self._forgotten.wait()
        finally:
            self._loop = None
            self._write()

    def _write(self) -> None:
        """Writes the file, and logs a failure. Blocks."""
        here = {model.id for model in self._store.list()}
        last = {model_id: able for model_id, able in (self._last | self._known).items() if model_id in here}
        if last != self._written:
            self._file.save(last)
            self._written = last

    def _remembered(self, model_id: str) -> Abilities:
        return self._last.get(model_id, _NOTHING)

    def forget(self) -> None:
        """Forgets all models, because a backend was changed. Any thread may call this."""
        self._changes += 1
        self._last, self._known = self._last | self._known, {}
        if self._loop is not None:
            with suppress(RuntimeError):  # the daemon has ended meanwhile
                self._loop.call_soon_threadsafe(self._forgotten.set)

    def _configured(self) -> None:
        before, self._settings = self._settings, self._configurations.settings
        if before.tables is not self._settings.tables:
            self.forget()
            return
        one, other = before.posted, self._settings.posted
        changed = {key.partition("/")[0] for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
        self._changes += 1
        self._known = {model_id: able for model_id, able in self._known.items() if model_id not in changed}

    def _find(self, model_id: str) -> Abilities:
        changes, known = self._changes, self._known
        able = self._abilities_of(model_id, self._configurations.settings)
        if changes == self._changes:
            known[model_id] = able
        return able

    def _abilities_of(self, model_id: str, settings: ModelSettings) -> Abilities:
        """Fields that cannot be found keep their defaults. Reads the disk at first."""
        able = Abilities()
        try:
            bundle = self._store.bundle(model_id)
            mode = main_mode(bundle)
            able = _able(self._renderings.narrowed(bundle), mode)
            backend = self._resolver.backend_of(None, bundle, mode)
            able = replace(able, backend=backend.name)
            spec = self._resolver.target(backend, bundle, mode, settings).spec
            least = in_effect(backend, settings, model_id, mode).min_context_size
            able = _able(spec.bundle, mode, backend.name, min(spec.context_size, least or spec.context_size))
        except (ModelRunnerError, OSError):
            pass
        return able

    def _store_changed(self) -> None:
        """Called after a change of the store. It affects other models only if a setting names a model."""
        settings = self._configurations.settings
        named = {reference: settings.model_id(reference) for reference in settings.references()}
        if named != self._named or self._looks != self._store.looks:  # the models of a folder that is back
            self._named, self._looks = named, self._store.looks
            self.forget()


class DeclaredModels:
    """The models that engines manage themselves, for lists. Asks each backend for them, one call at a time. A list has
    what a slow backend declared the last time, so that one which blocks delays no list of the other models."""

    def __init__(self, registry: BackendRegistry) -> None:
        self._registry = registry
        self._known: dict[str, Sequence[DeclaredModel]] = {}
        """What each backend declared the last time, by its name."""
        self._asking: dict[str, asyncio.Task[None]] = {}
        """The calls under way, by the name of the backend."""
        self._late: set[str] = set()
        """The names of backends that were waited for in vain; no list waits for them until they have answered."""

    async def listed(self, backend: str | None = None) -> list[AbleModel]:
        """Returns the models of one backend or of all, each as one of the store is shown."""
        names = [
            name
            for name, one in self._registry.backends.items()
            if one.uses_external_model_management and backend in (None, name)
        ]
        if not names:
            return []
        calls = {name: self._asking.get(name) or self._ask(name) for name in names if name not in self._late}
        if calls:
            await asyncio.wait(calls.values(), timeout=_PATIENCE)
        self._late |= {name for name, call in calls.items() if not call.done()}
        return [as_stored(model, name) for name in names for model in self._known.get(name, ())]

    def _ask(self, name: str) -> asyncio.Task[None]:
        task = self._asking[name] = asyncio.create_task(self._learn(name), name=f"models of {name}")
        return task

    async def _learn(self, name: str) -> None:
        try:
            declared = await asyncio.to_thread(self._registry.declared, name)
            self._known[name] = [model for _, model in declared]
        finally:
            del self._asking[name]
            self._late.discard(name)


def as_stored(model: DeclaredModel, backend: str) -> AbleModel:
    """Returns the model as one of the store is shown."""
    config: dict[str, object] = {"format": str(DECLARED)}
    config |= {"size": format_bytes(model.size)} if model.size else {}
    config |= {"context_size": model.context_length} if model.context_length else {}
    stored = StoredModel(model.bundle(backend).model_id, [model.name], 0, msgspec.json.encode(config), model.size)
    return stored, Abilities(backend, model.context_length, in_order(frozenset(model.capabilities)))


class _KeptCheck(msgspec.Struct, frozen=True):
    """`settings` is a digest of the model's settings at that time."""

    check: wire.ModelCheck
    settings: str


class Checks:
    """Keeps the last result of `modelrunner check` for each model in `file`, by the model's ID, which changes with any
    of its files. A result holds as long as the engine has the same version and the model the same settings."""

    def __init__(
        self,
        file: Path,
        registry: BackendRegistry,
        configurations: Configurations,
    ) -> None:
        self._file = JsonFile(file, dict[str, _KeptCheck], cache=True)
        self._kept = self._file.load() or {}
        self._registry = registry
        self._configurations = configurations
        self._engines: dict[str, str] = {}
        """The name and the version of each backend's engine, by the name, as far as they were needed."""
        self._lock = asyncio.Lock()

    def forget_engines(self) -> None:
        """Asks the backends anew for the versions of their engines, because one was changed. Any thread may call
        this."""
        self._engines = {}

    async def keep(self, model_id: str, backend: str | None, outcome: wire.CheckOutcome) -> wire.ModelCheck:
        """Keeps the outcome of a check of the model with its present settings, and with the engine of the backend. A
        failing disk costs only the next start the result."""
        self._engines.pop(backend or "", None)
        engine = await self._engine(backend)
        check = wire.ModelCheck(outcome.passed, outcome.failed, int(time.time()), engine)
        async with self._lock:
            kept = {id: each for id, each in self._kept.items() if id != model_id}
            kept[model_id] = _KeptCheck(check, self._settings(model_id))
            while len(kept) > _MOST_CHECKS:
                del kept[next(iter(kept))]
            self._kept = kept
            await asyncio.to_thread(self._file.save, kept)
        return check

    async def shown(self, models: Iterable[AbleModel]) -> list[AbleModel]:
        """Returns the models, each with the check that holds for it among its abilities."""
        listed = []
        for model, able in models:
            if (
                (kept := self._kept.get(model.id)) is not None
                and kept.settings == self._settings(model.id)
                and kept.check.engine == await self._engine(able.backend)
            ):
                able = replace(able, check=kept.check)
            listed.append((model, able))
        return listed

    async def _engine(self, backend: str | None) -> str:
        if backend is None:
            return ""
        if (known := self._engines.get(backend)) is None:
            engines = self._engines  # those of before, if they are forgotten meanwhile
            try:
                versioned = interface_of(self._registry.get(backend), Versioned)
            except BackendNotFound:
                return ""
            version = await call_backend(versioned.version) if versioned else ""
            known = engines[backend] = f"{backend} {version}".strip()
        return known

    def _settings(self, model_id: str) -> str:
        """Returns a digest of the settings that answers depend on."""
        settings = self._configurations.settings.of(model_id, Mode.COMPLETION)
        ours = {"parameters": settings.parameters, "arguments": settings.template_arguments}
        content = msgspec.json.encode((settings.for_the_engine(), ours), order="deterministic")
        return blake2b(content, digest_size=16).hexdigest()
