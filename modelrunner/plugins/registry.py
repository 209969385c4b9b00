"""The installed backends: found by their entry points, chosen by name or for a model."""

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Self

from modelrunner.backend import (
    OPTIONAL,
    Backend,
    BackendContext,
    BackendState,
    BackendStatus,
    DeclaredModel,
    DeclaresModels,
    ListsDevices,
    Ranks,
    RunsElsewhere,
)
from modelrunner.config.locations import ConfigurationError
from modelrunner.errors import BackendNotFound, BackendUnavailable, ModelRunnerError, UnsupportedModel
from modelrunner.jsonfile import JsonFile
from modelrunner.plugins.isolation import WORK_LIMIT, IsolatedBackend, interface_of
from modelrunner.plugins.thread import BackendThread, CallTimeout
from modelrunner.types import Bundle, EngineDevice, Mode, ModelFormat

ENTRY_POINT_GROUP = "modelrunner.backends"
_DISTRIBUTION = "modelrunner"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
_PATIENCE = 0.5
"""Seconds that further callers wait for a backend that is being asked for its models."""
_CALL = re.compile(r"/v1/(?!(?:models|files|batches|responses|streams|tools)(?:/|$))[a-z0-9_-]+(?:/[a-z0-9_-]+)*")
"""The path of a call that a backend may add: no path that is open without a key, or that the control plane has."""
log = logging.getLogger(__name__)


class BackendRegistry:
    """The backends of this process, by name. A backend that cannot be imported or made is kept as its error, so that
    one broken plug-in hides no other.

    Methods may be called in any thread; those that ask backends block."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        errors: Mapping[str, str] | None = None,
        *,
        own: frozenset[str] = frozenset(),
        configured: frozenset[str] = frozenset(),
        chosen: JsonFile[dict[str, str]] | None = None,
    ) -> None:
        """`own` are the names of modelrunner's own backends, `configured` those of the configuration file's engines.
        `chosen` keeps, by model ID, the backend that was chosen
        for each model."""
        self.backends: Mapping[str, Backend] = dict(backends)
        """Those that work, by name. It is replaced, and never changed."""
        self._asking = {name: threading.Lock() for name in backends}
        """Held while a backend is asked for its models, by its name."""
        self._declared: dict[str, Sequence[DeclaredModel]] = {}
        """What each backend declared the last time, by its name."""
        self._own = own
        self._configured = configured
        self._replaced: list[Backend] = []  # their last runs may go on
        self._silent: set[str] = set()  # those whose engines do not say which devices they have
        self._file = chosen
        self._chosen = (chosen.load() if chosen is not None else None) or {}
        self.errors = dict(errors or {})

    @classmethod
    def discover(
        cls,
        context: Callable[[type[Backend]], BackendContext],
        *,
        configured: Iterable[type[Backend]] = (),
        chosen: JsonFile[dict[str, str]] | None = None,
    ) -> Self:
        """Loads the entry points of group `modelrunner.backends`, and adds the `configured` ones; `context(backend)`
        makes each its context. Raises the `ConfigurationError` that `context` raises, and one for a configured engine
        with the name of a backend."""
        backends: dict[str, Backend] = {}
        errors: dict[str, str] = {}
        own: set[str] = set()
        for entry in entry_points(group=ENTRY_POINT_GROUP):
            try:
                backends[entry.name] = IsolatedBackend(_instance(entry, context))
            except ConfigurationError:
                raise  # the plug-in works, its settings are wrong
            except Exception as error:  # a plug-in may fail in any way; /engines/status reports it
                log.exception("backend %s cannot be used", entry.name)
                errors[entry.name] = f"{type(error).__name__}: {error}"
            if entry.dist is not None and entry.dist.name == _DISTRIBUTION:
                own.add(entry.name)
        registry = cls(backends, errors, own=frozenset(own), chosen=chosen)
        for kind in configured:
            registry.check_free(kind.name)
            registry.configure(kind.name, kind(context(kind)))
        return registry

    def check_free(self, engine: str) -> None:
        """Raises `ConfigurationError` if a backend has the name that the configuration file gives to an engine."""
        if engine not in self._configured and (engine in self.backends or engine in self.errors):
            raise ConfigurationError(f"[engines.{engine}]: a backend has this name: choose another")

    def configure(self, name: str, engine: Backend | None) -> None:
        """Puts the engine of the configuration file in place of the one with its name; None takes that out. The earlier
        one stays until the daemon ends, for its last runs."""
        others = {other: backend for other, backend in self.backends.items() if other != name}
        if name in self.backends:
            self._replaced.append(self.backends[name])
        self._asking[name] = threading.Lock()
        self._declared.pop(name, None)
        self._configured |= {name}
        self.backends = others if engine is None else {**others, name: IsolatedBackend(engine)}

    def __iter__(self) -> Iterator[Backend]:
        return iter(self.backends.values())

    def get(self, name: str) -> Backend:
        """Returns the backend. Raises `BackendNotFound`, or `BackendUnavailable` for one that could not be loaded."""
        if name in self.errors:
            raise BackendUnavailable(f"backend {name} could not be loaded: {self.errors[name]}")
        try:
            return self.backends[name]
        except KeyError:
            known = ", ".join(sorted(self.backends))
            raise BackendNotFound(f"there is no backend {name!r}; known here: {known}", param="backend") from None

    def choose(self, bundle: Bundle) -> Backend:
        """Returns the backend for a model without a configured one: the one chosen before, as long as it is installed
        and accepts the model; else, in this order, an installed backend, the higher priority, one of modelrunner's own,
        the first name. Raises `UnsupportedModel`, or the `BackendUnavailable` of the only candidate.

        The one chosen before is asked first, so that a new backend which answers slowly delays no present model."""
        unfit: ModelRunnerError | None = None
        all_asked = True
        ranked: list[tuple[bool, float, bool, Backend]] = []
        chosen = self._chosen.get(bundle.model_id)
        for backend in sorted(self, key=lambda backend: (backend.name != chosen, backend.name)):
            if bundle.format in backend.formats:
                try:
                    ranks = interface_of(backend, Ranks)
                    priority = ranks.priority(bundle) if ranks else 0.0
                except ModelRunnerError as error:
                    unfit = unfit or error
                    all_asked &= isinstance(
                        error, UnsupportedModel | BackendUnavailable
                    )  # another error says nothing of the model
                    continue
                installed = backend.status().state is BackendState.RUNNING
                if installed and backend.name == chosen:
                    return backend
                ranked.append((not installed, -priority, backend.name not in self._own, backend))
        if not ranked:
            raise unfit or UnsupportedModel(f"no backend here runs models in the {bundle.format} format")
        missing, _, _, best = min(ranked, key=lambda rank: (*rank[:3], rank[3].name))
        if not missing and all_asked:
            self._remember(bundle.model_id, best.name)
        return best

    def declared(self, name: str | None = None) -> list[tuple[Backend, DeclaredModel]]:
        """Returns the models that engines manage themselves, of the backend `name` or of all. It blocks: one caller as
        long as a backend does, others for a moment; they get what it declared the last time."""
        return [
            (backend, model)
            for backend in self
            if backend.uses_external_model_management and name in (None, backend.name)
            for model in self._models(backend)
        ]

    def declared_as(self, model: str, name: str | None = None) -> tuple[Backend, DeclaredModel] | None:
        """Returns the model that an engine manages itself under this name, and its backend, of the backend `name` or of
        all; None if there is none. A server elsewhere may have models that it does not list. Blocks as `declared`."""
        for backend, declared in self.declared(name):
            if declared.name in (model, model.removesuffix(":latest")):  # Ollama's clients add this
                return backend, declared
        for backend in self:
            if name in (None, backend.name) and interface_of(backend, RunsElsewhere) is not None:
                if model.startswith(f"{backend.name}/"):
                    return backend, DeclaredModel(model, frozenset())
                if name is not None:
                    return self.declared_as(f"{name}/{model}", name)
        return None

    def _models(self, backend: Backend) -> Sequence[DeclaredModel]:
        declares = interface_of(backend, DeclaresModels)
        asking = self._asking[backend.name]
        if declares is None or not asking.acquire(timeout=_PATIENCE):
            return self._declared.get(backend.name, ())
        try:
            self._declared[backend.name] = models = declares.models()
        finally:
            asking.release()
        return models

    def _remember(self, model_id: str, name: str) -> None:
        self._chosen = {**self._chosen, model_id: name}
        if self._file is not None:
            self._file.save(self._chosen)

    def forget(self, model_id: str) -> None:
        """Forgets the choice for a removed model. Writes a file."""
        if model_id in self._chosen:
            self._chosen = {other: name for other, name in self._chosen.items() if other != model_id}
            if self._file is not None:
                self._file.save(self._chosen)

    def devices(self) -> dict[str, Sequence[EngineDevice]]:
        """Returns the devices of each engine that lists them. One that does not say is left out; its fault is
        logged once."""
        devices: dict[str, Sequence[EngineDevice]] = {}
        for backend in self:
            if (lists := interface_of(backend, ListsDevices)) is None:
                continue
            try:
                if (listed := lists.devices()) is not None:
                    devices[backend.name] = listed
                self._silent.discard(backend.name)
            except (ModelRunnerError, OSError) as error:
                if backend.name not in self._silent:
                    log.warning("%s does not say which devices it has: %s", backend.name, error)
                self._silent.add(backend.name)
        return devices

    def statuses(self) -> dict[str, BackendStatus]:
        statuses = {backend.name: backend.status() for backend in self}
        return statuses | {name: BackendStatus(BackendState.ERROR, why) for name, why in self.errors.items()}

    def close(self) -> None:
        """Ends the threads of isolated backends."""
        for backend in (*self, *self._replaced):
            if isinstance(backend, IsolatedBackend):
                backend.close()


def _instance(entry: EntryPoint, context: Callable[[type[Backend]], BackendContext]) -> Backend:
    """Imports and makes a backend, on a thread of its own, because its code may hang. Raises the backend's errors,
    `TimeoutError`, and `ValueError` for a class that breaks the contract."""
    thread = BackendThread(f"import of backend {entry.name}")

    async def make() -> Backend:
        kind: type[Backend] = entry.load()
        _check_class(entry, kind)
        return kind(context(kind))

    try:
        return thread.wait_for(make, WORK_LIMIT)
    except CallTimeout as error:
        raise TimeoutError(f"its import or its constructor {error}") from None
    finally:
        thread.stop(0.0)


def _check_class(entry: EntryPoint, kind: type[Backend]) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Backend)):
        raise ValueError(f"{entry.value} is not a class derived from Backend")
    if kind.name != entry.name:
        raise ValueError(f"the entry point {entry.name!r} is a backend named {kind.name!r}")
    if not _NAME.fullmatch(kind.name):
        raise ValueError(f"{kind.name!r}: a name is lower case, with digits, '.', '_' and '-', at most 32 characters")
    for what, values, member in (("formats", kind.formats, ModelFormat), ("modes", kind.modes, Mode)):
        if not values or not all(isinstance(value, member) for value in values):
            raise ValueError(f"its {what} are {values!r}, not a set of {member.__name__}")
    for path in kind.calls:
        if not _CALL.fullmatch(path):
            raise ValueError(f"its call {path!r} is no path below /v1/ that modelrunner leaves to backends")
    for interface in OPTIONAL:
        methods = {name for name in vars(interface) if not name.startswith("_")}
        missing = {name for name in methods if not hasattr(kind, name)}
        if missing and missing != methods:
            named = ", ".join(sorted(methods))
            raise ValueError(f"it has no {min(missing)}: {interface.__name__} are the methods {named} together")
    if kind.uses_external_model_management and not hasattr(kind, "models"):
        raise ValueError("it manages its models itself, and has no `models` that declares them")
    for name in ("run", "install", "uninstall", "disk_usage", "required_memory"):
        if not asyncio.iscoroutinefunction(getattr(kind, name)):
            raise ValueError(f"its {name} is not a coroutine function (async def)")
