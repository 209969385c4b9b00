"""A small package index (PEP 503 and PEP 691) over a folder of wheels, with faults on demand."""

import asyncio
import contextlib
import hashlib
import re
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web

_JSON = "application/vnd.pypi.simple.v1+json"
_RANGE = re.compile(r"bytes=(\d+)-")


class Index:
    """`kind` is "json" or "html"; `files` the address that links lead to, its own if empty. `digest` replaces every
    sha256; `yanked` is a version. `cuts` are used up by one request each, which breaks off after so many bytes;
    `hold` stops every file halfway until it is set. `ranges` and `authorizations` log the requests for files, and
    `authorizations` those for pages too."""

    def __init__(self, wheels: Path) -> None:
        self._wheels = wheels
        self.kind = "json"
        self.url = self.files = ""
        self.digest: str | None = None
        self.yanked: str | None = None
        self.cuts: deque[int] = deque()
        self.hold: asyncio.Event | None = None
        self.ranges: list[str | None] = []
        self.authorizations: list[str | None] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Index"]:
        app = web.Application()
        app.router.add_get("/simple/{name}/", self._page)
        app.router.add_get("/files/{file}", self._file, allow_head=False)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/simple"
            yield self
        finally:
            await runner.cleanup()

    async def _page(self, request: web.Request) -> web.Response:
        self.authorizations.append(request.headers.get("Authorization"))
        name = request.match_info["name"].replace("-", "_")
        paths = sorted(self._wheels.glob(f"{name}-*.whl"))
        if not paths:
            raise web.HTTPNotFound
        place = self.files.removesuffix("/simple") or ".."
        place = place if place.startswith("file:") else f"{place}{'/..' if place == '..' else ''}/files"
        if self.kind == "json":
            assert _JSON in request.headers["Accept"]
            files = [
                {
                    "filename": path.name,
                    "url": f"{place}/{path.name}",
                    "hashes": {"sha256": self._sha256(path)},
                    "size": path.stat().st_size,
                    "yanked": self.yanked is not None and f"-{self.yanked}-" in path.name,
                }
                for path in paths
            ]
            return web.json_response({"meta": {"api-version": "1.1"}, "files": files}, content_type=_JSON)
        links = [f'<a href="{place}/{p.name}#sha256={self._sha256(p)}">{p.name}</a>' for p in paths]
        return web.Response(text="<!DOCTYPE html>" + "".join(links), content_type="text/html")

    def _sha256(self, path: Path) -> str:
        return self.digest or hashlib.sha256(path.read_bytes()).hexdigest()

    async def _file(self, request: web.Request) -> web.StreamResponse:
        self.authorizations.append(request.headers.get("Authorization"))
        given = request.headers.get("Range")
        data = (self._wheels / request.match_info["file"]).read_bytes()
        if given is not None or self.kind == "json":
            self.ranges.append(given)
        match = _RANGE.fullmatch(given or "")
        start = int(match[1]) if match else 0
        response = web.StreamResponse(status=206 if match else 200)
        if match:
            response.headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = data[start:]
        response.content_length = len(body)
        await response.prepare(request)
        if self.cuts:
            await response.write(body[: self.cuts.popleft()])
            assert request.transport is not None
            request.transport.close()  # after what is buffered
            return response
        await response.write(body[: len(body) // 2])
        if self.hold is not None:
            await self.hold.wait()
        await response.write(body[len(body) // 2 :])
        return response
