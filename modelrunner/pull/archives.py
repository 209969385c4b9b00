"""Takes the files of a model out of an archive."""

import asyncio
import os
import threading
from pathlib import Path

from modelrunner.pull.source import make_way, require_space
from modelrunner.store import tar
from modelrunner.store.files import open_regular
from modelrunner.store.manifests import is_wanted

_EXPANSION = 20  # a compressed archive may be so many times smaller than its content
_LEAST = 64 << 20  # bytes that any archive may unpack to


def unpack(archive: Path, packed: str, folder: Path, stop: threading.Event) -> dict[str, Path]:
    """Writes those files of an archive that can be a part of a model, under names of our own in `folder`. Returns their
    paths by their names in the archive. `packed` is "gzip", or "" for a plain tar. Blocks. Raises `InvalidModel`,
    `InsufficientDisk`, `OSError`."""
    size = archive.stat().st_size
    limit = max(size * _EXPANSION, _LEAST) if packed else size
    found: dict[str, Path] = {}
    with open_regular(archive) as file:
        stream = tar.Gunzipped(file) if packed else file
        for member in tar.members(stream, limit=limit):
            if not is_wanted(member.name):
                continue
            require_space(folder, member.size)
            path = make_way(folder, f"{archive.name[:64]}-{len(found)}")
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as target:
                for piece in member.pieces():
                    if stop.is_set():
                        raise asyncio.CancelledError
                    target.write(piece)
            found[member.name] = path
    return found
