"""The installed backends: found by their entry points, chosen by name or for a model."""

import logging
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Self

from modelrunner.backend import Backend, BackendContext, BackendState, BackendStatus
from modelrunner.errors import BackendNotFound, BackendUnavailable, UnsupportedModel
from modelrunner.locations import ConfigurationError
from modelrunner.types import Bundle

ENTRY_POINT_GROUP = "modelrunner.backends"
log = logging.getLogger(__name__)


class BackendRegistry:
    """The backends of this process, by name. A backend that cannot be imported or made is kept as its error, so that
    one broken plug-in hides no other."""

    def __init__(self, backends: Mapping[str, Backend], errors: Mapping[str, str] | None = None) -> None:
        self._backends = dict(backends)
        self.errors = dict(errors or {})

    @classmethod
    def discover(cls, context: Callable[[type[Backend]], BackendContext]) -> Self:
        """Loads the entry points of group `modelrunner.backends`; `context(backend)` makes each its context, or raises
        the `ConfigurationError` that this then raises."""
        backends: dict[str, Backend] = {}
        errors: dict[str, str] = {}
        for entry in entry_points(group=ENTRY_POINT_GROUP):
            try:
                kind: type[Backend] = entry.load()
                if kind.name != entry.name:
                    raise ValueError(f"the entry point {entry.name!r} is a backend named {kind.name!r}")
                backends[entry.name] = kind(context(kind))
            except ConfigurationError:
                raise  # the plug-in is well: what it was given is not
            except Exception as error:  # a plug-in may fail in any way; it is reported by /engines/status
                log.exception("backend %s cannot be used", entry.name)
                errors[entry.name] = f"{type(error).__name__}: {error}"
        return cls(backends, errors)

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._backends.values())

    def get(self, name: str) -> Backend:
        """Raises `BackendNotFound`, or `BackendUnavailable` for one that could not be loaded."""
        if name in self.errors:
            raise BackendUnavailable(f"backend {name} could not be loaded: {self.errors[name]}")
        try:
            return self._backends[name]
        except KeyError:
            known = ", ".join(sorted(self._backends))
            raise BackendNotFound(f"there is no backend {name!r}; known here: {known}", param="backend") from None

    def choose(self, bundle: Bundle) -> Backend:
        """The backend of the highest priority for the bundle's format. Raises `UnsupportedModel`, or the
        `BackendUnavailable` of the only candidate."""
        unfit: BackendUnavailable | None = None
        ranked: list[tuple[float, str, Backend]] = []
        for backend in self:
            if bundle.format in backend.formats:
                try:
                    ranked.append((backend.priority(bundle), backend.name, backend))
                except BackendUnavailable as error:
                    unfit = error
        if ranked:
            return max(ranked, key=lambda r: r[:2])[2]
        raise unfit or UnsupportedModel(f"no backend here runs models in the {bundle.format} format")

    def statuses(self) -> dict[str, BackendStatus]:
        found = {backend.name: backend.status() for backend in self}
        return found | {name: BackendStatus(BackendState.ERROR, why) for name, why in self.errors.items()}
