"""What was measured to make models faster on this machine, kept beside the ledger."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from modelrunner import wire
from modelrunner.backend import Backend, Versioned
from modelrunner.config.modelconfig import ModelConfiguration
from modelrunner.jsonfile import JsonFile
from modelrunner.plugins.isolation import interface_of
from modelrunner.scheduler.ledger import HERE
from modelrunner.types import Mode, RunSpec

_MOST = 1024
"""The most results that are kept; the oldest goes first."""


class Tunings:
    """Keeps them in `path` (none: in memory only). One holds for a model's ID, its flags and options, the engine's
    version, and the hardware that `place` names: anything else is measured anew. Unless this machine is `alone`, they
    hold for those models only whose settings keep them here: a number of threads is wrong on another machine."""

    def __init__(self, path: Path | None = None, place: Callable[[], str] = lambda: "", *, alone: bool = True) -> None:
        self._file = JsonFile(path, dict[str, wire.Tuning], cache=True) if path is not None else None
        self._kept = (self._file.load() if self._file is not None else None) or {}
        self._passing: frozenset[str] = frozenset()  # those that go with this process
        self.place = place
        self._alone = alone

    def of(self, backend: Backend, spec: RunSpec) -> wire.Tuning | None:
        """Returns what was measured for a run as it is configured. It may block."""
        return self._kept.get(self._entry(backend, spec))

    def keep(self, backend: Backend, spec: RunSpec, tuning: wire.Tuning, *, lasting: bool = True) -> None:
        """Keeps what was measured for the run, beyond the end of the daemon only if it is `lasting`. It blocks; a
        failing disk costs only the next start the result."""
        entry = self._entry(backend, spec)
        kept = {name: each for name, each in self._kept.items() if name != entry}
        kept[entry] = tuning
        while len(kept) > _MOST:
            del kept[next(iter(kept))]
        self._kept, self._passing = kept, (self._passing & kept.keys()) - {entry} | ({entry} if not lasting else set())
        if self._file is not None and lasting:
            self._file.save({name: each for name, each in kept.items() if name not in self._passing})

    def holds_for(self, settings: ModelConfiguration) -> bool:
        """Returns True if a model with these settings runs on this machine alone."""
        return self._alone or settings.hosts == (HERE,)

    def applied(self, backend: Backend, spec: RunSpec, settings: ModelConfiguration) -> RunSpec:
        """Returns the run with what was measured to be faster, as far as `speculative` and `tune` are "auto"."""
        if not settings.tunes or spec.mode is not Mode.COMPLETION or not self.holds_for(settings):
            return spec
        if (found := self.of(backend, spec)) is None:
            return spec
        return faster(
            spec,
            drafts=settings.speculative == "auto" and found.drafts,
            flags=tuple(found.flags) if settings.tune == "auto" else (),
        )

    def _entry(self, backend: Backend, spec: RunSpec) -> str:
        versioned = interface_of(backend, Versioned)
        parts = [spec.model_id, backend.name, versioned.version() if versioned else "", self.place()]
        return json.dumps([*parts, spec.flags, spec.gpu_layers, sorted(spec.options.items())], default=str)


def faster(spec: RunSpec, *, drafts: bool, flags: tuple[str, ...]) -> RunSpec:
    """Returns the run with n-gram drafts, and with flags under its own."""
    return replace(spec, ngram=spec.ngram or drafts, flags=(*flags, *spec.flags))
