"""The page for browsers. Its files hold no data, so they need no API key; all that they ask the daemon for does."""

from aiohttp import web

from modelrunner.errors import RouteNotFound
from modelrunner.ui.files import HEADERS, PAGE, StaticFile, read


class UiRoutes:
    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self.root),
            web.get("/ui", self.page),
            web.get("/ui/{name}", self.file),
        ]

    async def root(self, request: web.Request) -> web.Response:
        """The page for a browser; a line of text for programs."""
        if "text/html" in request.headers.get("Accept", ""):
            return await self.page(request)
        return web.Response(text="modelrunner is running\n", headers={"Vary": "Accept"})

    async def page(self, request: web.Request) -> web.Response:
        return self._answer(request, read(PAGE))

    async def file(self, request: web.Request) -> web.Response:
        return self._answer(request, read(request.match_info["name"]))

    def _answer(self, request: web.Request, found: StaticFile | None) -> web.Response:
        if found is None:
            raise RouteNotFound(f"the page has no file {request.path}")
        packed = "gzip" in request.headers.get("Accept-Encoding", "")
        etag = found.gzip_etag if packed else found.etag
        headers = HEADERS | {"ETag": etag, "Vary": "Accept, Accept-Encoding"}
        if etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        headers["Content-Type"] = found.content_type
        if packed:
            headers["Content-Encoding"] = "gzip"
        return web.Response(body=found.gzip if packed else found.plain, headers=headers)
