"""Downloads one file whose size and digest are known beforehand. A download that was cut is resumed; a file is never
trusted before its digest matches.

The name of the partial file comes from the digest, so a file that changed at its source starts anew. Ranges and their
failures follow RFC 9110, sections 14 and 15.5.17.
"""

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from modelrunner.concurrency.tasks import all_stopped, settled
from modelrunner.concurrency.threads import in_thread
from modelrunner.errors import ModelNotFound, SourceFailed
from modelrunner.web.partial import ByteRange, PartialFile, RemoteFile
from modelrunner.web.receiving import body_of
from modelrunner.web.session import explain, retry_after
from modelrunner.web.transfers import Transfers

if TYPE_CHECKING:
    import httpx

_CHUNK = 1 << 20
_MOST_PENDING = 4 << 20
_ATTEMPTS = 5
_LONGEST_PAUSE = 60.0
_SLOWEST = 1 << 18  # bytes that must come within `patience`
_PIECES = 16  # of a file, at least, so that no connection has all that is left
_SHORTEST_PIECE, _LONGEST_PIECE = 8 << 20, 256 << 20
Renewal = Callable[[str, Mapping[str, str]], Awaitable[Mapping[str, str] | None]]
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18})")


class _AttemptFailed(Exception):
    """This attempt failed and another may succeed; `pause` is what the server asked for, in seconds."""

    def __init__(self, reason: str, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause


class _RangeIgnored(_AttemptFailed):
    """The server sent another range than the one asked for."""


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
        self.client = client
        self._renew, self._renewing = renew, asyncio.Lock()
        self.patience = patience
        self.headers = {**headers, "Accept-Encoding": "identity"}
        self.pause = pause

    async def renewed(self, sent: Mapping[str, str], response: "httpx.Response") -> bool:
        """Gets better credentials than those `sent` with the request, once for all connections. False: there are
        none."""
        if self._renew is None:
            return False
        async with self._renewing:
            if self.headers.get("Authorization") == sent.get("Authorization"):
                fresh = await self._renew(str(response.url), response.headers)
                if fresh is None:
                    return False
                self.headers |= fresh
        return True

    async def fetch(
        self, file: RemoteFile, path: Path, advanced: Callable[[int], None], transfers: Transfers | None = None
    ) -> None:
        """Returns when `path` holds the file and its digest matches. `advanced` gets the bytes on disk; `transfers`
        are the limits that this download shares with others. Raises `SourceFailed`, `ModelNotFound`, and `OSError` for
        `path`."""
        for again in (False, True):  # a partial file with wrong bytes, or a flipped bit: download again from the start
            # A call in a thread that is cancelled has no result, though it may have opened the file.
            opening = asyncio.create_task(in_thread(lambda _: PartialFile(path, file)))
            try:
                await settled(opening)
                partial = opening.result()
                await in_thread(partial.read_through)
                # A server that lies about ranges is asked for none in the second round.
                single = again or not file.digest
                await _Download(self, file, partial, transfers or Transfers(), advanced, single=single).run()
                await in_thread(partial.finish)
            finally:
                if not opening.exception():
                    await settled(asyncio.create_task(in_thread(_close(opening.result()))))
            if file.digest in ("", partial.digest):
                return
            path.unlink()
        raise SourceFailed(f"{file.name} arrived damaged twice (its digest is not {file.digest}); pull again later")


class _Download:
    """Of one file. The first connection tries again where it fails; a further one just ends, and is the last."""

    def __init__(
        self,
        way: Downloader,
        file: RemoteFile,
        partial: PartialFile,
        transfers: Transfers,
        advanced: Callable[[int], None],
        *,
        single: bool,
    ) -> None:
        self._way, self._file, self._partial, self._transfers, self._advanced = way, file, partial, transfers, advanced
        self._single, self._pausing = single, False
        self._host = urlsplit(file.url).netloc
        self._piece = min(max(file.size // _PIECES, _SHORTEST_PIECE), _LONGEST_PIECE)
        self._claimed: list[ByteRange] = []
        self._helpers: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        self._advanced(self._partial.length)
        widening = asyncio.create_task(self._widen())
        try:
            while self._partial.gaps():
                if self._next() is not None:
                    await self._insist()
                else:
                    await asyncio.wait(self._helpers, return_when=asyncio.FIRST_COMPLETED)
            widening.cancel()
            while self._helpers:  # all bytes are here, and the last ones may not be hashed yet
                await asyncio.wait(self._helpers)
        finally:
            widening.cancel()  # it starts no more helpers from here on
            await all_stopped(widening, *self._helpers)

    async def _insist(self) -> None:
        """Brings what no other connection brings."""
        import httpx

        failures, furthest = 0, self._partial.length
        while self._next() is not None:
            try:
                await self._attempt()
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, _AttemptFailed) as error:
                # Bytes that came before and were thrown away are no progress: a server could give them for ever.
                here = self._partial.length
                failures = 0 if here >= furthest + _CHUNK else failures + 1
                furthest = max(furthest, here)
                asked = error.pause if isinstance(error, _AttemptFailed) else None
                if failures >= _ATTEMPTS or (asked or 0) > _LONGEST_PAUSE:
                    why = str(error) if isinstance(error, _AttemptFailed) else explain(error, self._file.url)
                    raise SourceFailed(
                        f"{self._file.name} could not be fetched: {why}; what has come is kept, pull again to go on",
                        retry_after=asked,
                    ) from error
                if isinstance(error, _RangeIgnored):
                    self._single = True
                    await all_stopped(*self._helpers)
                    self._partial.restart()
                self._pausing = True  # nor does any other connection ask meanwhile
                await self._way.pause(asked if asked is not None else 2.0 ** max(0, failures - 1))
                self._pausing = False

    async def _widen(self) -> None:
        """Opens further connections while the file comes slowly."""
        loop = asyncio.get_running_loop()
        before, then = self._partial.length, loop.time()
        while True:
            await asyncio.sleep(self._transfers.settle)
            here, now = self._partial.length, loop.time()
            rate, before, then = (here - before) / max(now - then, 1e-9), here, now
            slow = rate < self._transfers.fast and self._transfers.rate is None and not self._pausing
            left = sum(end - start for start, end in self._free())
            if slow and not self._single and left >= self._piece and here and self._transfers.may_open(self._host):
                task = asyncio.create_task(self._help())
                self._helpers.add(task)
                task.add_done_callback(self._helpers.discard)

    async def _help(self) -> None:
        import httpx

        try:
            while self._next() is not None and not (self._single or self._pausing):
                await self._attempt(helps=True)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError, _AttemptFailed, SourceFailed, ModelNotFound):
            self._single = True  # the first connection finds out what is wrong

    def _free(self) -> list[ByteRange]:
        """What is missing and in nobody's hands, in order."""
        found = []
        for start, end in self._partial.gaps():
            for claim in sorted(self._claimed):
                if claim.start < end and start < claim.end:
                    if start < claim.start:
                        found.append(ByteRange(start, claim.start))
                    start = max(start, claim.end)
            if start < end:
                found.append(ByteRange(start, end))
        return found

    def _next(self, at: int | None = None) -> ByteRange | None:
        """The range to bring next: the first free piece, or only the one that begins `at` a byte."""
        for start, end in self._free():
            if at is None or start == at:
                return ByteRange(start, min(end, start + self._piece))
        return None

    async def _attempt(self, *, helps: bool = False) -> None:
        """Brings the next piece, and those behind it as long as nobody else does."""
        async with self._transfers.connection(self._host):
            if (helps and (self._single or self._pausing)) or (claim := self._next()) is None:
                return
            self._claimed.append(claim)
            try:
                await self._ask(claim, bounded=helps or bool(self._helpers))
            except TimeoutError:
                patience = self._way.patience
                raise _AttemptFailed(f"it sent less than {_SLOWEST >> 10} KiB in {patience:.0f} s") from None
            finally:
                self._claimed = [other for other in self._claimed if other.start != claim.start]

    async def _ask(self, claim: ByteRange, *, bounded: bool) -> None:
        way, file = self._way, self._file
        headers = dict(way.headers)
        # To the end of the gap: the piece may grow that far.
        end = claim.end if bounded else next(gap.end for gap in self._partial.gaps() if gap.end >= claim.end)
        if claim.start or end < file.size:
            headers["Range"] = f"bytes={claim.start}-{end - 1 if end < file.size else ''}"
        async with (
            asyncio.timeout(way.patience) as deadline,
            way.client.stream("GET", file.url, headers=headers) as response,
        ):
            if response.status_code == 401 and await way.renewed(headers, response):
                raise _AttemptFailed("it refuses the credentials", pause=0.0)
            _check_status(response, file)
            whole = response.status_code == 200
            if not _continues(response, claim.start, file) and not (whole and not claim.start):
                raise _RangeIgnored("it sent another range than the one asked for", pause=0.0)
            loop = asyncio.get_running_loop()
            await self._receive(response, claim, bounded, lambda: deadline.reschedule(loop.time() + way.patience))

    async def _receive(
        self, response: "httpx.Response", claim: ByteRange, bounded: bool, arrived: Callable[[], None]
    ) -> None:
        """Writes in large pieces and in a thread, while further ones come, but loses none of what has come when it is
        cut short. `arrived` is called after every 256 KiB."""
        position = written = claim.start
        pending: list[bytes] = []
        unmarked, cut = 0, False
        writing: asyncio.Task[None] | None = None

        async def flush() -> None:
            nonlocal pending, written, writing
            if writing is not None:
                await asyncio.shield(writing)
                self._advanced(self._partial.length)
            full, offset, pending = pending, written, []
            written = position
            writing = asyncio.create_task(in_thread(lambda stop: self._partial.write(offset, full, stop)))

        try:
            async with aclosing(body_of(response)) as body:
                async for data in body:
                    end = claim.end
                    if position + len(data) >= end and not bounded:
                        end = self._grow(claim, position + len(data))
                    taken = data if position + len(data) <= end else data[: end - position]
                    if taken:
                        pending.append(taken)
                    position += len(taken)
                    unmarked += len(taken)
                    if unmarked >= _SLOWEST:
                        await self._transfers.paced(unmarked)
                        arrived()
                        unmarked = 0
                    idle = writing is None or writing.done()
                    waiting = position - written
                    if (waiting >= _CHUNK and idle) or waiting >= _MOST_PENDING:
                        await flush()
                    if position >= end:
                        break
                else:
                    cut = True
            if pending:
                await flush()
        finally:
            if writing is not None:
                await settled(writing)
                writing.result()
            if pending:
                last = asyncio.create_task(in_thread(lambda stop: self._partial.write(written, pending, stop)))
                await settled(last)
                last.result()
            self._advanced(self._partial.length)
        if cut:
            raise _AttemptFailed(f"it ended after {self._partial.length} of {self._file.size} bytes")

    def _grow(self, claim: ByteRange, wanted: int) -> int:
        """Takes the pieces behind one's own too, as far as `wanted`. Returns the end of what is one's own."""
        own = next(other for other in self._claimed if other.start == claim.start)
        while own.end <= wanted and (more := self._next(own.end)) is not None:
            self._claimed.remove(own)
            own = ByteRange(own.start, more.end)
            self._claimed.append(own)
        return own.end


def _close(partial: PartialFile) -> Callable[[threading.Event], None]:
    return lambda _: partial.close()


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
