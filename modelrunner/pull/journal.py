"""Remembers from which revision of its source a model came, so that an unchanged model is not fetched twice. Losing the
file costs a download and nothing else."""

import logging
from pathlib import Path

import msgspec

from modelrunner.durable import write
from modelrunner.store import Reference

log = logging.getLogger(__name__)


class _Entry(msgspec.Struct, frozen=True):
    origin: str
    model: str
    revision: str


class Journal:
    """One JSON file; `Puller` is its only writer. Its methods may be called from any thread, one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries = _read(path)

    def revision(self, reference: Reference, origin: str, model: str) -> str | None:
        """The revision that `reference` was pulled at, if it was the model with this ID, from `origin`."""
        entry = self._entries.get(str(reference))
        return entry.revision if entry is not None and (entry.origin, entry.model) == (origin, model) else None

    def record(self, reference: Reference, origin: str, model: str, revision: str | None) -> None:
        if revision is None:
            return
        self._entries = {**self._entries, str(reference): _Entry(origin, model, revision)}
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write(self._path, msgspec.json.encode(self._entries))
        except OSError as error:
            log.warning("%s cannot be written: %s; unchanged models may be fetched again", self._path, error)


def _read(path: Path) -> dict[str, _Entry]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, _Entry])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s cannot be read: %s; unchanged models may be fetched again", path, error)
        return {}
