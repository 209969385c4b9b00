"""One request of a download: the requested range, the meaning of the answer, and its bytes on their way to the disk.

Ranges and their failures follow RFC 9110, sections 14 and 15.5.17.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

from modelrunner.concurrency.tasks import settled
from modelrunner.concurrency.threads import in_thread
from modelrunner.errors import ModelNotFound, SourceFailed
from modelrunner.web.partial import ByteRange, PartialFile, RemoteFile
from modelrunner.web.pieces import Pieces
from modelrunner.web.session import retry_after
from modelrunner.web.transfers import Transfers

if TYPE_CHECKING:
    import httpx

_CHUNK = 1 << 20
_EVERY = 1.0  # seconds between two writes of a slow download, so that its progress shows
_MOST_PENDING = 4 << 20
_SLOWEST = 1 << 18  # bytes that must come within `patience`
Renewal = Callable[[str, Mapping[str, str]], Awaitable[Mapping[str, str] | None]]
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18})")
_MOST = 1 << 20  # bytes of a piece
_WORTHWHILE = 4 << 20  # bytes for which losing a connection is worth it


class AttemptFailed(Exception):
    """This attempt failed and another may succeed; `pause` is the server's wish, in seconds."""

    def __init__(self, reason: str, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause


class RangeIgnored(AttemptFailed):
    """The server sent another range than the one asked for."""


class SourceAccess:
    """The access to a source. `headers` (the credentials among them) go to the origin of each URL and are dropped at a
    redirect to another one; `renew` gets the address and the headers of an answer with status 401, and returns better
    credentials, or None. A request that brings less than 256 KiB in `patience` seconds is given up."""

    def __init__(
        self, client: "httpx.AsyncClient", headers: Mapping[str, str], renew: Renewal | None, patience: float
    ) -> None:
        self.client = client
        self.headers = {**headers, "Accept-Encoding": "identity"}
        self.patience = patience
        self._renew, self._renewing = renew, asyncio.Lock()

    async def renewed(self, sent: Mapping[str, str], response: "httpx.Response") -> bool:
        """Gets better credentials than those `sent` with the request, once for all connections. Returns False if there
        are none."""
        if self._renew is None:
            return False
        async with self._renewing:
            if self.headers.get("Authorization") == sent.get("Authorization"):
                fresh = await self._renew(str(response.url), response.headers)
                if fresh is None:
                    return False
                self.headers |= fresh
        return True


class Attempts:
    """The requests of one download, one or several at a time."""

    def __init__(
        self,
        access: SourceAccess,
        file: RemoteFile,
        partial: PartialFile,
        pieces: Pieces,
        transfers: Transfers,
        advanced: Callable[[int], None],
    ) -> None:
        self._access, self._file, self._partial, self._pieces = access, file, partial, pieces
        self._transfers, self._advanced = transfers, advanced

    async def bring(self, claim: ByteRange, *, bounded: bool) -> None:
        """Asks for the range and writes it; a request that is not `bounded` takes the free pieces after it too. Raises
        `AttemptFailed`, `ModelNotFound`, `SourceFailed`, `httpx.HTTPError`, and `OSError` for the file."""
        try:
            await self._ask(claim, bounded=bounded)
        except TimeoutError:
            patience = self._access.patience
            raise AttemptFailed(f"it sent less than {_SLOWEST >> 10} KiB in {patience:.0f} s") from None

    async def _ask(self, claim: ByteRange, *, bounded: bool) -> None:
        access, file = self._access, self._file
        headers = dict(access.headers)
        # The range goes to the end of the gap: the piece may grow that far.
        end = claim.end if bounded else next(gap.end for gap in self._partial.gaps() if gap.end >= claim.end)
        if claim.start or end < file.size:
            headers["Range"] = f"bytes={claim.start}-{end - 1 if end < file.size else ''}"
        async with (
            asyncio.timeout(access.patience) as deadline,
            access.client.stream("GET", file.url, headers=headers) as response,
        ):
            if response.status_code == 401 and await access.renewed(headers, response):
                raise AttemptFailed("it refuses the credentials", pause=0.0)
            _check_status(response, file, begun=self._partial.length > 0)
            whole = response.status_code == 200
            if not _continues(response, claim.start, file) and not (whole and not claim.start):
                raise RangeIgnored("it sent another range than the one asked for", pause=0.0)
            loop = asyncio.get_running_loop()
            await self._receive(response, claim, bounded, lambda: deadline.reschedule(loop.time() + access.patience))

    async def _receive(
        self, response: "httpx.Response", claim: ByteRange, bounded: bool, arrived: Callable[[], None]
    ) -> None:
        """Writes large pieces, or the bytes of one second, in a thread, while further bytes come. Loses no received
        byte when it is cut short. `arrived` is called after every 256 KiB."""
        loop = asyncio.get_running_loop()
        position = written = claim.start
        pending: list[bytes] = []
        unmarked, cut, receiving = 0, False, True
        writing: asyncio.Task[None] | None = None
        last_write = loop.time()

        def write() -> None:
            nonlocal pending, written, writing, last_write
            full, offset, pending = pending, written, []
            written, last_write = position, loop.time()
            writing = asyncio.create_task(in_thread(lambda stop: self._partial.write(offset, full, stop)))
            writing.add_done_callback(wrote)

        def wrote(task: asyncio.Task[None]) -> None:
            self._advanced(self._partial.length)
            goes_on = receiving and task is writing and not task.cancelled() and task.exception() is None
            if goes_on and position - written >= _CHUNK:
                write()

        try:
            async with aclosing(body_of(response)) as body:
                async for data in body:
                    end = claim.end
                    if position + len(data) >= end and not bounded:
                        end = self._pieces.grow(claim, position + len(data))
                    taken = data if position + len(data) <= end else data[: end - position]
                    if taken:
                        pending.append(taken)
                    position += len(taken)
                    unmarked += len(taken)
                    if unmarked >= _SLOWEST:
                        await self._transfers.paced(unmarked)
                        arrived()
                        unmarked = 0
                    if writing is None or writing.done():
                        if writing is not None:
                            writing.result()
                        if position - written >= _CHUNK or (pending and loop.time() - last_write >= _EVERY):
                            write()
                    if writing is not None and position - written >= _MOST_PENDING:
                        await asyncio.shield(writing)  # `wrote` has begun the next write when this one ends
                    if position >= end:
                        break
                else:
                    cut = True
        finally:
            receiving = False
            if writing is not None:
                await settled(writing)
                writing.result()
            if pending:
                last = asyncio.create_task(in_thread(lambda stop: self._partial.write(written, pending, stop)))
                await settled(last)
                last.result()
            self._advanced(self._partial.length)
        if cut:
            raise AttemptFailed(f"it ended after {self._partial.length} of {self._file.size} bytes")


def _continues(response: "httpx.Response", offset: int, file: RemoteFile) -> bool:
    """Returns whether the answer continues at `offset`. Raises `SourceFailed` if the file has another size than
    announced."""
    start: int | None = None
    match = None
    if response.status_code == 206:
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        start = int(match[2]) if match else None
    elif response.status_code == 200 and "Content-Encoding" not in response.headers:
        length = response.headers.get("Content-Length", "")
        start = int(length) if re.fullmatch("[0-9]{1,18}", length) else None
    if start is not None and start != file.size:
        raise SourceFailed(
            f"{file.name} has {start} bytes at its source, where {file.size} were announced: it is being changed or"
            " damaged there; pull again later"
        )
    return match is not None and int(match[1]) == offset


def _check_status(response: "httpx.Response", file: RemoteFile, *, begun: bool) -> None:
    """Raises the error of a failed answer. A download that has `begun` may be refused by the storage to which the
    source redirects; the source then gives a fresh address."""
    match response.status_code:
        case 200 | 206 | 416:
            return
        case 401 | 403 if begun and response.history:  # the address to which the source has led expires
            raise AttemptFailed(f"the source's storage answered {response.status_code}")
        case 401 | 403:
            raise refused(file.name, response.headers)
        case 404 | 410:
            raise ModelNotFound(f"{file.name} is no longer there; pull again for the present files")
        case 408 | 429 | 500 | 502 | 503 | 504 as status:
            pause = retry_after(response.headers.get("Retry-After"))
            raise AttemptFailed(f"the source answered {status}", pause)
        case status:
            raise SourceFailed(f"{file.name}: the source answered {status}")


def refused(name: str, headers: Mapping[str, str]) -> SourceFailed:
    """Returns the error for an answer with status 401 or 403."""
    if headers.get("x-error-code") == "GatedRepo":
        reason = "is gated: accept its terms on its page, and set HF_TOKEN or give a token that may read it"
        return SourceFailed(f"{name} {reason}")
    return SourceFailed(f"{name}: access refused; the token is missing, wrong or expired")


async def body_of(response: "httpx.Response") -> AsyncGenerator[bytes, None]:
    """Yields the bytes as they are sent. Raises `httpx.HTTPError`.

    The long body of an answer in HTTP/1.1 with a Content-Length is read from the connection itself, by httpx's
    `network_stream` (https://www.encode.io/httpcore/extensions/): its parser would copy every byte three times. The
    connection is closed afterwards."""
    import httpcore
    import httpx

    length = response.headers.get("Content-Length", "")
    left = int(length) if length.isascii() and length.isdigit() and len(length) < 19 else 0
    stream = response.extensions.get("network_stream")
    plain = response.http_version == "HTTP/1.1" and "Transfer-Encoding" not in response.headers
    async with aclosing(cast("AsyncGenerator[bytes, None]", response.aiter_raw())) as parsed:
        async for data in parsed:
            left -= len(data)
            yield data
            # The parser has returned all of its bytes: the rest is still in the connection.
            if stream is None or not plain or left < _WORTHWHILE:
                continue
            while left:
                try:
                    data = await stream.read(min(left, _MOST))
                except (httpcore.NetworkError, httpcore.TimeoutException) as error:
                    raise httpx.ReadError(str(error)) from error
                if not data:
                    return
                left -= len(data)
                yield data
            return
