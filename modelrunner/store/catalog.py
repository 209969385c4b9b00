"""The models of a store as one immutable value: what is here, and what a text means. Changing it makes a new one."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from modelrunner import api
from modelrunner.errors import InvalidReference, ModelNotFound
from modelrunner.store.digests import Digest
from modelrunner.store.manifests import Contents
from modelrunner.store.references import Reference, how_to_get

_ID_PREFIX = re.compile(r"(?:sha256:)?([0-9a-f]{8,64})")
_SHORTEST_PART = 3  # characters


@dataclass(frozen=True, slots=True)
class Entry:
    """One model. `contents` is None, and `damage` says why, for one whose manifest or configuration cannot be used: it
    keeps its place, so that pulling it again heals it and it hides no other."""

    id: Digest
    tags: tuple[Reference, ...]
    created: int
    config: dict[str, object]
    contents: Contents | None
    damage: str = ""

    @property
    def blobs(self) -> dict[Digest, int]:
        """Every blob with its size in bytes; none are known of a damaged model."""
        return self.contents.blobs if self.contents else {}

    @property
    def names(self) -> list[str]:
        return [tag.short for tag in self.tags]


class Catalog:
    """Entries by model ID, oldest first; a tag belongs to one entry."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = {entry.id: entry for entry in entries}
        self._by_tag = {tag: entry for entry in self.entries.values() for tag in entry.tags}
        self.models = {
            entry.id: api.Model(str(entry.id), entry.names, entry.created, entry.config)
            for entry in self.entries.values()
        }

    def with_entry(self, entry: Entry) -> "Catalog":
        """With `entry`, in place of one of the same ID; its tags are taken from the others."""
        others = {
            id: replace(other, tags=tuple(tag for tag in other.tags if tag not in entry.tags))
            for id, other in self.entries.items()
        }
        return Catalog((others | {entry.id: entry}).values())

    def without(self, entry: Entry) -> "Catalog":
        return Catalog(other for other in self.entries.values() if other.id != entry.id)

    def find(self, text: str) -> tuple[Entry, tuple[Reference, ...]]:
        """The model that `text` means, with those of its tags that `text` names (none where it is an ID). In this
        order: a reference, a model ID or the beginning of one, a part of a name. Raises `ModelNotFound`,
        `InvalidReference` for what is none of these or means several models."""
        if text.startswith("sha256:"):
            return self._by_id(text), ()
        reference = Reference.parse(text)
        if reference.digest:
            return self._by_id(str(reference.digest)), ()
        if exact := self._by_tag.get(reference):
            return exact, (reference,)
        if _ID_PREFIX.fullmatch(text) and any(id.hex.startswith(text) for id in self.entries):
            return self._by_id(text), ()
        return self._by_part(text, reference)

    def _by_id(self, text: str) -> Entry:
        match = _ID_PREFIX.fullmatch(text)
        if match is None:
            raise InvalidReference("a model ID is sha256: and 8 to 64 lower-case hexadecimal digits", param="model")
        found = [entry for id, entry in self.entries.items() if id.hex.startswith(match[1])]
        if len(found) > 1:
            raise _ambiguous(text, [str(entry.id) for entry in found])
        if not found:
            raise ModelNotFound(f"no model here has the ID {text}: `modelrunner list` shows them", param="model")
        return found[0]

    def _by_part(self, text: str, reference: Reference) -> tuple[Entry, tuple[Reference, ...]]:
        tags = [tag for tag in self._by_tag if len(text) >= _SHORTEST_PART and tag.matches(text)]
        found = {self._by_tag[tag].id: self._by_tag[tag] for tag in tags}
        if len(found) > 1:
            raise _ambiguous(text, sorted(tag.short for tag in tags))
        if not found:
            raise ModelNotFound(f"model {text!r} is not here: {how_to_get(reference)}", param="model")
        return next(iter(found.values())), tuple(tags)


def _ambiguous(text: str, candidates: list[str]) -> InvalidReference:
    shown = ", ".join(candidates[:10]) + (", ..." if len(candidates) > 10 else "")
    return InvalidReference(f"{text!r} could be any of {shown}: write more of it", param="model")
