"""The routes of a stream that continues on another connection than that of its request."""

from contextlib import aclosing
from typing import Any

from aiohttp import web

from modelrunner import wire
from modelrunner.api.documented import Count, documented
from modelrunner.api.messages import json_response, query_count
from modelrunner.api.middleware import owner_of
from modelrunner.gateway.interceptors.resumable_streams import ResumableStreams


class StreamRoutes:
    def __init__(self, streams: ResumableStreams) -> None:
        self._streams = streams

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/streams/{id}", self.get, allow_head=False),  # a look takes the stream over
            web.delete("/v1/streams/{id}", self.delete),
        ]

    @documented({"text/event-stream": Any, "application/x-ndjson": str}, query={"from": Count})
    async def get(self, request: web.Request) -> web.StreamResponse:
        """Sends a stream again, from the byte `from` of its body (0 by default) to its end."""
        place = query_count(request, "from") or 0
        stream = self._streams.find(request.match_info["id"], owner_of(request))
        response = web.StreamResponse()

        async def prepare() -> None:
            if not response.prepared:
                status, headers, _ = stream.head or (200, (), None)
                response.set_status(status)
                response.headers.extend({name.decode(): value.decode() for name, value in headers})
                await response.prepare(request)

        async with aclosing(stream.read(place)) as pieces:
            async for piece in pieces:
                await prepare()
                await response.write(piece)
                place += len(piece)
        await prepare()
        if (not stream.complete or place < stream.end) and request.transport is not None:
            request.transport.abort()  # the stream itself was cut, or a newer connection has it
        await response.write_eof()
        return response

    @documented(wire.Cancelled, query={})
    async def delete(self, request: web.Request) -> web.Response:
        """Ends the work of a stream, and forgets the stream."""
        self._streams.end(request.match_info["id"], owner_of(request))
        return json_response(wire.Cancelled(request.match_info["id"]))
