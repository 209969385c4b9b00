"""What was pulled from where, so that an unchanged model is not fetched twice. Without it a pull takes longer, and
nothing else changes."""

from pathlib import Path

import msgspec

from modelrunner.durable import JsonFile
from modelrunner.store import Reference


class _JournalEntry(msgspec.Struct, frozen=True):
    origin: str
    model: str
    revision: str


class Journal:
    """One JSON file; `Puller` is its only writer. Its methods may be called from any thread, one at a time."""

    def __init__(self, path: Path) -> None:
        self._file = JsonFile(path, dict[str, _JournalEntry], cache=True)
        self._entries = self._file.load() or {}

    def revision(self, reference: Reference, origin: str, model: str) -> str | None:
        """The source's revision at which `reference` became this very model from `origin`."""
        entry = self._entries.get(str(reference))
        return entry.revision if entry is not None and (entry.origin, entry.model) == (origin, model) else None

    def record(self, reference: Reference, origin: str, model: str, revision: str | None) -> None:
        if revision is not None:
            self._entries = {**self._entries, str(reference): _JournalEntry(origin, model, revision)}
            self._file.save(self._entries)
