"""Descriptions of handlers: /openapi.json is made from them, and queries and the Unix socket are checked by them."""

from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from inspect import getdoc
from typing import Annotated, Any, TypeVar

from aiohttp import web
from msgspec import Meta

from modelrunner import wire
from modelrunner.api.messages import check_query
from modelrunner.api.middleware import is_local
from modelrunner.errors import Forbidden
from modelrunner.openapi import Operation

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
    if not is_local(request):
        reason = request.match_info.handler.operation.local[field]  # type: ignore[attr-defined]
        raise Forbidden(f"{reason} only over the Unix socket", param=field or None)
