"""The routes of stored responses, which inference makes, and of streams that go on on another connection than that of
their request."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from aiohttp import web

from modelrunner import wire
from modelrunner.api.documented import Count, documented
from modelrunner.api.messages import json_response, page_of, query_count, query_flag
from modelrunner.api.middleware import owner_of
from modelrunner.api.streaming import stream_events
from modelrunner.errors import BadRequest
from modelrunner.gateway.dialects.answershapes import ResponseAnswer
from modelrunner.gateway.interceptors.resumable_streams import ResumableStreams
from modelrunner.gateway.response_store import ResponseStore

_MOST_ITEMS = 100
_STREAMED = {
    "stream": bool,
    "starting_after": Count,
    "include": str,
    "include[]": str,
    "include_obfuscation": bool,
}
_PAGED = {"limit": Count, "after": str, "order": Literal["asc", "desc"]}


async def _one(event: bytes) -> AsyncGenerator[bytes, None]:
    yield event


class ResponseRoutes:
    """Only the API key that made a response, and the daemon's owner, can see it."""

    def __init__(self, responses: ResponseStore) -> None:
        self._responses = responses

    def routes(self) -> list[web.RouteDef]:
        return [
            route
            for path in ("/v1/responses/{id}", "/engines/v1/responses/{id}")
            for route in (
                web.get(path, self.get),
                web.delete(path, self.delete),
                web.post(f"{path}/cancel", self.cancel),
                web.get(f"{path}/input_items", self.input_items),
            )
        ]

    @documented({"application/json": ResponseAnswer, "text/event-stream": Any}, query=_STREAMED)
    async def get(self, request: web.Request) -> web.StreamResponse:
        """Shows a stored response. With `stream` it sends the events after the one with the number `starting_after`, of
        a response that is streamed in the background; of one that has ended its last event."""
        id, streamed = request.match_info["id"], query_flag(request, "stream")
        background = self._responses.running.get(id)
        stored = await self._responses.get(id, owner_of(request))
        if not streamed:
            return json_response(stored.response)
        after = query_count(request, "starting_after")
        after = -1 if after is None else after
        if background is not None and background.streams:
            return await stream_events(request, background.follow(after), bytes)
        status = stored.response.get("status")
        if status in ("queued", "in_progress"):
            raise BadRequest("this response was not begun with `stream`: leave `stream` out", param="stream")
        kind = f"response.{'failed' if status == 'cancelled' else status}"
        last = msgspec.json.encode({"type": kind, "sequence_number": after + 1, "response": stored.response})
        return await stream_events(request, _one(b"event: %b\ndata: %b\n\n" % (kind.encode(), last)), bytes)

    @documented(wire.DeletedObject)
    async def delete(self, request: web.Request) -> web.Response:
        """Removes a stored response, and ends its work in the background."""
        id = request.match_info["id"]
        await self._responses.delete(id, owner_of(request))
        return json_response(wire.DeletedObject(id, "response"))

    @documented(ResponseAnswer)
    async def cancel(self, request: web.Request) -> web.Response:
        """Ends the work of a response in the background."""
        stored = await self._responses.get(request.match_info["id"], owner_of(request))
        if not stored.response["background"]:
            raise BadRequest("only a response in the background can be cancelled", param="response_id")
        return json_response((await self._responses.cancel(stored.id, owner_of(request))).response)

    @documented(wire.ListPage[dict[str, Any]], query={**_PAGED, "include": str, "include[]": str})
    async def input_items(self, request: web.Request) -> web.Response:
        """Lists the items of the response's request, the newest first unless `order` is asc. An item's ID ends with its
        index."""
        stored = await self._responses.get(request.match_info["id"], owner_of(request))
        ids = [f"{stored.id}_{place}" for place in range(len(stored.input))]
        items = [(id, item | {"id": id}) for id, item in zip(ids, stored.input, strict=True)]
        if request.query.get("order") != "asc":
            items.reverse()
        return page_of(request, items, usual=20, most=_MOST_ITEMS)


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
