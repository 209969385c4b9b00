"""From what a request says (backend or none, model, mode) to what the scheduler is asked for.

A request pays a dictionary look-up: targets are remembered until a model or a configuration changes. The order of the
refusals is the interface's: 404, 412, 421, 501.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelrunner.backend import Backend, BackendState
from modelrunner.errors import (
    BackendUnavailable,
    BadRequest,
    Misdirected,
    ModelNotFound,
    ModelRunnerError,
    NotImplementedHere,
    Unavailable,
)
from modelrunner.modelconfig import NOTHING_SET, ModelConfiguration
from modelrunner.registry import BackendRegistry
from modelrunner.scheduler import Target
from modelrunner.server.configurations import Configurations, Entry
from modelrunner.server.options import backend_options
from modelrunner.store import Store, vocabulary
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


Tables = Mapping[str, ModelConfiguration]


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
        file_models: Tables,
    ) -> None:
        self._store = store
        self._registry = registry
        self._configurations = configurations
        self._logs = logs
        self._keep_alive = keep_alive
        self._stop_grace = stop_grace
        self._file_models = file_models
        self._targets: dict[tuple[str | None, str, Mode], Target] = {}
        self._drafting: set[tuple[str, str]] = set()  # model and draft, by ID, of one vocabulary
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

    def set_keep_alive(self, keep_alive: KeepAlive) -> None:
        """Of the models that have none of their own."""
        self._keep_alive = keep_alive
        self._targets.clear()

    def set_file_models(self, tables: Tables) -> None:
        self._file_models = tables
        self._targets.clear()

    def settings(self, model_id: str, mode: Mode | None = None) -> ModelConfiguration:
        """What is set for the model in that mode, or for all modes, POSTed over the configuration file."""
        posted = self._configurations.effective(model_id, mode) if mode else self._configurations.get(model_id)
        return posted.configuration.over(self.from_file(model_id))

    def keep_alive(self, settings: ModelConfiguration) -> KeepAlive:
        return KeepAlive.parse(settings.keep_alive) if settings.keep_alive else self._keep_alive

    def backend_of(self, name: str | None, bundle: Bundle, mode: Mode | None = None) -> Backend:
        """The named backend, else the configured one, else the best for the bundle's format. Raises `BackendNotFound`,
        `UnsupportedModel`, `BackendUnavailable`."""
        if name is None:
            posted = self._configurations.effective(bundle.model_id, mode or main_mode(bundle)).configuration
            name = posted.backend or self.from_file(bundle.model_id).backend
        return self._registry.choose(bundle) if name is None else self._registry.get(name)

    def from_file(self, model_id: str, tables: Tables | None = None) -> ModelConfiguration:
        """What the configuration file, or `tables` in its place, says about the model."""
        found = NOTHING_SET
        for reference, configuration in (self._file_models if tables is None else tables).items():
            try:
                if self._store.get(reference).id == model_id:
                    found = configuration.over(found)
            except ModelRunnerError:
                continue  # a table for a model that is not here (yet), or damaged
        return found

    def is_needed(self, model_id: str) -> bool:
        """Somebody said that it is to be loaded from the start, or to stay whatever comes."""
        settings = self.settings(model_id)
        return bool(settings.preload or settings.pin)

    def preloads(self) -> list[str]:
        """The models that are to be loaded from the start. One that only the configuration file names may not be here
        yet."""
        found = [model.id for model in self._store.list() if self.settings(model.id).preload]
        return found + [
            reference for reference, table in self._file_models.items() if table.preload and not self._has(reference)
        ]

    def _has(self, reference: str) -> bool:
        try:
            self._store.get(reference)
        except ModelNotFound:
            return False
        return True

    def target(
        self, backend: Backend, bundle: Bundle, mode: Mode, posted: Entry, tables: Tables | None = None
    ) -> Target:
        """For a configuration that holds, or that is about to. Raises `BadRequest`, `ModelNotFound` (the draft)."""
        file = folded(backend, self.from_file(bundle.model_id, tables).as_dict())
        settings = posted.configuration.over(NOTHING_SET.merged(file))
        key = RunnerKey(backend.name, bundle.model_id, mode, posted.revision)
        spec = self._spec(backend, bundle, mode, settings, key)
        return Target(key, spec, self.keep_alive(settings), bool(settings.pin))

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
        backend = self.backend_of(name, bundle, mode)
        _check_installed(backend)
        self._check_format(backend, bundle, model)
        check_mode(backend, bundle, model, mode)
        return self.target(backend, bundle, mode, self._configurations.effective(bundle.model_id, mode))

    def _spec(
        self, backend: Backend, bundle: Bundle, mode: Mode, settings: ModelConfiguration, key: RunnerKey
    ) -> RunSpec:
        speculative = settings.speculative if mode is Mode.COMPLETION else None
        return RunSpec(
            model_id=bundle.model_id,
            bundle=bundle,
            mode=mode,
            context_size=settings.context_size or backend.default_context_size(bundle),
            parallel=settings.parallel or backend.default_parallel(bundle, mode),
            process=ProcessOptions(engine_log(self._logs, key), stop_grace=self._stop_grace),
            flags=settings.runtime_flags or (),
            draft=self._draft(bundle, speculative.draft_model) if speculative else None,
            options=backend_options(backend, settings),
            gpu_layers=settings.gpu_layers,
            min_context_size=settings.min_context_size,
            draft_tokens=speculative.num_tokens if speculative else None,
            draft_acceptance=speculative.min_acceptance_rate if speculative else None,
        )

    def _draft(self, bundle: Bundle, name: str) -> Bundle:
        """A name may be given to another model at any time: what it means now is what drafts, if it can."""
        try:
            draft = self._store.bundle(name)
        except ModelNotFound:
            raise ModelNotFound(
                f"the draft model {name} is not here: get it with `modelrunner pull {name}`, or do without it with "
                f"`modelrunner configure {bundle.name} --draft-model default`",
                param="speculative.draft_model",
            ) from None
        pair = bundle.model_id, draft.model_id
        if pair not in self._drafting:
            if difference := vocabulary.difference(bundle, draft):
                raise BadRequest(
                    f"{draft.name} cannot draft for {bundle.name}: {difference}; take a smaller model of the same "
                    "family",
                    param="speculative.draft_model",
                )
            self._drafting.add(pair)
        return draft

    def _check_format(self, backend: Backend, bundle: Bundle, model: str) -> None:
        if bundle.format in backend.formats:
            return
        try:
            where = f"ask /engines/{self._registry.choose(bundle).name}/v1/ for it, or /v1/"
        except ModelRunnerError:
            where = "no backend here runs that format"
        raise Misdirected(f"{backend.name} cannot serve {model}, a {bundle.format} model: {where}", param="model")


def folded(backend: Backend, patch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A merge patch with what its runtime flags say about other fields in those fields, so that what is shown and
    counted is what runs. Raises `BadRequest` for a flag that is not allowed, or says otherwise than its field."""
    if not patch.get("runtime-flags"):
        return patch
    found, rest = backend.fold_flags(tuple(patch["runtime-flags"]))
    fields = {name.replace("_", "-"): value for name, value in found.items()}
    for name, value in fields.items():
        if patch.get(name) not in (None, value):
            raise BadRequest(
                f"{name} is {patch[name]}, and a runtime flag says {value}: leave one of them out", param=name
            )
    return {**patch, **fields, "runtime-flags": list(rest) or None}


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
            raise BeingInstalled(backend)
        case BackendState.NOT_INSTALLED:
            raise EngineMissing(backend)
        case BackendState.ERROR:
            raise BackendUnavailable(f"{backend.name} cannot run here: {status.details}")


def check_mode(backend: Backend, bundle: Bundle, model: str, mode: Mode) -> None:
    """Raises `NotImplementedHere` unless the backend and the model both offer it."""
    if mode not in backend.modes:
        raise NotImplementedHere(f"{backend.name} does not offer the mode {mode}")
    if bundle.capabilities and not _CAPABILITIES[mode] & bundle.capabilities:
        offered = ", ".join(sorted(bundle.capabilities))
        raise NotImplementedHere(f"{model} does not offer {mode}; it offers {offered}", param="model")
