"""A model before it is stored: all of its values follow from its files' digests and headers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from modelrunner import durable
from modelrunner.defaults import ModelDefaults
from modelrunner.errors import InvalidModel
from modelrunner.store import formats, manifests, safetensors_model
from modelrunner.store.blobs import Blob
from modelrunner.store.catalog import Entry
from modelrunner.store.describe import Reading
from modelrunner.store.digests import Digest
from modelrunner.store.manifests import Contents, StoredFile, UnpackedFile
from modelrunner.store.references import Reference
from modelrunner.types import ModelHeader


@dataclass(frozen=True, slots=True)
class Draft:
    """`config` is the configuration as `StoredModel` shows it, in JSON; `config_data` is the blob that holds it."""

    id: Digest
    contents: Contents
    header: ModelHeader
    config: bytes
    config_data: bytes
    manifest: bytes
    unpacked: Sequence[UnpackedFile] | None = None

    @classmethod
    def of(
        cls,
        files: Mapping[str, Blob],
        paths: Mapping[str, Path],
        trust: bool,
        defaults: ModelDefaults | None = None,
        licences: Sequence[Blob] = (),
    ) -> Self:
        """Returns a model that gets a manifest of ours. `files` and their `paths` are by the names that they came
        under. Raises `InvalidModel`, `UnsupportedModel`."""
        reading = _read(paths, trust)
        carried: dict[str, Any] = {}
        if defaults is not None:
            carried = {manifests.DEFAULTS: msgspec.to_builtins(defaults)}
            carried |= {"context_size": size} if (size := defaults.context_size) else {}  # docker's word for it
        stored = {name: StoredFile(files[file].digest, files[file].size) for name, file in reading.files.items()}
        data = manifests.encode_config(reading.config | carried, stored)
        if len(data) > manifests.LARGEST:
            raise InvalidModel(f"what it carries for requests has over {manifests.LARGEST >> 20} MiB")
        others = tuple(StoredFile(licence.digest, licence.size) for licence in licences)
        contents = Contents(StoredFile(Digest.of(data), len(data)), stored, others)
        manifest = manifests.encode(contents)
        manifests.parse(manifest)  # which the next start does: it refuses a model of too many files
        return cls(Digest.of(manifest), contents, reading.header, published_config(data, contents), data, manifest)

    @classmethod
    def published(
        cls,
        manifest: bytes,
        unpacked: Sequence[UnpackedFile] | None,
        files: Mapping[str, Blob],
        paths: Mapping[str, Path],
        trust: bool,
    ) -> Self:
        """Returns a model that keeps its published manifest. `files` holds every blob that the manifest names, and
        those `unpacked` from its archives. Raises `InvalidModel`, `UnsupportedModel`, `OSError`."""
        id = Digest.of(manifest)
        contents = manifests.decode(manifest, id, unpacked)
        stored = {blob.digest: (blob.size, paths[name]) for name, blob in files.items()}
        for digest, size in contents.blobs.items():
            if digest not in stored or stored[digest][0] != size:
                raise InvalidModel(f"its file {digest} is missing, or its size is not the {size} bytes of its manifest")
        reading = _read({name: stored[file.digest][1] for name, file in contents.files.items()}, trust)
        if any(name != read for name, read in reading.files.items()):
            raise InvalidModel("its manifest lists its shards in the wrong order")
        try:
            data = durable.read(stored[contents.config.digest][1], manifests.LARGEST)
            config = published_config(data, contents)
        except (durable.UnusableFile, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidModel(f"its configuration cannot be parsed ({error})") from None
        kept = unpacked if manifests.archives(manifests.parse(manifest)) else None
        return cls(id, contents, reading.header, config, data, manifest, kept)

    def entry(self, before: Entry | None, tag: Reference | None, version: int, now: int) -> Entry:
        """Returns the model's entry in the catalog. `before` is its present entry there; `now` is in Unix seconds."""
        tags = before.tags if before else ()
        added = (tag,) if tag and tag not in tags else ()
        created, number = (before.created, before.number) if before else (now, version)
        tags = (*tags, *added)
        return Entry(self.id, tags, created, self.config, self.contents, number=number, version=version)


def published_config(data: bytes, contents: Contents) -> bytes:
    """Returns the configuration that a model was published with; its format is that of the files. Raises
    `msgspec.MsgspecError`."""
    config = manifests.decode_config(data) | {"format": str(formats.format_of(contents.files))}
    return msgspec.json.encode(config)


def _read(paths: Mapping[str, Path], trust: bool) -> Reading:
    if not trust:
        safetensors_model.require_no_code(paths)
    return formats.reader_of(paths).read(paths)
