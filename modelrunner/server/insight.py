"""What goes on and why: the feed of events, why a model waits, and whether one would fit."""

import asyncio
import contextlib
import shutil
from contextlib import aclosing

import msgspec
from aiohttp import web

from modelrunner import api
from modelrunner.errors import BackendUnavailable, BadRequest, ModelNotFound, ModelRunnerError, Unavailable
from modelrunner.pull import Preview, Puller
from modelrunner.scheduler import Scheduler, Target
from modelrunner.server.configurations import NOTHING_POSTED
from modelrunner.server.messages import json_response, reference_in_path
from modelrunner.server.resolve import Resolver, main_mode
from modelrunner.store import Store
from modelrunner.types import Mode

_ALIVE = 15.0  # seconds of silence after which a feed says that it is there
_LONGEST_ID = 18


class InsightRoutes:
    def __init__(self, store: Store, resolver: Resolver, scheduler: Scheduler, puller: Puller) -> None:
        self._store = store
        self._resolver = resolver
        self._scheduler = scheduler
        self._puller = puller

    def routes(self) -> list[web.RouteDef]:
        """To be added before the other routes of models, which take what follows `/models/` for a reference."""
        return [
            web.get("/engines/events", self.events),
            web.get("/engines/why", self.why),
            web.get("/models/{ref:.+}/fit", self.fit),
        ]

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) from now on; from
        `Last-Event-ID` or `?since=ID` on where one is given, 0 for all that are kept; with `?model=` of one model."""
        after = _event_id(request)
        names = self._names(request.query["model"]) if "model" in request.query else None
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        async with aclosing(self._scheduler.events.subscribe(after, idle=_ALIVE)) as feed:
            async for event in feed:
                if event is None:
                    await response.write(b": alive\n\n")
                elif names is None or event.model in names:
                    await response.write(_sent(event))
        await response.write_eof()
        return response

    async def why(self, request: web.Request) -> web.Response:
        """`?model=`, and `?mode=` for another mode than the model's main one."""
        reference = request.query.get("model", "")
        if not reference:
            raise BadRequest("say which model: ?model=REF", param="model")
        try:
            target = await self._target(reference, request.query.get("mode"))
        except ModelNotFound:
            if (pull := self._puller.under_way(reference)) is None:
                raise
            reason = f"{reference} is being pulled: {pull.message}"
            return json_response(self._scheduler.insight.absent(reference, "pulling", "pull", reason))
        except (BackendUnavailable, Unavailable) as error:
            state = "installing" if isinstance(error, Unavailable) else "failed"
            return json_response(self._scheduler.insight.absent(reference, state, "install", error.message))
        return json_response(await self._scheduler.insight.why(target))

    async def fit(self, request: web.Request) -> web.Response:
        """A model that is not here is estimated from its header, if its source lets a part of the file be read; else
        by the size of its files, which is said."""
        reference = reference_in_path(request, "/models/").removesuffix("/fit")
        free = await asyncio.to_thread(lambda: shutil.disk_usage(self._store.data).free)
        try:
            found = await self._scheduler.insight.fit(await self._target(reference, None))
            size = 0
        except ModelNotFound:
            preview = await self._puller.preview(reference)
            found, size = await self._fit_unseen(reference, preview), preview.size
        return json_response(msgspec.structs.replace(found, disk=api.Disk(size, free)))

    async def _fit_unseen(self, reference: str, preview: Preview) -> api.Fit:
        if preview.bundle is not None:
            with contextlib.suppress(ModelRunnerError):  # no engine for it is installed
                bundle, mode = preview.bundle, main_mode(preview.bundle)
                backend = await asyncio.to_thread(self._resolver.backend_of, None, bundle, mode)
                target = self._resolver.target(backend, bundle, mode, NOTHING_POSTED)
                return await self._scheduler.insight.fit(target)
        found = self._scheduler.insight.fit_bytes(reference, preview.size)
        told = f"{found.reason}. This counts the files alone: a context needs more, which is known once it is pulled"
        return msgspec.structs.replace(found, reason=told)

    async def _target(self, reference: str, mode: str | None) -> Target:
        if mode is not None and mode not in list(Mode):
            raise BadRequest(f"there is no mode {mode!r}: {', '.join(Mode)}", param="mode")
        bundle = await asyncio.to_thread(self._store.bundle, reference)
        wanted = Mode(mode) if mode else main_mode(bundle)
        await self._resolver.prepare(None, reference, wanted)
        return self._resolver(None, reference, wanted)

    def _names(self, reference: str) -> set[str]:
        model = self._store.get(reference)
        return {model.id, *model.tags}


def _event_id(request: web.Request) -> int | None:
    given = request.headers.get("Last-Event-ID") or request.query.get("since")
    if given is None:
        return None
    if not given.isascii() or not given.isdecimal() or len(given) > _LONGEST_ID:
        raise BadRequest(f"{given!r} is no ID of an event: give the last one that was seen, or 0", param="since")
    return int(given)


def _sent(event: api.Event) -> bytes:
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (event.id, event.event.encode(), msgspec.json.encode(event))
