"""The sources of the pulled models, so that an unchanged model is not fetched twice. Without the journal a pull takes
longer; nothing else changes."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from modelrunner.jsonfile import JsonFile
from modelrunner.store import Reference


class JournalEntry(msgspec.Struct, frozen=True):
    """The source of a name: `text` as it was written, `origin` its normal form; `model` is the ID. `version` is the
    source's own word for `revision`; `base` is `LocalOrigin.made_of`."""

    origin: str
    model: str
    revision: str
    text: str = ""
    version: str = ""
    base: str = ""


class Journal:
    """One JSON file; `Puller` is its only writer. Its methods may be called from any thread, one at a time."""

    def __init__(self, path: Path) -> None:
        self._file = JsonFile(path, dict[str, JournalEntry], cache=True)
        self._entries = self._file.load() or {}

    def __iter__(self) -> Iterator[tuple[str, JournalEntry]]:
        """Yields the entries by the normal form of the names."""
        return iter(self._entries.items())

    def revision(self, reference: Reference, origin: str, model: str) -> str | None:
        """Returns the source's revision at which `reference` became this model from `origin`."""
        entry = self._entries.get(str(reference))
        return entry.revision if entry is not None and (entry.origin, entry.model) == (origin, model) else None

    def record(self, reference: Reference, entry: JournalEntry) -> None:
        self._entries = {**self._entries, str(reference): entry}
        self._file.save(self._entries)
