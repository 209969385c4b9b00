"""Resolves the backend (or None), the model and the mode of a request to the scheduler's `Target`.

A request costs a dictionary look-up: targets are cached until a model or a configuration changes. Refusals come in the
order of docs/api.md: 404, 412, 421, 501.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from threading import Lock

import msgspec

from modelrunner.backend import Backend, BackendState, DeclaredModel
from modelrunner.config.modelconfig import ModelConfiguration
from modelrunner.errors import (
    BackendNotFound,
    BackendUnavailable,
    BadRequest,
    InvalidReference,
    Misdirected,
    ModelNotFound,
    ModelRunnerError,
    NotImplementedHere,
    Unavailable,
)
from modelrunner.models.configurations import Configurations, ModelSettings
from modelrunner.models.runspecs import RunSpecs, in_effect, revision_of
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.scheduler import Replicas, RetainedSettings, Target
from modelrunner.store import Reference, Store
from modelrunner.types import DECLARED, Bundle, KeepAlive, Mode, RequestLimits, RunnerKey

_MOST_REMEMBERED = 4096
_INSTALLING_RETRY = 10.0  # seconds, for Retry-After
# A mode needs one of these capabilities, and a mode of a backend's own the one of its name. For a model without
# capabilities, the engine decides. Any text model has embeddings.
_CAPABILITIES = {
    Mode.COMPLETION: {"completion"},
    Mode.EMBEDDING: {"embedding", "completion"},
    Mode.RERANKING: {"reranking"},
}


class EngineMissing(BackendUnavailable):
    """The engine of `backend` is not installed."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(f"{backend.name} is not installed: run `modelrunner install {backend.name}`")
        self.backend = backend


class BeingInstalled(Unavailable):
    """The engine of `backend` is not installed yet."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(f"{backend.name} is being installed", retry_after=_INSTALLING_RETRY)
        self.backend = backend


class Resolver:
    """`known` holds the resolved targets that are still valid. `keep_alive` is that of models without their own.
    `max_seconds` bounds a request to any model. `now` returns the local time, which the hours of models are in."""

    def __init__(
        self,
        store: Store,
        registry: BackendRegistry,
        configurations: Configurations,
        specs: RunSpecs,
        *,
        keep_alive: KeepAlive,
        max_seconds: float | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.now = now
        self._store = store
        self._registry = registry
        self._configurations = configurations
        self._specs = specs
        self._keep_alive = keep_alive
        self._limits = RequestLimits.of(max_seconds, None)
        self.known: dict[tuple[str | None, str, Mode], Target] = {}
        self._changes = 0
        self._lock = Lock()
        store.watchers.append(self.forget)
        configurations.watchers.append(self.forget)

    def __call__(self, backend: str | None, model: str, mode: Mode) -> Target:
        """Raises `BackendNotFound`, `ModelNotFound`, `InvalidReference`, `BackendUnavailable`, `Unavailable` (being
        installed), `Misdirected`, `UnsupportedModel`, `NotImplementedHere`, `BadRequest`."""
        return self.known.get((backend, model, mode)) or self._resolved(backend, model, mode)

    def names(self, model: str) -> tuple[str, ...]:
        """The names that the model is known by, damaged or not; of one that is not here, the one that the client
        wrote."""
        try:
            stored = self._store.find(model)
            return (stored.name, *stored.tags)
        except (ModelNotFound, InvalidReference):
            pass
        try:
            return (Reference.parse(model).short,)
        except InvalidReference:
            return (model,)

    async def prepare(self, backend: str | None, model: str, mode: Mode) -> None:
        """Does the slow part of a first call (reading a model's files, looking for an engine) off the event loop.
        Raises as a call does."""
        if (backend, model, mode) not in self.known:
            await asyncio.to_thread(self._resolved, backend, model, mode)

    def main_mode(self, model: str) -> Mode:
        """Returns the mode of a model, of the store or declared, for a caller that names none. It blocks. Raises
        `ModelNotFound` and the errors of `Store.bundle`."""
        return self.mode_of(self._backend_and_bundle(None, model, None)[1])

    def mode_of(self, bundle: Bundle) -> Mode:
        """Returns the mode of a model for a caller that names none. It blocks. Raises `ModelNotFound` for one that its
        engine does not have any more."""
        mode = main_mode(bundle)
        if bundle.format is not DECLARED or mode in (modes := self._declaring(bundle).modes):
            return mode
        return min(modes)

    def declared(self, reference: str | None = None) -> list[tuple[Backend, DeclaredModel]]:
        """Returns the models that engines manage themselves, all or those with this name or ID. It blocks."""
        models = self._registry.declared()
        if reference is None:
            return models
        named = self._registry.declared_as(reference)
        return [named] if named else [each for each in models if each[1].bundle(each[0].name).model_id == reference]

    def forget(self) -> None:
        """Forgets all targets: a model, a configuration or a backend was changed. Any thread may call this."""
        with self._lock:
            self._changes += 1
            self.known.clear()

    def set_keep_alive(self, keep_alive: KeepAlive) -> None:
        """Sets the keep-alive of models without their own."""
        self._keep_alive = keep_alive
        self.forget()

    def set_max_seconds(self, max_seconds: float | None) -> None:
        """Sets the most seconds that an engine may work on one request to any model."""
        self._limits = RequestLimits.of(max_seconds, None)
        self.forget()

    def retained(self, settings: ModelConfiguration) -> RetainedSettings:
        """Returns the settings that apply without another load."""
        keep_alive = KeepAlive.parse(settings.keep_alive) if settings.keep_alive else self._keep_alive
        limits = RequestLimits.of(settings.max_seconds, settings.max_tokens).least(self._limits)
        replicas = Replicas(*msgspec.structs.astuple(settings.replica_range))
        pinned = bool(settings.pin) and settings.holds(self._minute())
        return RetainedSettings(keep_alive, pinned, limits, replicas, settings.parameters, settings.hosts or ())

    def backend_of(self, name: str | None, bundle: Bundle, mode: Mode | None = None) -> Backend:
        """Returns the named backend, else the configured backend, else the best for the bundle's format. Raises
        `BackendNotFound`, `UnsupportedModel`, `BackendUnavailable`."""
        if name is None:
            return self.configured_backend(bundle, mode or main_mode(bundle), self._configurations.settings)
        return self._registry.get(name)

    def configured_backend(self, bundle: Bundle, mode: Mode, settings: ModelSettings) -> Backend:
        """Returns the backend that would run the model with `settings`. Raises as `backend_of`, and `BadRequest` for
        another backend than the one that has the model itself."""
        name = settings.of(bundle.model_id, mode).backend
        if bundle.format is DECLARED:
            backend = self._declaring(bundle)
            if name not in (None, backend.name):
                raise BadRequest(f"{backend.name} has {bundle.name} itself: no other backend runs it", param="backend")
            return backend
        if name is None:
            return self._registry.choose(bundle)
        try:
            return self._registry.get(name)
        except (BackendNotFound, BackendUnavailable) as error:
            posted = settings.effective(bundle.model_id, mode).configuration.backend
            way = f"run `modelrunner configure {bundle.name} --backend default`"
            if posted is None:
                way = f'take `backend` out of [models."{bundle.name}"] in the configuration file'
            raise error.saying(
                f"{error.message}. {bundle.name} is configured to run on it: install that backend again, or {way}"
            ) from None

    def is_needed(self, model_id: str) -> bool:
        """Returns True for a model that is pinned or preloaded, now or at other hours."""
        settings = self._configurations.settings.of(model_id)
        return bool(settings.preload or settings.pin)

    def is_recorded(self, model: str, mode: Mode) -> bool:
        """Returns True if the bodies of the model's requests are recorded. `model` is a whole name."""
        settings = self._configurations.settings
        model_id = settings.model_id(model)
        return model_id is not None and bool(settings.of(model_id, mode).recording)

    def preloads(self) -> list[str]:
        """Returns the models to preload now: IDs, and references of models that are not here yet."""
        settings, minute = self._configurations.settings, self._minute()

        def wanted(model: ModelConfiguration) -> bool:
            return bool(model.preload) and model.holds(minute)

        stored = [model.id for model in self._store.list()]
        others = (name for name, table in settings.tables.items() if wanted(table))
        return [
            *(id for id in stored if wanted(settings.of(id))),
            *(name for name in others if settings.model_id(name) not in stored),
        ]

    def in_hours(self) -> frozenset[str]:
        """Returns those of the models' hours that hold now. When they change, the settings of models do."""
        settings, minute = self._configurations.settings, self._minute()
        every = (*settings.tables.values(), *(posted.configuration for posted in settings.posted.values()))
        return frozenset(each.hours for each in every if each.hours is not None and each.holds(minute))

    def _minute(self) -> int:
        now = self.now()
        return now.hour * 60 + now.minute

    def target(self, backend: Backend, bundle: Bundle, mode: Mode, settings: ModelSettings) -> Target:
        """Makes the target for settings that are current, or about to be. Raises `BadRequest`, `ModelNotFound` (the
        draft)."""
        configuration = in_effect(backend, settings, bundle.model_id, mode)
        spec, api = self._specs.make(backend, bundle, configuration, mode)
        key = RunnerKey(backend.name, bundle.files_id, mode, revision_of(spec, api))
        recording, fallback = bool(configuration.recording), configuration.fallback
        target = Target(key, spec, self._keep_alive, recording=recording, fallback=fallback, api=api)
        return self.retained(configuration).applied(target)

    def _resolved(self, backend: str | None, model: str, mode: Mode) -> Target:
        """Resolves, in any thread, and remembers the target unless something was changed meanwhile."""
        changes = self._changes
        target = self._target(backend, model, mode)
        with self._lock:
            if len(self.known) >= _MOST_REMEMBERED:
                self.known.clear()
            if changes == self._changes:
                self.known[backend, model, mode] = target
        return target

    def _target(self, name: str | None, model: str, mode: Mode) -> Target:
        if name is not None:
            self._registry.get(name)
        backend, bundle = self._backend_and_bundle(name, model, mode)
        _check_installed(backend)
        if bundle.format is not DECLARED:
            self._check_format(backend, bundle, model)
        serving, needed = backend.shared_modes.get(mode, (mode, ""))
        if not needed or not bundle.capabilities or needed in bundle.capabilities:
            mode = serving
        self.check_mode(backend, bundle, model, mode)
        return self.target(backend, bundle, mode, self._configurations.settings)

    def _backend_and_bundle(self, name: str | None, model: str, mode: Mode | None) -> tuple[Backend, Bundle]:
        """Returns the model of the store, else the one that an engine manages itself, and its backend."""
        try:
            bundle = self._store.bundle(model)
        except (ModelNotFound, InvalidReference):
            if (pair := self._registry.declared_as(model, name)) is None:
                raise
            backend, declared = pair
            return backend, declared.bundle(backend.name)
        return self.backend_of(name, bundle, mode), bundle

    def _declaring(self, bundle: Bundle) -> Backend:
        """Returns the backend whose engine has the model itself. Raises `ModelNotFound`."""
        for backend, declared in self.declared(bundle.name):
            if declared.bundle(backend.name).model_id == bundle.model_id:
                return backend
        raise ModelNotFound(f"no engine has {bundle.name} any more", param="model")

    def _check_format(self, backend: Backend, bundle: Bundle, model: str) -> None:
        if bundle.format in backend.formats:
            return
        try:
            where = f"ask /engines/{self._registry.choose(bundle).name}/v1/ for it, or /v1/"
        except ModelRunnerError:
            where = "no backend here runs that format"
        raise Misdirected(f"{backend.name} cannot serve {model}, a {bundle.format} model: {where}", param="model")

    def check_mode(self, backend: Backend, bundle: Bundle, model: str, mode: Mode) -> None:
        """Raises `NotImplementedHere` for a mode that no backend offers, `BadRequest` for one that this backend or the
        model lacks."""
        if not any(mode in one.modes or mode in one.shared_modes for one in self._registry):
            raise NotImplementedHere(f"no backend here offers the mode {mode}")
        if mode not in backend.modes and mode not in backend.shared_modes:
            raise BadRequest(f"{backend.name} does not offer {mode}; it offers {', '.join(sorted(backend.modes))}")
        if bundle.capabilities and not _CAPABILITIES.get(mode, {mode}) & bundle.capabilities:
            offered = ", ".join(sorted(bundle.capabilities))
            raise BadRequest(f"{model} does not offer {mode}; it offers {offered}", param="model")


def main_mode(bundle: Bundle) -> Mode:
    """Returns the mode of a model for requests that name none."""
    return next((mode for mode in Mode.known() if mode in bundle.capabilities), Mode.COMPLETION)


def _check_installed(backend: Backend) -> None:
    status = backend.status()
    match status.state:
        case BackendState.RUNNING:
            return
        case BackendState.INSTALLING:
            raise BeingInstalled(backend)
        case BackendState.NOT_INSTALLED:
            raise EngineMissing(backend)
        case BackendState.ERROR:
            raise BackendUnavailable(f"{backend.name} cannot run here: {status.details}")
