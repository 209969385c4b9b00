"""One file over HTTP whose size and digest are known beforehand: resumed after a cut, never trusted before its digest
matches.

The digest is in the name of the partial file, so a file that changed at its source starts anew, and no sidecar is
needed. Ranges and their failures as RFC 9110, 14 and 15.5.17.
"""

import asyncio
import contextlib
import hashlib
import os
import re
import stat
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from modelrunner.errors import ModelNotFound, SourceFailed
from modelrunner.pull.source import discard, in_thread

if TYPE_CHECKING:
    import httpx

_CHUNK = 1 << 20
_ATTEMPTS = 5
_LONGEST_PAUSE = 60.0
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """`size` in bytes. `digest` in hex: a sha256, or, where there are 40 digits, git's name of the content
    (gitformat-loose: SHA-1 of a header and the content), which is all that a hub has for small files. `name` is for
    messages."""

    name: str
    url: str
    size: int
    digest: str

    @property
    def sha256(self) -> str | None:
        return self.digest if len(self.digest) == 64 else None

    def new_hash(self) -> "hashlib._Hash":
        if self.sha256 is not None:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


class _Interrupted(Exception):
    """This attempt is over and another may go better; `pause` is what the server asked for, in seconds."""

    def __init__(self, reason: str, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause


class PartialFile:
    """The beginning of `file` on disk, and its hash. Its methods block."""

    def __init__(self, path: Path, file: RemoteFile) -> None:
        """Opens what lies at `path`. What cannot be the beginning of the file (longer, a link, no regular file) is
        thrown away."""
        if not _is_beginning(path, file.size):
            discard(path)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._file = file
        self._hash = file.new_hash()
        self.length = 0

    def read_through(self, stop: threading.Event) -> None:
        """Takes what is there into account, once, before anything is appended."""
        while not stop.is_set() and (chunk := os.read(self._descriptor, _CHUNK)):
            self._hash.update(chunk)
            self.length += len(chunk)

    def append(self, data: bytes | bytearray) -> None:
        """What goes beyond the file's size is not kept."""
        view = memoryview(data)[: self._file.size - self.length]
        while view:
            written = os.write(self._descriptor, view)
            self._hash.update(view[:written])
            self.length += written
            view = view[written:]

    def restart(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._hash, self.length = self._file.new_hash(), 0

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def close(self) -> None:
        os.close(self._descriptor)


def _is_beginning(path: Path, limit: int) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(found.st_mode) and found.st_size <= limit


class Downloader:
    """Fetches `RemoteFile`s into partial files. `headers` (the credentials among them) go to the origin of each URL
    and are dropped at a redirect to another one."""

    def __init__(
        self,
        client: "httpx.AsyncClient",
        headers: Mapping[str, str],
        *,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._headers = {**headers, "Accept-Encoding": "identity"}
        self._pause = pause

    async def fetch(self, file: RemoteFile, path: Path, advanced: Callable[[int], None]) -> None:
        """Returns when `path` holds the file and its digest matches. `advanced` is told the bytes that are there.
        Raises `SourceFailed`, `ModelNotFound`, and `OSError` for `path`."""
        for _ in range(2):  # a partial file with wrong bytes, or a flipped bit: once more from the start
            partial = PartialFile(path, file)
            try:
                await in_thread(partial.read_through)
                await self._fill(partial, file, advanced)
            finally:
                partial.close()
            if partial.digest == file.digest:
                return
            path.unlink()
        raise SourceFailed(f"{file.name} arrived damaged twice (its digest is not {file.digest}); pull again later")

    async def _fill(self, partial: PartialFile, file: RemoteFile, advanced: Callable[[int], None]) -> None:
        import httpx

        failures = 0
        advanced(partial.length)
        while partial.length < file.size:
            before = partial.length
            try:
                await self._attempt(partial, file, advanced)
            except (httpx.HTTPError, httpx.InvalidURL, _Interrupted) as error:
                # A server that gives a few bytes each time must not hold us for ever.
                failures = 0 if partial.length >= before + _CHUNK else failures + 1
                asked = error.pause if isinstance(error, _Interrupted) else None
                if failures >= _ATTEMPTS or (asked or 0) > _LONGEST_PAUSE:
                    why = str(error) or type(error).__name__
                    raise SourceFailed(
                        f"{file.name} could not be fetched: {why}; what has come is kept, pull again to go on",
                        retry_after=asked,
                    ) from error
                await self._pause(asked if asked is not None else 2.0 ** max(0, failures - 1))

    async def _attempt(self, partial: PartialFile, file: RemoteFile, advanced: Callable[[int], None]) -> None:
        headers = dict(self._headers)
        if partial.length:
            headers["Range"] = f"bytes={partial.length}-"
        async with self._client.stream("GET", file.url, headers=headers) as response:
            _check_status(response, file)
            if not _continues(response, partial.length, file.size):
                partial.restart()
                if response.status_code != 200:
                    raise _Interrupted("it sent another range than the one asked for", pause=0.0)
            await _receive(response, partial, file.size, advanced)
        if partial.length < file.size:
            raise _Interrupted(f"it ended after {partial.length} of {file.size} bytes")


async def _receive(
    response: "httpx.Response", partial: PartialFile, size: int, advanced: Callable[[int], None]
) -> None:
    """Writes in large pieces and in a thread, but loses none of what has come when it is cut short."""
    body = cast("AsyncGenerator[bytes, None]", response.aiter_raw())  # closed by us: left early, it would linger
    pending = bytearray()
    try:
        async with contextlib.aclosing(body):
            async for data in body:
                pending += data
                if len(pending) >= _CHUNK:
                    full, pending = pending, bytearray()
                    await in_thread(lambda stop, full=full: partial.append(full))  # type: ignore[misc]
                    advanced(partial.length)
                if partial.length + len(pending) >= size:
                    break
    finally:
        partial.append(pending)
        advanced(partial.length)


def _continues(response: "httpx.Response", offset: int, size: int) -> bool:
    if response.status_code != 206:
        return False
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    return match is not None and (int(match[1]), int(match[2])) == (offset, size)


def _check_status(response: "httpx.Response", file: RemoteFile) -> None:
    match response.status_code:
        case 200 | 206 | 416:
            return
        case 401 | 403:
            raise SourceFailed(
                f"{file.name}: access refused ({response.status_code}); the token is missing, wrong or expired"
            )
        case 404 | 410:
            raise ModelNotFound(f"{file.name} is no longer there; pull again to see what is")
        case 408 | 429 | 500 | 502 | 503 | 504:
            raise _Interrupted(f"the source answered {response.status_code}", _retry_after(response))
        case status:
            raise SourceFailed(f"{file.name}: the source answered {status}")


def _retry_after(response: "httpx.Response") -> float | None:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else None
