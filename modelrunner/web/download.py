"""Downloads one file whose size and digest are known beforehand. A download that was cut is resumed; a file is not
trusted before its digest matches.

The name of the partial file comes from the digest, so a file that changed at its source starts anew.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from modelrunner.concurrency.tasks import all_stopped, settled
from modelrunner.concurrency.threads import in_thread
from modelrunner.errors import ModelNotFound, SourceFailed
from modelrunner.web.attempt import AttemptFailed, Attempts, RangeIgnored, Renewal, SourceAccess
from modelrunner.web.partial import PartialFile, RemoteFile
from modelrunner.web.pieces import Pieces
from modelrunner.web.session import explain
from modelrunner.web.transfers import Transfers

if TYPE_CHECKING:
    import httpx

_ATTEMPTS = 5
_PROGRESS = 1 << 20  # bytes that reset the count of failures
_LONGEST_PAUSE = 60.0


class Downloader:
    """Fetches `RemoteFile`s into partial files. `headers`, `renew` and `patience` are those of `SourceAccess`; `pause`
    waits between attempts. Five consecutive attempts that bring less than 1 MiB end the download."""

    def __init__(
        self,
        client: "httpx.AsyncClient",
        headers: Mapping[str, str],
        *,
        renew: Renewal | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        patience: float = 60.0,
    ) -> None:
        self._access = SourceAccess(client, headers, renew, patience)
        self._pause = pause

    async def fetch(
        self, file: RemoteFile, path: Path, advanced: Callable[[int], None], transfers: Transfers | None = None
    ) -> None:
        """Returns when `path` holds the file and its digest matches. `advanced` gets the bytes on disk; `transfers`
        are the limits that this download shares with others. Raises `SourceFailed`, `ModelNotFound`, and `OSError` for
        `path`."""
        for again in (False, True):  # a partial file with wrong bytes, or a flipped bit: download again from the start
            # A cancelled call in a thread returns no result, though it may have opened the file.
            opening = asyncio.create_task(in_thread(lambda _: PartialFile(path, file)))
            try:
                await settled(opening)
                partial = opening.result()
                await in_thread(partial.read_through)
                # The second round asks for no ranges, since the server may have lied about them.
                single = again or not file.digest
                limits, pieces = transfers or Transfers(), Pieces(partial, file.size)
                attempts = Attempts(self._access, file, partial, pieces, limits, advanced)
                await _Download(file, partial, pieces, attempts, limits, self._pause, single=single).run(advanced)
                await in_thread(partial.finish)
            finally:
                if not opening.exception():
                    await settled(asyncio.create_task(in_thread(_close(opening.result()))))
            if file.digest in ("", partial.digest):
                return
            await in_thread(lambda _: path.unlink())
        raise SourceFailed(f"{file.name} arrived damaged twice (its digest is not {file.digest}); pull again later")


class _Download:
    """One file's download. The first connection tries again after a failure; a further connection ends at its first
    failure, and then none is added."""

    def __init__(
        self,
        file: RemoteFile,
        partial: PartialFile,
        pieces: Pieces,
        attempts: Attempts,
        transfers: Transfers,
        pause: Callable[[float], Awaitable[None]],
        *,
        single: bool,
    ) -> None:
        self._file, self._partial, self._pieces, self._attempts = file, partial, pieces, attempts
        self._transfers, self._pause = transfers, pause
        self._single, self._pausing = single, False
        self._host = urlsplit(file.url).netloc
        self._helpers: set[asyncio.Task[None]] = set()

    async def run(self, advanced: Callable[[int], None]) -> None:
        advanced(self._partial.length)
        widening = asyncio.create_task(self._widen())
        try:
            while self._partial.gaps():
                if self._pieces.next() is not None:
                    await self._insist()
                else:
                    await asyncio.wait(self._helpers, return_when=asyncio.FIRST_COMPLETED)
            widening.cancel()
            while self._helpers:  # all bytes are here, and the last ones may not be hashed yet
                await asyncio.wait(self._helpers)
        finally:
            widening.cancel()  # no further helper is started
            await all_stopped(widening, *self._helpers)

    async def _insist(self) -> None:
        """Brings the pieces that no other connection brings."""
        import httpx

        failures, furthest = 0, self._partial.length
        while self._pieces.next() is not None:
            try:
                await self._attempt()
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, AttemptFailed) as error:
                # Bytes that came before and were discarded do not count: a server could send them for ever.
                here = self._partial.length
                failures = 0 if here >= furthest + _PROGRESS else failures + 1
                furthest = max(furthest, here)
                pause = error.pause if isinstance(error, AttemptFailed) else None
                if failures >= _ATTEMPTS or (pause or 0) > _LONGEST_PAUSE:
                    why = str(error) if isinstance(error, AttemptFailed) else explain(error, self._file.url)
                    raise SourceFailed(
                        f"{self._file.name} could not be fetched: {why}; the received bytes are kept, pull to go on",
                        retry_after=pause,
                    ) from error
                if isinstance(error, RangeIgnored):
                    self._single = True
                    await all_stopped(*self._helpers)
                    await in_thread(lambda _: self._partial.restart())
                self._pausing = True  # no other connection asks meanwhile
                await self._pause(pause if pause is not None else 2.0 ** max(0, failures - 1))
                self._pausing = False

    async def _widen(self) -> None:
        """Opens further connections while the file comes slowly, and neither a limit nor a pause is the reason."""
        loop, transfers = asyncio.get_running_loop(), self._transfers
        before, then = self._partial.length, loop.time()
        while True:
            begun = transfers.now()
            await asyncio.sleep(transfers.settle)
            here, now = self._partial.length, loop.time()
            rate, before, then = (here - before) / max(now - then, 1e-9), here, now
            slow = rate < transfers.fast and transfers.free_since(begun) and not self._pausing
            left = sum(end - start for start, end in self._pieces.free())
            if slow and not self._single and left >= self._pieces.length and here and transfers.may_open(self._host):
                task = asyncio.create_task(self._help())
                self._helpers.add(task)
                task.add_done_callback(self._helpers.discard)

    async def _help(self) -> None:
        import httpx

        try:
            while self._pieces.next() is not None and not (self._single or self._pausing):
                await self._attempt(helps=True)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError, AttemptFailed, SourceFailed, ModelNotFound):
            self._single = True  # the first connection finds the fault

    async def _attempt(self, *, helps: bool = False) -> None:
        """Brings the next piece, and the free pieces after it."""
        async with self._transfers.connection(self._host):
            if helps and (self._single or self._pausing):
                return
            with self._pieces.claim() as claim:
                if claim is not None:
                    await self._attempts.bring(claim, bounded=helps or bool(self._helpers))


def _close(partial: PartialFile) -> Callable[[threading.Event], None]:
    return lambda _: partial.close()
