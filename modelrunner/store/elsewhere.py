"""A model in the folder of another daemon: read, and never changed."""

from contextlib import suppress
from pathlib import Path

import msgspec

from modelrunner import durable
from modelrunner.errors import InvalidModel, ModelNotFound
from modelrunner.store.blobs import Blobs
from modelrunner.store.bundles import Bundles
from modelrunner.store.catalog import Entry
from modelrunner.store.digests import Digest
from modelrunner.store.draft import published_config
from modelrunner.store.manifests import LARGEST, decode
from modelrunner.store.records import Records
from modelrunner.types import Bundle


def bundle_at(data: Path, id: str) -> Bundle:
    """Returns the model as the daemon with the folder `data` has laid it out, on a file system that both see. Reads its
    manifest and the sizes of its files, and changes nothing. Raises `ModelNotFound` if it is not there whole."""
    digest, records = Digest.parse(id), Records(data / "manifests" / "sha256")
    blobs, bundle = Blobs(data / "blobs" / "sha256"), None
    with suppress(OSError, msgspec.MsgspecError, InvalidModel, durable.UnusableFile):
        manifest = durable.read(digest.within(records.folder), LARGEST)
        contents = decode(manifest, digest, records.unpacked(digest).load())
        config = durable.read(blobs.path(contents.config.digest), LARGEST)
        entry = Entry(digest, (), 0, published_config(config, contents), contents)
        bundle = Bundles(data / "bundles", blobs).found(entry, contents)
    if bundle is None:
        raise ModelNotFound(f"the model {id} is not in {data}, or cannot be read there", param="model")
    return bundle
