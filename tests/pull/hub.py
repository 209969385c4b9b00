"""A small Hugging Face hub: the routes that a download takes, with faults on demand.

The files lie on a second server, as the real hub's lie on a CDN: `resolve` answers with the file's metadata and a
redirect there.
"""

import asyncio
import contextlib
import functools
import hashlib
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from aiohttp import web

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_PIECE = 64 << 10
_SMALL = (".json", ".txt", ".py", ".md")


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one request for a file's content. `status` answers nothing else; `cut` closes the connection
    after so many bytes; `flip` changes the byte at that place of the file; `shift` begins so many bytes too late;
    `whole` ignores the Range header; `hold` waits for the event after half of the content. `short` leaves out the last
    bytes and says so; `trickle` sends a byte now and then after the first piece; `chunked` says nothing of a length."""

    status: int | None = None
    retry_after: str | None = None
    cut: int | None = None
    flip: int | None = None
    shift: int = 0
    whole: bool = False
    hold: asyncio.Event | None = None
    short: int = 0
    trickle: bool = False
    chunked: bool = False


@dataclass(slots=True)
class Repository:
    """`declared` replaces the size that the hub gives for a file; `tags` are the hub's words about it. `branches` are
    other revisions, by their names."""

    files: dict[str, bytes]
    token: str | None = None
    gated: bool = False
    declared: dict[str, int] = field(default_factory=dict)
    branches: dict[str, "Repository"] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted((n, sha256(d)) for n, d in self.files.items())).encode()).hexdigest()


@functools.lru_cache
def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    """`contents` logs the requests for files' contents as (headers, bytes sent); `faults` are used up one for each.
    `status` answers every request for metadata, `listing` those for a list of files. `knows_blobs`: the list has sizes
    and digests. `held` is set when a fault begins to hold. `most_at_once` counts contents that are sent at a time."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: deque[Fault] = deque()
        self.status: int | None = None
        self.listing: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        self.knows_blobs = True
        self.lookups: list[Mapping[str, str]] = []
        self.contents: list[_Content] = []
        self.held = asyncio.Event()
        self.at_once = self.most_at_once = 0
        self.endpoint = self._cdn = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Hub"]:
        hub, cdn = web.Application(), web.Application()
        hub.router.add_get("/api/models", self._search)
        hub.router.add_get("/api/models/{repository:[^/]+/[^/]+}", self._info)
        hub.router.add_get("/api/models/{repository:[^/]+/[^/]+}/revision/{revision}", self._info)
        hub.router.add_get("/{repository:[^/]+/[^/]+}/resolve/{revision}/{path:.+}", self._resolve)
        cdn.router.add_get("/{digest}", self._content, allow_head=False)
        async with serving(hub) as self.endpoint, serving(cdn) as self._cdn:
            yield self

    @property
    def sent(self) -> int:
        """Bytes of files' contents."""
        return sum(content.sent for content in self.contents)

    def _repository(self, request: web.Request) -> Repository:
        self.lookups.append(request.headers)
        if self.status is not None:
            raise _status(self.status)
        found = self.repositories.get(request.match_info["repository"])
        if found is None:
            raise web.HTTPNotFound(headers={"X-Error-Code": "RepoNotFound"})
        if found.token is not None and request.headers.get("Authorization") != f"Bearer {found.token}":
            code = "GatedRepo" if found.gated else "RepoNotFound"
            raise web.HTTPUnauthorized(headers={"X-Error-Code": code})
        revisions = {"main": found, found.commit: found}
        for name, other in found.branches.items():
            revisions |= {name: other, other.commit: other}
        revision = request.match_info.get("revision", "main")
        if revision not in revisions:
            raise web.HTTPNotFound(headers={"X-Error-Code": "RevisionNotFound"})
        return revisions[revision]

    async def _search(self, request: web.Request) -> web.StreamResponse:
        """As https://huggingface.co/docs/hub/api has it."""
        self.lookups.append(request.headers)
        if self.status is not None:
            raise _status(self.status)
        word, kind = request.query["search"].lower(), request.query["filter"]
        found = [
            {"id": name, "downloads": 1200, "likes": 3, "pipeline_tag": "text-generation", "gated": "manual"}
            | ({"siblings": [{"rfilename": path} for path in repository.files]} if "full" in request.query else {})
            for name, repository in self.repositories.items()
            if word in name.lower() and any(path.endswith(kind) for path in repository.files)
        ]
        return web.json_response([*found, {"id": "\x1b[2Jodd"}][: int(request.query["limit"])])

    async def _info(self, request: web.Request) -> web.StreamResponse:
        repository, name = self._repository(request), request.match_info["repository"]
        if self.listing is not None:
            return await self.listing(request)
        siblings = [self._sibling(repository, path) for path in repository.files]
        told = {"id": name, "sha": repository.commit, "siblings": siblings, "tags": repository.tags}
        return web.json_response(told)

    def _sibling(self, repository: Repository, path: str) -> dict[str, object]:
        if not self.knows_blobs:
            return {"rfilename": path}
        data = repository.files[path]
        size = repository.declared.get(path, len(data))
        large = {} if path.endswith(_SMALL) else {"lfs": {"sha256": sha256(data), "size": size, "pointerSize": 134}}
        return {"rfilename": path, "size": size, "blobId": git_blob(data), **large}

    async def _resolve(self, request: web.Request) -> web.Response:
        repository, path = self._repository(request), request.match_info["path"]
        data = repository.files[path]
        headers = {
            "X-Repo-Commit": repository.commit,
            "X-Linked-Size": str(repository.declared.get(path, len(data))),
            "X-Linked-ETag": f'"{sha256(data)}"',
            "ETag": f'"{sha256(data)}"',
            "Location": f"{self._cdn}/{sha256(data)}",
        }
        if path.endswith(_SMALL):  # kept in git, which has no sha256 of it
            headers["ETag"] = headers["X-Linked-ETag"] = f'"{git_blob(data)}"'
        return web.Response(status=302, headers=headers)

    async def _content(self, request: web.Request) -> web.StreamResponse:
        fault = self.faults.popleft() if self.faults else Fault()
        self.contents.append(content := _Content(request.headers, request.match_info["digest"]))
        if fault.status is not None:
            raise _status(fault.status, fault.retry_after)
        data = next(
            data
            for main in self.repositories.values()
            for repository in (main, *main.branches.values())
            for data in repository.files.values()
            if sha256(data) == request.match_info["digest"]
        )
        data = data[: len(data) - fault.short]
        match = None if fault.whole else _RANGE.fullmatch(request.headers.get("Range", ""))
        start = int(match[1]) + fault.shift if match else 0
        end = min(int(match[2] or len(data) - 1) + 1, len(data)) if match else len(data)
        if match and start >= len(data):
            raise _status(416)
        response = web.StreamResponse(status=206 if match else 200)
        if match:
            response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        if fault.flip is not None:
            data = data[: fault.flip] + bytes([data[fault.flip] ^ 1]) + data[fault.flip + 1 :]
        body = data[start:end]
        if fault.chunked:
            response.enable_chunked_encoding()
        else:
            response.content_length = len(body)
        await response.prepare(request)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self._send(request, response, body, fault, content)
        finally:
            self.at_once -= 1
        return response

    async def _send(
        self, request: web.Request, response: web.StreamResponse, body: bytes, fault: Fault, content: "_Content"
    ) -> None:
        end = len(body) if fault.cut is None else fault.cut
        for position in range(0, end, _PIECE):
            if fault.hold is not None and position >= end // 2:
                self.held.set()
                await fault.hold.wait()
            piece = body[position : min(position + _PIECE, end)]
            await response.write(piece)
            content.sent += len(piece)
            while fault.trickle:
                await asyncio.sleep(0.01)
                await response.write(b"x")
        if fault.cut is not None and request.transport is not None:
            request.transport.close()  # after what is buffered, unlike abort()


@dataclass(slots=True)
class _Content:
    headers: Mapping[str, str]
    digest: str
    sent: int = 0


def _status(status: int, retry_after: str | None = None) -> web.HTTPException:
    error = web.HTTPException(headers={"Retry-After": retry_after} if retry_after else None)
    error.set_status(status)
    return error


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
