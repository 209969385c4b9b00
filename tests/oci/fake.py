"""A registry that does as a test says: it serves artifacts, and `answers` come first."""

import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web

from tests.oci.registry import Artifact

Answer = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


@dataclass(slots=True)
class FakeRegistry:
    """`answers` are by a pattern of "METHOD /path"; one that returns None leaves the request to the next. `seen` logs
    method, path with query, and the Authorization header."""

    models: dict[str, Artifact] = field(default_factory=dict)
    answers: list[tuple[str, Answer]] = field(default_factory=list)
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    host: str = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["FakeRegistry"]:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.host = "{}:{}".format(*runner.addresses[0][:2])
            yield self
        finally:
            await runner.cleanup()

    def on(self, pattern: str, answer: Answer) -> None:
        self.answers.append((pattern, answer))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.method, request.path_qs, request.headers.get("Authorization", "")))
        for pattern, answer in self.answers:
            if re.search(pattern, f"{request.method} {request.path}") and (given := await answer(request)) is not None:
                return given
        match = re.fullmatch(r"/v2/(?P<path>.+)/(?P<kind>manifests|blobs)/(?P<name>[^/]+)", request.path)
        model = self.models.get(match["path"]) if match else None
        if match is None or model is None:
            raise web.HTTPNotFound
        if match["kind"] == "manifests":
            return web.Response(body=model.manifest, headers={"Content-Type": model.media_type})
        if match["name"] not in model.blobs:
            raise web.HTTPNotFound
        return _ranged(request, model.blobs[match["name"]])


def _ranged(request: web.Request, data: bytes) -> web.Response:
    if match := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "")):
        start, end = int(match[1]), int(match[2] or len(data) - 1)
        told = {"Content-Range": f"bytes {start}-{end}/{len(data)}"}
        return web.Response(status=206, body=data[start : end + 1], headers=told)
    return web.Response(body=data)


def status(code: int, **headers: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=code, headers={name.replace("_", "-"): value for name, value in headers.items()})

    return answer


def body(data: bytes, code: int = 200, **headers: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=code, body=data, headers=told)

    return answer


def first(answer: Answer, times: int = 1) -> Answer:
    """`answer` for the first requests alone."""
    left = times

    async def once(request: web.Request) -> web.StreamResponse | None:
        nonlocal left
        left -= 1
        return await answer(request) if left >= 0 else None

    return once
