"""What the models here can do: as they run, or as they are configured now."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from modelrunner.errors import ModelRunnerError
from modelrunner.models.configurations import ModelSettings
from modelrunner.models.resolve import Resolver, main_mode
from modelrunner.scheduler import RunnerView
from modelrunner.store import Store
from modelrunner.types import CAPABILITIES, Adapter, Mode


@dataclass(frozen=True, slots=True)
class Abilities:
    """`backend` is the one that a request goes to when it names none, None if none can run the model. `window` is the
    tokens that one request may have, prompt and answer together: the least that the model's settings allow, None if
    nothing can run it. `capabilities` are the model's, in the order of `CAPABILITIES`; `adapters` are the LoRA adapters
    of its runner or its configuration, else those that were packaged with it."""

    backend: str | None = None
    window: int | None = None
    capabilities: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()


def abilities_of(
    store: Store,
    resolver: Resolver,
    settings: ModelSettings,
    runners: Mapping[tuple[str, Mode], RunnerView],
    model_id: str,
) -> Abilities:
    """Of a loaded model, what its runner can do; `runners` are by model ID and mode. What cannot be found out is left
    out. Reads the disk at first."""
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
