"""A model before it is stored: everything about it follows from its files' digests and headers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from modelrunner.store import describe, manifests
from modelrunner.store.blobs import Blob
from modelrunner.store.catalog import Entry
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
    def of(cls, files: Mapping[str, Blob], headers: Mapping[str, ModelHeader]) -> Self:
        """Both by the names that the source gave the files. Raises `InvalidModel` if they are no model together."""
        layout = describe.arrange(headers)
        stored = {name: StoredFile(files[given].digest, files[given].size) for name, given in layout.items()}
        weights = [headers[given] for name, given in layout.items() if name != manifests.PROJECTOR]
        config = describe.configuration(weights, sum(file.size for file in stored.values()))
        data = manifests.encode_config(config, stored)
        contents = Contents(StoredFile(Digest.of(data), len(data)), stored)
        manifest = manifests.encode(contents)
        header = describe.merge([headers[given] for given in layout.values()])
        return cls(Digest.of(manifest), contents, header, config, data, manifest)

    def entry(self, before: Entry | None, tag: Reference | None, now: int) -> Entry:
        """Its place in the catalog, where `before` is what the model has there already; `now` in Unix seconds."""
        tags = before.tags if before else ()
        added = (tag,) if tag and tag not in tags else ()
        return Entry(self.id, (*tags, *added), before.created if before else now, self.config, self.contents)
