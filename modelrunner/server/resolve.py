"""From what a request says (backend or none, model, mode) to what the scheduler is asked for.

A request pays a dictionary look-up: targets are remembered until a model or a configuration changes. The order of the
refusals is the interface's: 404, 412, 421, 501.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from modelrunner.backend import Backend, BackendRegistry, BackendState
from modelrunner.errors import (
    BackendUnavailable,
    BadRequest,
    Misdirected,
    ModelNotFound,
    ModelRunnerError,
    NotImplementedHere,
    Unavailable,
)
from modelrunner.scheduler import Target
from modelrunner.server.configurations import NOTHING_SET, Configurations, ModelConfiguration
from modelrunner.store import Store
from modelrunner.types import Bundle, KeepAlive, Mode, ProcessOptions, RunnerKey, RunSpec

_MOST_REMEMBERED = 4096
_INSTALLING_RETRY = 10.0  # seconds, for Retry-After
# What a model must be for a mode; a model that says nothing about itself is left to its engine. Any text model has
# embeddings to give.
_CAPABILITIES = {
    Mode.COMPLETION: {"completion"},
    Mode.EMBEDDING: {"embedding", "completion"},
    Mode.RERANKING: {"reranking"},
    Mode.IMAGE_GENERATION: {"image-generation"},
}


class Resolver:
    """`file_models` are the `[models."REF"]` tables of the configuration file; what was POSTed wins over them."""

    def __init__(
        self,
        store: Store,
        registry: BackendRegistry,
        configurations: Configurations,
        *,
        logs: Path,
        keep_alive: KeepAlive,
        stop_grace: float,
        file_models: Mapping[str, ModelConfiguration],
    ) -> None:
        self._store = store
        self._registry = registry
        self._configurations = configurations
        self._logs = logs
        self._keep_alive = keep_alive
        self._stop_grace = stop_grace
        self._file_models = file_models
        self._targets: dict[tuple[str | None, str, Mode], Target] = {}
        self._seen = (-1, -1)

    def __call__(self, backend: str | None, model: str, mode: Mode) -> Target:
        """Raises `BackendNotFound`, `ModelNotFound`, `InvalidReference`, `BackendUnavailable`, `Unavailable` (being
        installed), `Misdirected`, `UnsupportedModel`, `NotImplementedHere`."""
        return self.known(backend, model, mode) or self._remember(backend, model, mode)

    def known(self, backend: str | None, model: str, mode: Mode) -> Target | None:
        """What was resolved before and still holds; costs well under a microsecond."""
        now = (self._store.generation, self._configurations.generation)
        if now != self._seen:
            self._targets.clear()
            self._seen = now
        return self._targets.get((backend, model, mode))

    async def prepare(self, backend: str | None, model: str, mode: Mode) -> None:
        """Does what a first call would wait for (reading a model's files, looking for an engine) off the event loop.
        Raises as a call does."""
        if self.known(backend, model, mode) is None:
            await asyncio.to_thread(self._target, backend, model, mode)

    def forget(self) -> None:
        """After a backend was changed or removed."""
        self._targets.clear()

    def settings(self, model_id: str) -> ModelConfiguration:
        """What is set for the model, POSTed over the configuration file."""
        return self._configurations.get(model_id).configuration.over(self._from_file(model_id))

    def backend_of(self, name: str | None, bundle: Bundle) -> Backend:
        """The named backend, else the configured one, else the best for the bundle's format. Raises `BackendNotFound`,
        `UnsupportedModel`, `BackendUnavailable`."""
        name = name or self.settings(bundle.model_id).backend
        return self._registry.choose(bundle) if name is None else self._registry.get(name)

    def _remember(self, backend: str | None, model: str, mode: Mode) -> Target:
        target = self._target(backend, model, mode)
        if len(self._targets) >= _MOST_REMEMBERED:
            self._targets.clear()
        self._targets[backend, model, mode] = target
        return target

    def _target(self, name: str | None, model: str, mode: Mode) -> Target:
        if name is not None:
            self._registry.get(name)
        bundle = self._store.bundle(model)
        backend = self.backend_of(name, bundle)
        _check_installed(backend)
        self._check_format(backend, bundle, model)
        _check_mode(backend, bundle, model, mode)
        settings = self.settings(bundle.model_id)
        key = RunnerKey(backend.name, bundle.model_id, mode, self._configurations.get(bundle.model_id).revision)
        keep_alive = KeepAlive.parse(settings.keep_alive) if settings.keep_alive else self._keep_alive
        return Target(key, self._spec(backend, bundle, mode, settings, key), keep_alive)

    def _spec(
        self, backend: Backend, bundle: Bundle, mode: Mode, settings: ModelConfiguration, key: RunnerKey
    ) -> RunSpec:
        return RunSpec(
            model_id=bundle.model_id,
            bundle=bundle,
            mode=mode,
            context_size=settings.context_size or backend.default_context_size(bundle),
            parallel=settings.parallel or backend.default_parallel(bundle, mode),
            process=ProcessOptions(engine_log(self._logs, key), stop_grace=self._stop_grace),
            flags=settings.runtime_flags or (),
        )

    def _from_file(self, model_id: str) -> ModelConfiguration:
        for reference, configuration in self._file_models.items():
            try:
                if self._store.get(reference).id == model_id:
                    return configuration
            except ModelNotFound:
                continue  # a table for a model that is not here (yet)
        return NOTHING_SET

    def _check_format(self, backend: Backend, bundle: Bundle, model: str) -> None:
        if bundle.format in backend.formats:
            return
        try:
            where = f"ask /engines/{self._registry.choose(bundle).name}/v1/ for it, or /v1/"
        except ModelRunnerError:
            where = "no backend here runs that format"
        raise Misdirected(f"{backend.name} cannot serve {model}, a {bundle.format} model: {where}", param="model")


def check_settings(backend: Backend, bundle: Bundle, mode: Mode, settings: ModelConfiguration) -> None:
    """What only the backend and the model can judge. Raises `BadRequest`, `Misdirected`."""
    if bundle.format not in backend.formats:
        raise Misdirected(f"{backend.name} cannot serve {bundle.format} models", param="backend")
    longest = bundle.context_length
    if settings.context_size is not None and longest is not None and settings.context_size > longest:
        raise BadRequest(
            f"context-size {settings.context_size} is beyond the {longest} tokens that the model was trained for",
            param="context-size",
        )
    backend.check_flags(settings.runtime_flags or (), mode)


def main_mode(bundle: Bundle) -> Mode:
    """What a model is for when nothing else is said."""
    for mode in (Mode.COMPLETION, Mode.EMBEDDING, Mode.RERANKING, Mode.IMAGE_GENERATION):
        if mode.value in bundle.capabilities:
            return mode
    return Mode.COMPLETION


def engine_log(logs: Path, key: RunnerKey) -> Path:
    """One file per runner key: two revisions of a model may run at once, for a moment."""
    return logs / f"engine-{key.backend}-{key.model_id.removeprefix('sha256:')[:16]}-{key.mode}-{key.revision}.log"


def _check_installed(backend: Backend) -> None:
    status = backend.status()
    match status.state:
        case BackendState.RUNNING:
            return
        case BackendState.INSTALLING:
            raise Unavailable(f"{backend.name} is being installed", retry_after=_INSTALLING_RETRY)
        case BackendState.NOT_INSTALLED:
            raise BackendUnavailable(f"{backend.name} is not installed: run `modelrunner install {backend.name}`")
        case BackendState.ERROR:
            raise BackendUnavailable(f"{backend.name} cannot run here: {status.details}")


def _check_mode(backend: Backend, bundle: Bundle, model: str, mode: Mode) -> None:
    if mode not in backend.modes:
        raise NotImplementedHere(f"{backend.name} does not offer the mode {mode}")
    if bundle.capabilities and not _CAPABILITIES[mode] & bundle.capabilities:
        offered = ", ".join(sorted(bundle.capabilities))
        raise NotImplementedHere(f"{model} does not offer {mode}; it offers {offered}", param="model")
