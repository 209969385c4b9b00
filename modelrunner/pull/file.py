"""`file:///abs/path.gguf`: a file (or one of several shards) on this machine. It is copied, never moved; where the file
system can, the copy shares its blocks with the original."""

import asyncio
import errno
import os
import stat
import threading
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import unquote, urlsplit

from modelrunner import api
from modelrunner.errors import BadRequest, InvalidModel, ModelNotFound
from modelrunner.pull.selection import with_shards
from modelrunner.pull.source import Fetched, Report, Source, discard, in_thread, require_space

_MAGIC = b"GGUF"
_STEP = 16 << 20
# Kernel, file system or pair of file systems without copy_file_range.
_NO_RANGE_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ETXTBSY}


class FileSource(Source):
    """Only for callers who could open the file themselves; which they are is the server's to decide."""

    needs_name = True

    def claims(self, text: str) -> bool:
        return text.startswith("file:")

    async def fetch(self, text: str, folder: Path, report: Report, token: str | None) -> Fetched:
        """Raises `ModelNotFound`, `BadRequest` for what is no regular file or may not be read, `InvalidModel` for one
        that is no GGUF, all before anything is copied."""
        original = _path(text)
        loop = asyncio.get_running_loop()

        def copied(name: str, size: int, done: int, total: int) -> None:
            layer = api.Layer(name, size, size)
            progress = api.Progress("progress", f"Copying {name}", total, done, layer, phase="copying")
            loop.call_soon_threadsafe(report, progress)

        def work(stop: threading.Event) -> dict[str, Path]:
            with ExitStack() as stack:
                names = with_shards(os.listdir(original.parent) if original.parent.is_dir() else (), original.name)
                opened = {name: _open(original.with_name(file), stack) for name, file in names.items()}
                sizes = {name: os.fstat(descriptor).st_size for name, descriptor in opened.items()}
                require_space(folder, sum(sizes.values()))
                done = 0
                for name, descriptor in opened.items():
                    _copy(descriptor, folder / name, sizes[name], stop)
                    done += sizes[name]
                    copied(names[name], sizes[name], done, sum(sizes.values()))
                return {name: folder / name for name in names}

        return Fetched(await in_thread(work))


def _path(text: str) -> Path:
    parts = urlsplit(text)
    path = unquote(parts.path, errors="strict") if parts.netloc in ("", "localhost") else ""
    if not path.startswith("/") or "\0" in path or parts.query or parts.fragment:
        raise BadRequest(f"{text!r} names no file: write file:///absolute/path.gguf", param="from")
    return Path(path)


def _open(path: Path, stack: ExitStack) -> int:
    """Never waits (a FIFO), never follows a link, never opens a device that has effects."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ModelNotFound(f"there is no file {path}") from None
    except OSError as error:
        why = "it is a symbolic link: name the file itself" if error.errno == errno.ELOOP else error.strerror
        raise BadRequest(f"{path} cannot be read: {why}", param="from") from None
    stack.callback(os.close, descriptor)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise BadRequest(f"{path} is not a regular file", param="from")
    if os.pread(descriptor, len(_MAGIC), 0) != _MAGIC:
        raise InvalidModel(f"{path} is no GGUF file: it does not begin with GGUF")
    return descriptor


def _copy(source: int, target: Path, size: int, stop: threading.Event) -> None:
    discard(target)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    destination = os.open(target, flags, 0o600)
    try:
        position = 0
        while position < size and not stop.is_set():
            moved = _move(source, destination, position, min(_STEP, size - position))
            if not moved:
                raise InvalidModel("the file became shorter while it was copied")
            position += moved
    finally:
        os.close(destination)


def _move(source: int, destination: int, position: int, count: int) -> int:
    """Copies at most `count` bytes, returns how many."""
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(source, destination, count, offset_src=position)
        except OSError as error:
            if error.errno not in _NO_RANGE_COPY:
                raise
    return os.write(destination, os.pread(source, min(count, 1 << 20), position))
