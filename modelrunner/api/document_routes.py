"""/openapi.json. It needs no API key, since it holds no data of this machine."""

import re
from collections.abc import Iterable
from functools import cached_property

import msgspec
from aiohttp import web

from modelrunner import __version__
from modelrunner.api.documented import documented
from modelrunner.api.scopes import scope_of
from modelrunner.gateway.request.pipeline import IS_OPEN
from modelrunner.openapi import Operation, make_document


class DocumentRoutes:
    """The routes of the whole control plane: its own and those in `described`. Raises `TypeError` for a route whose
    handler is not `documented`."""

    def __init__(self, described: Iterable[web.RouteDef]) -> None:
        self._routes = [web.get("/openapi.json", self.document), *described]
        self._operations = [(route, _operation(route.handler)) for route in self._routes]

    def routes(self) -> list[web.RouteDef]:
        return self._routes

    @documented(dict)
    async def document(self, request: web.Request) -> web.Response:
        """Sends this document."""
        return web.Response(body=self._document, content_type="application/json")

    @cached_property
    def _document(self) -> bytes:
        control = []
        for route, operation in self._operations:
            scope = "" if IS_OPEN(re.sub("{.*}", "file", route.path)) else scope_of(route.method, route.path)
            control.append((route.method, route.path, scope, operation))
        return msgspec.json.encode(make_document(control, __version__))


def _operation(handler: object) -> Operation:
    found = getattr(handler, "operation", None)
    if not isinstance(found, Operation) or not found.text:
        raise TypeError(f"{handler} is not documented: modelrunner/api/documented.py")
    return found
