"""One file over HTTP whose size and sha256 are known beforehand: resumed after a cut, never trusted before its digest
matches.

The digest is in the name of the partial file, so a file that changed at its source starts anew, and no sidecar is
needed. Ranges and their failures as RFC 9110, 14 and 15.5.17.
"""

import asyncio
import contextlib
import hashlib
import ipaddress
import os
import re
import socket
import stat
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from modelrunner.errors import ModelNotFound, SourceFailed
from modelrunner.pull.source import in_thread

if TYPE_CHECKING:
    import httpx

_CHUNK = 1 << 20
_ATTEMPTS = 5
_LONGEST_PAUSE = 60.0
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """`size` in bytes, `sha256` in hex. `name` is for messages."""

    name: str
    url: str
    size: int
    sha256: str


class _Interrupted(Exception):
    """This attempt is over and another may go better; `pause` is what the server asked for, in seconds."""

    def __init__(self, reason: str, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause


class PartialFile:
    """The beginning of a file on disk, and the sha256 of it. Blocking: called from a thread."""

    def __init__(self, descriptor: int, limit: int) -> None:
        self._descriptor, self._limit = descriptor, limit
        self._hash = hashlib.sha256()
        self.length = 0

    @classmethod
    def open(cls, path: Path, limit: int, stop: threading.Event) -> Self:
        """Whatever lies at `path` is read through once. What cannot be a beginning of `limit` bytes (longer, a link,
        no regular file) is thrown away."""
        if not _is_beginning(path, limit):
            path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        partial = cls(os.open(path, flags, 0o600), limit)
        while not stop.is_set() and (chunk := os.read(partial._descriptor, _CHUNK)):
            partial._hash.update(chunk)
            partial.length += len(chunk)
        return partial

    def append(self, data: bytes | bytearray) -> None:
        """What goes beyond the limit is not kept."""
        view = memoryview(data)[: self._limit - self.length]
        while view:
            written = os.write(self._descriptor, view)
            self._hash.update(view[:written])
            self.length += written
            view = view[written:]

    def restart(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._hash, self.length = hashlib.sha256(), 0

    @property
    def sha256(self) -> str:
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
            partial = await in_thread(lambda stop: PartialFile.open(path, file.size, stop))
            try:
                await self._fill(partial, file, advanced)
            finally:
                partial.close()
            if partial.sha256 == file.sha256:
                return
            path.unlink()
        raise SourceFailed(f"{file.name} arrived damaged twice (its sha256 is not {file.sha256}); pull again later")

    async def _fill(self, partial: PartialFile, file: RemoteFile, advanced: Callable[[int], None]) -> None:
        import httpx

        failures = 0
        advanced(partial.length)
        while partial.length < file.size:
            before = partial.length
            try:
                await self._attempt(partial, file, advanced)
            except (httpx.TransportError, _Interrupted) as error:
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
    pending = bytearray()
    try:
        async for data in response.aiter_raw():
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


def new_client(endpoint: str, *, transport: "httpx.AsyncBaseTransport | None" = None) -> "httpx.AsyncClient":
    """A client that follows redirects to public addresses only, unless the endpoint's own is not public: a hub, or
    somebody who has taken it over, must not make the daemon talk to this machine's services. Takes some 50 ms (the
    certificates): call it in a thread."""
    import httpx

    origin = httpx.URL(endpoint)

    async def check(request: httpx.Request) -> None:
        if request.url.host != origin.host or request.url.scheme != origin.scheme:
            await _check_hop(request.url, origin)

    return httpx.AsyncClient(
        follow_redirects=True,
        max_redirects=10,
        timeout=httpx.Timeout(30.0, connect=10.0),
        event_hooks={"request": [check]},
        transport=transport,
    )


async def _check_hop(target: "httpx.URL", origin: "httpx.URL") -> None:
    if target.scheme != "https" and origin.scheme == "https":
        raise SourceFailed(f"the source redirects to {target.host} without TLS; this is not followed")
    private_origin = any(map(_is_private, await _addresses(origin)))
    for address in await _addresses(target):
        if address.is_link_local or address.is_multicast or (_is_private(address) and not private_origin):
            raise SourceFailed(
                f"the source redirects to {target.host}, which is no public address; this is not followed"
            )


def _is_private(address: _Address) -> bool:
    return not address.is_global


async def _addresses(url: "httpx.URL") -> list[_Address]:
    """None where the name cannot be resolved here: then a proxy resolves it, or the connection fails by itself."""
    with contextlib.suppress(socket.gaierror):
        found = await asyncio.get_running_loop().getaddrinfo(url.host, url.port or 443, type=socket.SOCK_STREAM)
        return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    return []
