"""What the models here can do, as they are configured now."""

from dataclasses import dataclass, replace

from modelrunner.errors import ModelRunnerError
from modelrunner.models.configurations import ModelSettings
from modelrunner.models.resolve import Resolver, main_mode
from modelrunner.store import Store
from modelrunner.types import CAPABILITIES, Bundle


@dataclass(frozen=True, slots=True)
class Abilities:
    """`backend` is the one that a request goes to when it names none, None if none can run the model. `window` is the
    tokens that one request may have, prompt and answer together: the least that the model's settings allow, None if
    nothing can run it. `capabilities` are the model's, in the order of `CAPABILITIES`."""

    backend: str | None = None
    window: int | None = None
    capabilities: tuple[str, ...] = ()


def abilities_of(store: Store, resolver: Resolver, settings: ModelSettings, model_id: str) -> Abilities:
    """Reads the disk at first. What cannot be found out is left out."""
    found = Abilities()
    try:
        bundle = store.bundle(model_id)
        found = replace(found, capabilities=_ordered(bundle))
        mode = main_mode(bundle)
        backend = resolver.backend_of(None, bundle, mode)
        found = replace(found, backend=backend.name)
        spec = resolver.target(backend, bundle, mode, settings).spec
    except (ModelRunnerError, OSError):
        return found
    window = min(spec.context_size, spec.min_context_size or spec.context_size)
    return Abilities(backend.name, window, _ordered(spec.bundle))


def _ordered(bundle: Bundle) -> tuple[str, ...]:
    return tuple(name for name in CAPABILITIES if name in bundle.capabilities)
