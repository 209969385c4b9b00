"""Descriptions of handlers: /openapi.json is made from them, and queries and the Unix socket are checked by them. That
document needs no API key, since it holds no data of this machine."""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cached_property, wraps
from inspect import getdoc
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from modelrunner import __version__, wire
from modelrunner.api.messages import check_query
from modelrunner.api.middleware import TRANSPORT
from modelrunner.api.scopes import scope_of
from modelrunner.errors import Forbidden
from modelrunner.gateway.request.pipeline import IS_OPEN
from modelrunner.openapi import Operation, make_document

_Answer = TypeVar("_Answer", bound=web.StreamResponse)
_Handler = Callable[[Any, web.Request], Awaitable[_Answer]]
Count = Annotated[int, Meta(ge=0, lt=10**9)]
"""A parameter that `query_count` reads."""
PROGRESS = {"application/x-ndjson": wire.Progress, "text/plain": str}
"""The answer of `stream_progress`."""


def documented(
    answer: Any = None, *, query: Mapping[str, Any] | None = None, **described: Any
) -> Callable[[_Handler[_Answer]], _Handler[_Answer]]:
    """Describes a handler of a family of routes. `answer`, `query` and the rest are the fields of `Operation`, whose
    text is the docstring. With a `query`, unknown parameters raise `BadRequest`. A handler that is `local` for every
    request is checked before it runs; for a `local` field, it calls `check_local` itself."""

    def wrap(handler: _Handler[_Answer]) -> _Handler[_Answer]:
        operation = Operation(getdoc(handler) or "", answer, query=query or {}, **described)
        if query is None and "" not in described.get("local", ()):
            handler.operation = operation  # type: ignore[attr-defined]
            return handler

        @wraps(handler)
        async def handle(self: Any, request: web.Request) -> _Answer:
            if "" in described.get("local", ()):
                check_local(request)
            if query is not None:
                check_query(request, *query)
            return await handler(self, request)

        handle.operation = operation  # type: ignore[attr-defined]
        return handle

    return wrap


def check_local(request: web.Request, field: str = "") -> None:
    """Called for a request that uses `field`, which its handler declares as `local`. Raises `Forbidden` over TCP."""
    if not request[TRANSPORT].local:
        reason = request.match_info.handler.operation.local[field]  # type: ignore[attr-defined]
        raise Forbidden(f"{reason} only over the Unix socket", param=field or None)


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
    operation = getattr(handler, "operation", None)
    if not isinstance(operation, Operation) or not operation.text:
        raise TypeError(f"{handler} is not documented: modelrunner/api/documented.py")
    return operation
