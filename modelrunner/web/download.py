"""Downloads one file whose size and digest are known beforehand. A download that was cut is resumed; a file is never
trusted before its digest matches.

The name of the partial file comes from the digest, so a file that changed at its source starts anew. Ranges and their
failures follow RFC 9110, sections 14 and 15.5.17.
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

from modelrunner.concurrency.threads import ended, in_thread
from modelrunner.durable import discard
from modelrunner.errors import ModelNotFound, SourceFailed
from modelrunner.web.session import explain, retry_after

if TYPE_CHECKING:
    import httpx

_CHUNK = 1 << 20
_MOST_PENDING = 8 << 20
_FLUSHED = 8 << 20  # bytes after which the disk is set to work
_ATTEMPTS = 5
_LONGEST_PAUSE = 60.0
_SLOWEST = 1 << 18  # bytes that must come within `patience`
Renewal = Callable[[str, Mapping[str, str]], Awaitable[Mapping[str, str] | None]]
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """`size` in bytes. `digest` in hex: a sha256 (64 digits); or git's name of the content (40 digits; gitformat-loose:
    SHA-1 of a header and the content), which is all that a hub has for small files; or "" where the source names none,
    and the caller checks the content. `name` is for messages."""

    name: str
    url: str
    size: int
    digest: str

    @property
    def sha256(self) -> str | None:
        return self.digest if len(self.digest) == 64 else None

    @property
    def partial_name(self) -> str:
        """The name of its partial file."""
        return self.digest or hashlib.sha256(f"{self.url} {self.size}".encode()).hexdigest()

    def new_hash(self) -> "hashlib._Hash":
        if len(self.digest) != 40:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


class _AttemptFailed(Exception):
    """This attempt failed and another may succeed; `pause` is what the server asked for, in seconds."""

    def __init__(self, reason: str, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause


class PartialFile:
    """The beginning of `file` on disk, and its hash. Its methods block."""

    def __init__(self, path: Path, file: RemoteFile) -> None:
        """Opens the file at `path`. Something that cannot be the beginning of the file (longer, a link, no regular
        file) is deleted first."""
        if not _is_beginning(path, file.size):
            discard(path)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._file = file
        self._hash = file.new_hash()
        self.length = self._flushed = 0

    def read_through(self, stop: threading.Event) -> None:
        """Hashes the bytes on disk. Call it once, before `append`."""
        while not stop.is_set() and (chunk := os.read(self._descriptor, _CHUNK)):
            self._hash.update(chunk)
            self.length += len(chunk)

    def append(self, data: bytes | bytearray) -> None:
        """Writes `data`, but nothing beyond the file's size."""
        view = memoryview(data)[: self._file.size - self.length]
        while view:
            written = os.write(self._descriptor, view)
            self._hash.update(view[:written])
            self.length += written
            view = view[written:]
        if self.length - self._flushed >= _FLUSHED and hasattr(os, "posix_fadvise"):
            # Linux begins to write these pages and does not wait: the sync at the end has less left to do.
            os.posix_fadvise(self._descriptor, self._flushed, self.length - self._flushed, os.POSIX_FADV_DONTNEED)
            self._flushed = self.length

    def restart(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._hash, self.length, self._flushed = self._file.new_hash(), 0, 0

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
    and are dropped at a redirect to another one; `renew` gets the address and the headers of an answer with status 401,
    and returns better credentials, or None. An attempt that brings less than 256 KiB in `patience` seconds is
    given up; five attempts in a row that bring less than 1 MiB end the download."""

    def __init__(
        self,
        client: "httpx.AsyncClient",
        headers: Mapping[str, str],
        *,
        renew: Renewal | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        patience: float = 60.0,
    ) -> None:
        self._client = client
        self._renew = renew
        self._patience = patience
        self._headers = {**headers, "Accept-Encoding": "identity"}
        self._pause = pause

    async def fetch(self, file: RemoteFile, path: Path, advanced: Callable[[int], None]) -> None:
        """Returns when `path` holds the file and its digest matches. `advanced` gets the bytes on disk.
        Raises `SourceFailed`, `ModelNotFound`, and `OSError` for `path`."""
        for _ in range(2):  # a partial file with wrong bytes, or a flipped bit: download again from the start
            partial = PartialFile(path, file)
            try:
                await in_thread(partial.read_through)
                await self._fill(partial, file, advanced)
            finally:
                partial.close()
            if file.digest in ("", partial.digest):
                return
            path.unlink()
        raise SourceFailed(f"{file.name} arrived damaged twice (its digest is not {file.digest}); pull again later")

    async def _fill(self, partial: PartialFile, file: RemoteFile, advanced: Callable[[int], None]) -> None:
        import httpx

        failures, furthest = 0, partial.length
        advanced(partial.length)
        while partial.length < file.size:
            try:
                await self._attempt(partial, file, advanced)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, _AttemptFailed) as error:
                # Bytes that came before and were thrown away are no progress: a server could give them for ever.
                failures = 0 if partial.length >= furthest + _CHUNK else failures + 1
                furthest = max(furthest, partial.length)
                asked = error.pause if isinstance(error, _AttemptFailed) else None
                if failures >= _ATTEMPTS or (asked or 0) > _LONGEST_PAUSE:
                    why = str(error) if isinstance(error, _AttemptFailed) else explain(error, file.url)
                    raise SourceFailed(
                        f"{file.name} could not be fetched: {why}; what has come is kept, pull again to go on",
                        retry_after=asked,
                    ) from error
                await self._pause(asked if asked is not None else 2.0 ** max(0, failures - 1))

    async def _attempt(self, partial: PartialFile, file: RemoteFile, advanced: Callable[[int], None]) -> None:
        headers = dict(self._headers)
        if partial.length:
            headers["Range"] = f"bytes={partial.length}-"
        try:
            async with (
                asyncio.timeout(self._patience) as deadline,
                self._client.stream("GET", file.url, headers=headers) as response,
            ):
                if response.status_code == 401 and self._renew is not None:
                    fresh = await self._renew(str(response.url), response.headers)
                    if fresh is not None:
                        self._headers |= fresh
                        raise _AttemptFailed("it refuses the credentials", pause=0.0)
                _check_status(response, file)
                if not _continues(response, partial.length, file):
                    partial.restart()
                    if response.status_code != 200:
                        raise _AttemptFailed("it sent another range than the one asked for", pause=0.0)

                def arrived() -> None:
                    deadline.reschedule(asyncio.get_running_loop().time() + self._patience)

                await _receive(response, partial, file.size, advanced, arrived)
        except TimeoutError:
            raise _AttemptFailed(f"it sent less than {_SLOWEST >> 10} KiB in {self._patience:.0f} s") from None
        if partial.length < file.size:
            raise _AttemptFailed(f"it ended after {partial.length} of {file.size} bytes")


async def _receive(
    response: "httpx.Response",
    partial: PartialFile,
    size: int,
    advanced: Callable[[int], None],
    arrived: Callable[[], None],
) -> None:
    """Writes in large pieces and in a thread, while further ones come, but loses none of what has come when it is cut
    short. `arrived` is called after every 256 KiB."""
    body = cast("AsyncGenerator[bytes, None]", response.aiter_raw())  # closed by us: left early, it would linger
    pending, unmarked, left = bytearray(), 0, size - partial.length
    writing: asyncio.Task[None] | None = None

    async def flush() -> None:
        nonlocal pending, writing
        if writing is not None:
            await asyncio.shield(writing)
            advanced(partial.length)
        full, pending = pending, bytearray()
        writing = asyncio.create_task(in_thread(lambda _: partial.append(full)))

    try:
        async with contextlib.aclosing(body):
            async for data in body:
                pending += data
                left -= len(data)
                unmarked += len(data)
                if unmarked >= _SLOWEST:
                    arrived()
                    unmarked = 0
                idle = writing is None or writing.done()
                if (len(pending) >= _CHUNK and idle) or len(pending) >= _MOST_PENDING:
                    await flush()
                if left <= 0:
                    break
        await flush()
    finally:
        if writing is not None:
            await ended(writing)
            writing.result()
        partial.append(pending)
        advanced(partial.length)


def _continues(response: "httpx.Response", offset: int, file: RemoteFile) -> bool:
    """True if the answer goes on at `offset`. Raises `SourceFailed` if the file has another size than announced."""
    found: int | None = None
    match = None
    if response.status_code == 206:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        found = int(match[2]) if match else None
    elif response.status_code == 200 and "Content-Encoding" not in response.headers:
        length = response.headers.get("Content-Length", "")
        found = int(length) if re.fullmatch("[0-9]{1,18}", length) else None
    if found is not None and found != file.size:
        raise SourceFailed(
            f"{file.name} has {found} bytes at its source, where {file.size} were announced: it is being changed, or"
            " damaged there; pull again later"
        )
    return match is not None and int(match[1]) == offset


def _check_status(response: "httpx.Response", file: RemoteFile) -> None:
    match response.status_code:
        case 200 | 206 | 416:
            return
        case 401 | 403:
            raise refused(file.name, response.headers)
        case 404 | 410:
            raise ModelNotFound(f"{file.name} is no longer there; pull again to see what is")
        case 408 | 429 | 500 | 502 | 503 | 504 as status:
            pause = retry_after(response.headers.get("Retry-After"))
            raise _AttemptFailed(f"the source answered {status}", pause)
        case status:
            raise SourceFailed(f"{file.name}: the source answered {status}")


def refused(name: str, headers: Mapping[str, str]) -> SourceFailed:
    """The error for an answer with status 401 or 403."""
    if headers.get("x-error-code") == "GatedRepo":
        reason = "is gated: accept its terms on its page, and set HF_TOKEN or give a token that may read it"
        return SourceFailed(f"{name} {reason}")
    return SourceFailed(f"{name}: access refused; the token is missing, wrong or expired")
