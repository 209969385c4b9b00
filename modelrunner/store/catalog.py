"""The models of a store as one immutable value: what is here, and what a text means. Changing it makes a new one."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from modelrunner.errors import InvalidReference, ModelNotFound
from modelrunner.store.digests import Digest
from modelrunner.store.manifests import Contents
from modelrunner.store.references import DEFAULT_HOST, Reference

_ID_PREFIX = re.compile(r"(?:sha256:)?([0-9a-f]{8,64})")
_SHORTEST_PART = 3  # characters
_COMPARED = 500  # names that are looked at for one that is spelt alike: each takes some ten microseconds


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model as the rest of the program sees it. `created` is in Unix seconds, `size` in bytes. `config` is the
    configuration as docker/model-runner publishes it: format, quantization, parameters, architecture, size (as text),
    context_size, and the metadata under the format's name. `damage` says why the model cannot be used, "" if it can."""

    id: str
    tags: list[str]
    created: int
    config: Mapping[str, Any]
    size: int = 0
    damage: str = ""

    @property
    def name(self) -> str:
        """The first name of the model, or its ID if it has none."""
        return self.tags[0] if self.tags else self.id

    @property
    def format(self) -> str:
        return str(self.config.get("format", ""))


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
            entry.id: StoredModel(
                str(entry.id), entry.names, entry.created, entry.config, sum(entry.blobs.values()), entry.damage
            )
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

    def find(self, text: str, *, whole: bool = False) -> tuple[Entry, tuple[Reference, ...]]:
        """Returns the model that `text` means, and those of its tags that `text` names (none where `text` is an ID).
        `text` is a reference, a model ID, the beginning of one (8 digits), or, unless `whole` is set, a part of a name.
        Raises `ModelNotFound`, and `InvalidReference` for a text that is none of these or means several models."""
        if text.startswith("sha256:"):
            return self._by_id(text), ()
        reference = Reference.parse(text)
        if reference.digest:
            return self._by_id(str(reference.digest)), ()
        if exact := self._by_tag.get(reference):
            return exact, (reference,)
        if _ID_PREFIX.fullmatch(text) and any(id.hex.startswith(text) for id in self.entries):
            return self._by_id(text), ()
        return self._by_part(text, reference, whole=whole)

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

    def _by_part(self, text: str, reference: Reference, *, whole: bool) -> tuple[Entry, tuple[Reference, ...]]:
        tags = [tag for tag in self._by_tag if len(text) >= _SHORTEST_PART and tag.matches(text)]
        found = {self._by_tag[tag].id: self._by_tag[tag] for tag in tags}
        if found and whole:
            raise ModelNotFound(
                f"no model here has the name {text!r}, and a command that changes or removes a model takes its whole "
                f"name or its ID; did you mean {_shown(sorted(tag.short for tag in tags), ' or ')}?",
                param="model",
            )
        if len(found) > 1:
            raise _ambiguous(text, sorted(tag.short for tag in tags))
        if not found:
            raise self._not_here(text, reference)
        return next(iter(found.values())), tuple(tags)

    def _not_here(self, text: str, reference: Reference) -> ModelNotFound:
        """Says what was perhaps meant, and how to get the model where the name says where it is."""
        names = [tag.short for tag in self._by_tag]
        near = [name for name in names if text.lower() in name.lower()] or get_close_matches(
            text, names[:_COMPARED], cutoff=0.7
        )
        if near:
            told = f"did you mean {_shown(sorted(near), ' or ')}?"
        elif reference.host == DEFAULT_HOST:
            told = "`modelrunner list` shows what is here; `modelrunner pull` takes hf.co/ORG/REPO and pypi:NAME"
        else:
            told = f"`modelrunner pull {reference.short}` gets it, `modelrunner list` shows what is here"
        return ModelNotFound(f"model {text!r} is not here: {told}", param="model")


def _ambiguous(text: str, candidates: list[str]) -> InvalidReference:
    return InvalidReference(f"{text!r} could be any of {_shown(candidates, ', ')}: write more of it", param="model")


def _shown(candidates: list[str], between: str) -> str:
    return between.join(candidates[:10]) + (", ..." if len(candidates) > 10 else "")
