"""/openapi.json. It needs no API key: nothing in it is this machine's own."""

import re
from collections.abc import Callable, Iterable
from functools import cached_property

import msgspec
from aiohttp import web

from modelrunner import __version__
from modelrunner.api.documented import documented
from modelrunner.api.scopes import scope_of
from modelrunner.gateway.pipeline import IS_OPEN
from modelrunner.openapi import make_document


class DocumentRoutes:
    """`routes` are those of the whole control plane, each with a handler that is `documented`."""

    def __init__(self, all_routes: Callable[[], Iterable[web.RouteDef]]) -> None:
        self._all_routes = all_routes

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/openapi.json", self.document)]

    @documented(dict)
    async def document(self, request: web.Request) -> web.Response:
        """This document."""
        return web.Response(body=self._document, content_type="application/json")

    @cached_property
    def _document(self) -> bytes:
        control = []
        for route in self._all_routes():
            scope = "" if IS_OPEN(re.sub("{.*}", "file", route.path)) else scope_of(route.method, route.path)
            control.append((route.method, route.path, scope, route.handler.operation))  # type: ignore[union-attr]
        return msgspec.json.encode(make_document(control, __version__))
