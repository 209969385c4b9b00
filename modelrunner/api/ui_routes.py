"""The page for browsers. Its files hold no data, so they need no API key; the requests that the page sends need one."""

from collections.abc import Mapping
from types import MappingProxyType

from aiohttp import web

from modelrunner.api.documented import documented
from modelrunner.errors import RouteNotFound
from modelrunner.ui.staticfiles import DOCS, DOCS_POLICY, HEADERS, PAGE, StaticFile, read

_PIECE = 32 << 10  # bytes: the next piece waits until the client has room, so a client that does not read holds two


class UiRoutes:
    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self.root),
            web.get("/ui", self.page),
            web.get("/docs", self.docs),
            web.get("/ui/{name}", self.file),
        ]

    @documented({"text/plain": str, "text/html": str})
    async def root(self, request: web.Request) -> web.StreamResponse:
        """Answers a browser with the page, programs with a line of text."""
        if "text/html" in request.headers.get("Accept", ""):
            return await self.page(request)
        return web.Response(text="modelrunner is running\n", headers={"Vary": "Accept"})

    @documented({"text/html": str})
    async def page(self, request: web.Request) -> web.StreamResponse:
        """Sends the page for browsers."""
        return await self._answer(request, read(PAGE))

    @documented({"text/html": str})
    async def docs(self, request: web.Request) -> web.StreamResponse:
        """Sends a page that shows this document, and tries its routes."""
        return await self._answer(request, read(DOCS), {"Content-Security-Policy": DOCS_POLICY})

    @documented({"text/css": str, "text/html": str, "text/javascript": str, "image/svg+xml": str})
    async def file(self, request: web.Request) -> web.StreamResponse:
        """Sends a file of these pages."""
        return await self._answer(request, read(request.match_info["name"]))

    async def _answer(
        self, request: web.Request, file: StaticFile | None, own: Mapping[str, str] = MappingProxyType({})
    ) -> web.StreamResponse:
        if file is None:
            raise RouteNotFound(f"the page has no file {request.path}")
        packed = "gzip" in request.headers.get("Accept-Encoding", "")
        etag = file.gzip_etag if packed else file.etag
        headers = {**HEADERS, **own, "ETag": etag, "Vary": "Accept, Accept-Encoding"}
        if etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        headers["Content-Type"] = file.content_type
        if packed:
            headers["Content-Encoding"] = "gzip"
        body = file.gzip if packed else file.plain
        response = web.StreamResponse(headers=headers)
        response.content_length = len(body)
        await response.prepare(request)
        for at in range(0, len(body) if request.method == "GET" else 0, _PIECE):
            await response.write(body[at : at + _PIECE])
        return response
