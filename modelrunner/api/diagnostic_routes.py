"""The feed of events, the reason why a model waits, and whether a model would fit."""

from typing import Annotated, Any

import msgspec
from aiohttp import web

from modelrunner import wire
from modelrunner.api import wireforms
from modelrunner.api.documented import documented
from modelrunner.api.messages import json_response, reference_in_path
from modelrunner.api.middleware import check_scope
from modelrunner.api.reach import Reach
from modelrunner.api.streaming import ALIVE, stream_events
from modelrunner.errors import BadRequest, InvalidReference, ModelNotFound
from modelrunner.keys.ring import Scope
from modelrunner.models.explain import Explainer
from modelrunner.models.library import Library
from modelrunner.scheduler import EventRecord
from modelrunner.scheduler.events import Events

_LONGEST_ID = 18
EventId = Annotated[int, msgspec.Meta(ge=0, lt=10**_LONGEST_ID)]


class DiagnosticRoutes:
    def __init__(self, library: Library, explainer: Explainer, events: Events) -> None:
        self._library = library
        self._reach = Reach(library)
        self._explainer = explainer
        self._events = events

    def routes(self) -> list[web.RouteDef]:
        """Returns the routes, which must come before the other routes of models: there all text after `/models/` is a
        reference."""
        return [
            web.get("/engines/events", self.events),
            web.get("/engines/why", self.why),
            web.get("/models/{ref:.+}/fit", self.fit),
        ]

    @documented({"text/event-stream": Any}, query={"model": str, "since": EventId}, errors=(422,))
    async def events(self, request: web.Request) -> web.StreamResponse:
        """Sends events from now on, or the events after `Last-Event-ID` or `?since=ID`; 0 means all kept events.
        `?model=` selects the events of one model."""
        after = _event_id(request)
        names = self._names(request.query["model"]) if "model" in request.query else None
        return await stream_events(
            request,
            self._events.subscribe(after, idle=ALIVE),
            lambda event: _sent(event) if names is None or event.model in names else b"",
        )

    @documented(wire.WhyResponse, query={"model": str, "mode": str}, errors=(412, 421, 422))
    async def why(self, request: web.Request) -> web.Response:
        """Explains why requests of `?model=` wait, in its main mode or in the mode `?mode=`."""
        reference = request.query.get("model", "")
        if not reference:
            raise BadRequest("name the model: ?model=REF", param="model")
        explanation = await self._explainer.why(self._library.aliases.meant(reference), request.query.get("mode"))
        return json_response(wireforms.why(explanation))

    @documented(wire.Fit, errors=(412, 421, 422, 501, 502, 504))
    async def fit(self, request: web.Request) -> web.Response:
        """Tells whether a model would get its memory. A model that is not here is estimated from its header, or from
        the size of its files; a key needs the scope `models` for it."""
        reference = self._library.aliases.meant(reference_in_path(request, "/models/").removesuffix("/fit"))
        self._reach.check(request, reference)
        try:
            self._library.get(reference)
        except (ModelNotFound, InvalidReference):
            check_scope(request, Scope.MODELS)
        return json_response(self._reach.of_fit(request, wireforms.fit(await self._explainer.fit(reference))))

    def _names(self, reference: str) -> set[str]:
        model = self._library.get(reference)
        return {model.id, *model.tags}


def _event_id(request: web.Request) -> int | None:
    id = request.headers.get("Last-Event-ID") or request.query.get("since")
    if id is None:
        return None
    if not id.isascii() or not id.isdecimal() or len(id) > _LONGEST_ID:
        raise BadRequest(f"{id!r} is not the ID of an event: send the last ID that you saw, or 0", param="since")
    return int(id)


def _sent(record: EventRecord) -> bytes:
    data = msgspec.json.encode(wireforms.event(record))
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (record.id, record.event.encode(), data)
