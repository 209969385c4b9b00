"""Brings one file into a repository (distribution specification, "Pushing blobs"). A file that the repository has is
not sent; a file of another repository of the registry is mounted; any other is sent in chunks. After a cut chunk the
upload continues where the registry kept the bytes; otherwise the file is sent from its beginning."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from modelrunner.concurrency.threads import in_thread
from modelrunner.durable import open_regular
from modelrunner.errors import SourceFailed
from modelrunner.oci.repository import RemoteRepository
from modelrunner.store.manifests import StoredFile
from modelrunner.web.session import HubAnswer, explain

_PIECE = 1 << 20
_ATTEMPTS = 5
_LARGEST_CHUNK = 1 << 30
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]{1,18})")


class _ChunkFailed(Exception):
    """The registry did not take the chunk; it may take it later."""


class Upload:
    """Uploads the file at `path`. `sources` are other repositories of the same registry that may have it. `advanced`
    gets the number of bytes that the registry has."""

    def __init__(
        self,
        repository: RemoteRepository,
        file: StoredFile,
        path: Path,
        sources: Sequence[str],
        advanced: Callable[[int], None],
    ) -> None:
        self._repository, self._file, self._path = repository, file, path
        self._sources, self._advanced = sources, advanced
        self._chunk = repository.manner.chunk

    async def run(self) -> bool:
        """Returns whether bytes had to be sent. Raises `SourceFailed`, and `OSError` for the file."""
        there = await self._repository.request("HEAD", self._repository.url(f"blobs/{self._file.digest}"), {})
        if there.status == 200 or not (place := await self._begin()):
            self._advanced(self._file.size)
            return False
        await self._send(place)
        self._advanced(self._file.size)
        return True

    async def _begin(self) -> str | None:
        """Returns the address to send the file to; None if the file was mounted."""
        uploads = self._repository.url("blobs/uploads/")
        for source in self._sources:
            answer = await self._repository.request("POST", f"{uploads}?mount={self._file.digest}&from={source}", {})
            if answer.status == 201:
                return None
            if answer.status == 202:
                return self._place(answer, uploads)
        answer = await self._repository.request("POST", uploads, {})
        self._repository.require(answer, 202, self._repository.path)
        least = answer.headers.get("oci-chunk-min-length", "")
        if re.fullmatch("[0-9]{1,12}", least):
            self._chunk = min(max(self._chunk, int(least)), _LARGEST_CHUNK)
        return self._place(answer, uploads)

    async def _send(self, place: str) -> None:
        import httpx

        size = self._file.size
        offset = furthest = failures = 0
        while True:
            try:
                if self._sends_chunks:
                    while offset < size:
                        place, offset = await self._patch(place, offset)
                await self._finish(place, offset)
                return
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, _ChunkFailed) as error:
                failures = 0 if offset > furthest else failures + 1
                furthest = max(furthest, offset)
                if failures >= _ATTEMPTS:
                    host = self._repository.endpoint.host
                    why = str(error) if isinstance(error, _ChunkFailed) else explain(error, place)
                    raise SourceFailed(f"a file could not be sent to {host}: {why}; push again later") from error
                await self._repository.manner.pause(2.0 ** max(0, failures - 1))
                place, offset = await self._resumed(place)

    async def _patch(self, place: str, offset: int) -> tuple[str, int]:
        """Sends the next chunk. Returns the address for the chunk after it, and its offset."""
        end = min(offset + self._chunk, self._file.size)
        answer = await self._exchange("PATCH", place, offset, end, {"Content-Range": f"{offset}-{end - 1}"})
        if answer.status != 202:
            raise _ChunkFailed(f"it answered {answer.status}")
        return self._place(answer, place), end

    async def _finish(self, place: str, offset: int) -> None:
        """Ends the upload, and sends the remaining bytes along."""
        import httpx

        url = str(httpx.URL(place).copy_merge_params({"digest": str(self._file.digest)}))
        answer = await self._exchange("PUT", url, offset, self._file.size, {})
        if answer.status == 400:
            raise SourceFailed(
                f"{self._repository.endpoint.host} refuses a file: if `modelrunner verify` finds it damaged, pull again"
            )
        if answer.status != 201:
            raise _ChunkFailed(f"it answered {answer.status}")

    async def _resumed(self, place: str) -> tuple[str, int]:
        """Returns the address and the offset to continue at; begins a new upload if the registry has lost the old
        one."""
        import httpx

        with contextlib.suppress(httpx.InvalidURL, SourceFailed):
            answer = await self._exchange("GET", place, 0, 0, {})
            match = _RANGE.fullmatch(answer.headers.get("range", ""))
            # The range "0-0" may mean one byte or none.
            if answer.status == 204 and match and 0 < int(match[1]) < self._file.size - 1 and self._sends_chunks:
                return self._place(answer, place), int(match[1]) + 1
        uploads = self._repository.url("blobs/uploads/")
        answer = await self._repository.request("POST", uploads, {})
        self._repository.require(answer, 202, self._repository.path)
        return self._place(answer, uploads), 0

    @property
    def _sends_chunks(self) -> bool:
        return self._file.size > self._chunk

    async def _exchange(self, method: str, url: str, offset: int, end: int, headers: Mapping[str, str]) -> HubAnswer:
        """Sends one request with a part of the file, and returns the answer. Raises `SourceFailed` for a failure that
        another attempt would repeat."""
        repository = self._repository
        fields = {"Content-Type": "application/octet-stream", "Content-Length": str(end - offset), **headers}
        answer = await self._ask(method, url, offset, end, fields | repository.authorization_for(url))
        if answer.status == 401 and await repository.renew(url, answer.headers) is not None:
            answer = await self._ask(method, url, offset, end, fields | repository.authorization_for(url))
        if answer.status in (401, 403, 405, 413):
            repository.require(answer, 0, repository.path)
        return answer

    async def _ask(self, method: str, url: str, offset: int, end: int, headers: Mapping[str, str]) -> HubAnswer:
        loop, patience = asyncio.get_running_loop(), self._repository.manner.patience
        try:
            async with asyncio.timeout(patience) as deadline:

                def sent(position: int) -> None:
                    deadline.reschedule(loop.time() + patience)
                    self._advanced(position)

                content = self._pieces(offset, end, sent) if end > offset else None
                async with self._repository.client.stream(
                    method, url, headers=headers, content=content, follow_redirects=False
                ) as response:
                    lowered = {name.lower(): value for name, value in response.headers.items()}
                    return HubAnswer(response.status_code, str(response.url), lowered, b"")
        except TimeoutError:
            raise _ChunkFailed(f"it took less than {_PIECE >> 20} MiB in {patience:.0f} s") from None

    async def _pieces(self, offset: int, end: int, sent: Callable[[int], None]) -> AsyncIterator[bytes]:
        with open_regular(self._path) as file:
            while offset < end:
                piece = await in_thread(
                    lambda _, at=offset: os.pread(file.fileno(), min(_PIECE, end - at), at)  # type: ignore[misc]
                )
                if not piece:
                    raise SourceFailed("a file of the model became shorter: `modelrunner verify` says more")
                yield piece
                offset += len(piece)
                sent(offset)

    def _place(self, answer: HubAnswer, base: str) -> str:
        """Returns the address that an answer names for the next request."""
        import httpx

        try:
            return str(httpx.URL(base).join(answer.headers.get("location", "")))
        except (httpx.InvalidURL, ValueError):
            host = self._repository.endpoint.host
            raise SourceFailed(f"{host} names an invalid address for uploads") from None
