"""Metrics, the last requests, and usage."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import msgspec
from aiohttp import web

from modelrunner import wire
from modelrunner.api import wireforms
from modelrunner.api.board import Board
from modelrunner.api.documented import Count, documented
from modelrunner.api.messages import json_response, query_count
from modelrunner.api.middleware import is_admin, owner_of
from modelrunner.api.streaming import ALIVE, stream_events
from modelrunner.errors import BadRequest
from modelrunner.gateway.request.observers import RequestRecord
from modelrunner.telemetry.recent import RequestFilter
from modelrunner.telemetry.recordings import Recordings
from modelrunner.telemetry.telemetry import Telemetry
from modelrunner.telemetry.usage import Grouping
from modelrunner.units import parse_age

_LONGEST = 36500 * 86400.0  # seconds: longer than the records of any daemon
_GROUPINGS = {grouping.name.lower(): grouping for grouping in Grouping}


class TelemetryRoutes:
    def __init__(
        self, telemetry: Telemetry, recordings: Recordings, board: Board, machine: Callable[[], wire.MachineHour]
    ) -> None:
        self._telemetry = telemetry
        self._machine = machine
        self._recordings = recordings
        self._board = board

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/metrics", self.metrics),
            web.get("/engines/now", self.now),
            web.get("/engines/history", self.history),
            web.get("/engines/machine", self.machine),
            web.get("/engines/requests", self.requests),
            web.get("/engines/requests/{id}", self.recorded),
            web.post("/engines/requests/{id}/cancel", self.cancel),
            web.get("/usage", self.usage),
        ]

    @documented({"text/plain": str, "application/openmetrics-text": str})
    async def metrics(self, request: web.Request) -> web.Response:
        """Sends counts for Prometheus."""
        body, content_type = await self._telemetry.metrics(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    @documented({"application/json": wire.Now, "text/event-stream": Any}, query={})
    async def now(self, request: web.Request) -> web.StreamResponse:
        """Shows runners, memory, and the requests that wait or are under way. A client that accepts `text/event-stream`
        gets server-sent events: `now` with the whole state after each change, `events` and `requests` with the new
        ones, `history` with each complete step."""
        if "text/event-stream" in request.headers.get("Accept", ""):
            return await stream_events(request, self._board.watch(), lambda frame: frame)
        return json_response(self._board.now())

    @documented(list[wire.HistoryStep], query={})
    async def history(self, request: web.Request) -> web.Response:
        """Shows throughput and latency of the last hour, in steps of ten seconds. Steps without requests are left
        out."""
        return json_response(self._telemetry.history())

    @documented(wire.MachineHour, query={})
    async def machine(self, request: web.Request) -> web.Response:
        """Shows processor, memory and devices of this machine in the last hour, in steps of ten seconds."""
        return json_response(self._machine())

    @documented(
        {"application/json": list[wire.RequestStatus], "text/event-stream": Any},
        query={"model": str, "status": Count, "limit": Count},
    )
    async def requests(self, request: web.Request) -> web.StreamResponse:
        """Lists the requests under way, then the last 1,000 or `?limit=N`, the newest first. `?model=` selects the
        requests for one model (by the client's name for it, or by its own), `?status=` those that ended with this
        status. A client that accepts `text/event-stream` gets the requests from now on as server-sent events."""
        wanted = RequestFilter(request.query.get("model"), query_count(request, "status"))
        limit = query_count(request, "limit")
        if "text/event-stream" in request.headers.get("Accept", ""):
            return await stream_events(request, self._telemetry.follow(wanted, ALIVE), _sent)
        return json_response([wireforms.request(record) for record in self._telemetry.requests(wanted, limit)])

    @documented(wire.RecordedRequest, query={})
    async def recorded(self, request: web.Request) -> web.Response:
        """Shows a recorded request with its body and its answer, without keys and files. An API key sees its own
        requests; a key with the scope `admin` sees all."""
        owner = None if is_admin(request) else owner_of(request)
        return json_response(wireforms.recorded(self._recordings.find(request.match_info["id"], owner)))

    @documented(wire.Cancelled)
    async def cancel(self, request: web.Request) -> web.Response:
        """Ends a request under way; its client gets a 503 or, in a stream, an error event."""
        self._telemetry.cancel(request.match_info["id"])
        return json_response(wire.Cancelled(request.match_info["id"]))

    @documented(list[wire.UsageTotals], query={"by": Literal["model", "key", "day"], "since": str})
    async def usage(self, request: web.Request) -> web.Response:
        """Shows sums by model, or `?by=` key or day, for the last 30 days or for `?since=` (`7d`, `12h`)."""
        by = request.query.get("by", "model")
        if by not in _GROUPINGS:
            raise BadRequest(f"usage is summed by {', '.join(_GROUPINGS)}, not by {by!r}", param="by")
        seconds = min(parse_age(request.query.get("since", "30d")), _LONGEST)
        return json_response(await self._telemetry.usage(_GROUPINGS[by], timedelta(seconds=seconds)))


def _sent(record: RequestRecord) -> bytes:
    return b"event: request\ndata: %b\n\n" % msgspec.json.encode(wireforms.request(record))
