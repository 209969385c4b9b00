"""A model before it is stored: everything about it follows from its files' digests and headers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from modelrunner.store import manifests
from modelrunner.store.blobs import Blob
from modelrunner.store.catalog import Entry
from modelrunner.store.describe import Reading
from modelrunner.store.digests import Digest
from modelrunner.store.manifests import Contents, StoredFile
from modelrunner.store.references import Reference
from modelrunner.types import ModelHeader


@dataclass(frozen=True, slots=True)
class Draft:
    id: Digest
    contents: Contents
    header: ModelHeader
    config: dict[str, Any]
    config_data: bytes
    manifest: bytes

    @classmethod
    def of(cls, files: Mapping[str, Blob], reading: Reading) -> Self:
        """`files` by the names that they came under."""
        stored = {name: StoredFile(files[given].digest, files[given].size) for name, given in reading.files.items()}
        data = manifests.encode_config(reading.config, stored)
        contents = Contents(StoredFile(Digest.of(data), len(data)), stored)
        manifest = manifests.encode(contents)
        return cls(Digest.of(manifest), contents, reading.header, reading.config, data, manifest)

    def entry(self, before: Entry | None, tag: Reference | None, now: int) -> Entry:
        """Its place in the catalog, where `before` is what the model has there already; `now` in Unix seconds."""
        tags = before.tags if before else ()
        added = (tag,) if tag and tag not in tags else ()
        return Entry(self.id, (*tags, *added), before.created if before else now, self.config, self.contents)
