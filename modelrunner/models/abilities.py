"""The backend, the context and the capabilities of each model: of a loaded model as it runs, of another as its settings
are now."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from modelrunner.errors import ModelRunnerError
from modelrunner.models.configurations import Configurations, ModelSettings
from modelrunner.models.resolve import Resolver, main_mode
from modelrunner.scheduler import RunnerView
from modelrunner.store import Store
from modelrunner.types import CAPABILITIES, Adapter, Mode


@dataclass(frozen=True, slots=True)
class Abilities:
    """`backend` serves the requests that name no backend, None if no backend can run the model. `window` is the tokens
    of one request, prompt and answer together: the least number that the model's settings allow, None if no backend can
    run it. `capabilities` are the model's, in the order of `CAPABILITIES`; `adapters` are the LoRA adapters of its
    runner or its configuration, else those that were packaged with it."""

    backend: str | None = None
    window: int | None = None
    capabilities: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()


class KnownAbilities:
    """Remembers the abilities of each model with its present settings. To find them takes a millisecond, and clients
    ask for the list of models often."""

    def __init__(self, store: Store, resolver: Resolver, configurations: Configurations) -> None:
        self._store = store
        self._resolver = resolver
        self._configurations = configurations
        self._settings = configurations.settings
        self._known: dict[str, Abilities] = {}
        self._named: dict[str, str | None] = {}
        self._changes = 0
        store.watchers.append(self._store_changed)
        configurations.watchers.append(self._configured)

    def of(self, model_ids: Sequence[str], runners: Mapping[tuple[str, Mode], RunnerView]) -> list[Abilities]:
        """Returns the abilities of each model, of a loaded model those of its runner; `runners` are by model ID and
        mode. Reads the disk for new models."""
        loaded = {model_id for model_id, _ in runners}
        return [
            abilities_of(self._store, self._resolver, self._configurations.settings, runners, model_id)
            if model_id in loaded
            else self._known.get(model_id) or self._found(model_id)
            for model_id in model_ids
        ]

    def forget(self) -> None:
        """Forgets all models, because a backend was changed. Any thread may call this."""
        self._changes += 1
        self._known = {}

    def _configured(self) -> None:
        before, self._settings = self._settings, self._configurations.settings
        if before.tables is not self._settings.tables:
            self.forget()
            return
        one, other = before.posted, self._settings.posted
        changed = {key.partition("/")[0] for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
        self._changes += 1
        self._known = {model_id: found for model_id, found in self._known.items() if model_id not in changed}

    def _found(self, model_id: str) -> Abilities:
        changes, known = self._changes, self._known
        found = abilities_of(self._store, self._resolver, self._configurations.settings, {}, model_id)
        if changes == self._changes:
            known[model_id] = found
        return found

    def _store_changed(self) -> None:
        """A change of the store matters to other models only where a setting names a model."""
        settings = self._configurations.settings
        named = {reference: settings.model_id(reference) for reference in settings.references()}
        if named != self._named:
            self._named = named
            self.forget()


def abilities_of(
    store: Store,
    resolver: Resolver,
    settings: ModelSettings,
    runners: Mapping[tuple[str, Mode], RunnerView],
    model_id: str,
) -> Abilities:
    """Returns the abilities of the model, of a loaded model those of its runner; `runners` are by model ID and mode.
    Fields that cannot be found keep their defaults. Reads the disk at first."""
    found = Abilities()
    try:
        bundle = store.bundle(model_id)
        mode = main_mode(bundle)
        found = Abilities(None, None, _ordered(bundle.capabilities), bundle.adapters)
        if runner := runners.get((model_id, mode)):
            found = Abilities(None, runner.context_size, _ordered(runner.capabilities), runner.adapters)
        backend = resolver.backend_of(None, bundle, mode)
        found = replace(found, backend=backend.name)
        if runner is None:
            spec = resolver.target(backend, bundle, mode, settings).spec
            window = min(spec.context_size, spec.min_context_size or spec.context_size)
            found = Abilities(backend.name, window, _ordered(spec.bundle.capabilities), spec.bundle.adapters)
    except (ModelRunnerError, OSError):
        pass
    return found


def _ordered(capabilities: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in CAPABILITIES if name in capabilities)
