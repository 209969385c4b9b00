"""Unpacks the files of a model from its archives."""

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from modelrunner.errors import SourceFailed
from modelrunner.pull.source import FromArchive, make_way
from modelrunner.store import Blob, Digest, tar
from modelrunner.store.files import open_regular, require_space
from modelrunner.store.manifests import Manifest, UnpackedFile, archives, is_wanted

_EXPANSION = 20  # a compressed archive may be so many times smaller than its content
_LEAST = 64 << 20  # bytes that any archive may unpack to


def unpack(archive: Path, packed: str, folder: Path, stop: threading.Event) -> dict[str, Path]:
    """Writes those files of an archive that can be a part of a model, under names of our own in `folder`. Returns their
    paths by their names in the archive. `packed` is "gzip", or "" for a plain tar. Blocks. Raises `InvalidModel`,
    `InsufficientDisk`, `OSError`."""
    size = archive.stat().st_size
    limit = max(size * _EXPANSION, _LEAST) if packed else size
    paths: dict[str, Path] = {}
    with open_regular(archive) as file:
        stream = tar.Gunzipped(file) if packed else file
        for member in tar.members(stream, limit=limit):
            if not is_wanted(member.name):
                continue
            require_space(folder, member.size)
            path = make_way(folder, f"{archive.name[:64]}-{len(paths)}")
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as target:
                for piece in member.pieces():
                    if stop.is_set():
                        raise asyncio.CancelledError
                    target.write(piece)
            paths[member.name] = path
    return paths


def unpack_layers(
    parsed: Manifest, find: Callable[[Digest], Path | None], folder: Path, stop: threading.Event
) -> dict[str, tuple[Path, FromArchive]]:
    """Unpacks the layers of a manifest that are archives; `find` returns the place of each. The files get names of our
    own in `folder`. Blocks. Raises the errors of `unpack`, and `SourceFailed` for an archive that is gone."""
    files = {}
    for digest, packed in archives(parsed).items():
        archive = find(digest)
        if archive is None:
            raise SourceFailed("an archive of the model was removed while its files came; pull again")
        for name, path in unpack(archive, packed, folder, stop).items():
            files[path.name] = path, FromArchive(digest.hex, name)
    return files


def unpacked_files(origins: Mapping[str, FromArchive], blobs: Mapping[str, Blob]) -> list[UnpackedFile]:
    """Returns the unpacked files with their digests. `origins` and `blobs` have them by name."""
    return [
        UnpackedFile(f"sha256:{origin.archive}", origin.path, str(blobs[name].digest), blobs[name].size)
        for name, origin in origins.items()
    ]
