"""Streams that outlive their client's connection."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from modelrunner.errors import BadRequest, NotFound
from modelrunner.gateway.calls import Inference, Sink
from modelrunner.gateway.interceptors.forwarded_request import ForwardedRequest
from modelrunner.gateway.interceptors.shared_response import SharedResponse
from modelrunner.gateway.request.exchange import Exchange, Exchanges

LIMIT = 1 << 20
"""The most bytes that are kept of one stream."""
IMAGE_LIMIT = 16 << 20
"""The same of a stream of images: each is one event, which a client that goes on needs from its beginning."""
_PIECE = 1 << 16


class ResumableStream(SharedResponse):
    """A shared response that pauses its engine rather than drop bytes that no client has read. One client reads at a
    time, the newest; `heard` is called when it begins. `limit` is in bytes; `owner` is an `ApiKey.owner`, "" for the
    daemon's owner."""

    def __init__(
        self,
        limit: int,
        owner: str,
        *,
        heard: Callable[[], None],
        unheard: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        super().__init__(limit, unheard=unheard, ended=ended)
        self.owner = owner
        self.limit = limit
        self._heard = heard
        self._changed = asyncio.Event()
        self._reader: object = None  # identifies the newest call of `read`
        self._taken = 0  # bytes of the stream
        self._held = False

    @property
    def end(self) -> int:
        """The size of the stream so far, in bytes."""
        return self.start + len(self.data)

    def pause(self, request: ForwardedRequest) -> None:
        self._requests[request] = self._held = True
        self.work.pause()

    def resume(self, request: ForwardedRequest) -> None:
        self._requests[request] = False
        self._bound()

    def leave(self, request: ForwardedRequest) -> None:
        self._requests.pop(request, None)
        self._bound()
        if not self._requests:
            self._unheard()

    def keep(self, data: bytes) -> None:
        self.data += data
        self._bound()
        self._changed.set()

    async def read(self, place: int) -> AsyncGenerator[bytes, None]:
        """Yields the bytes from `place` on as they come. Raises `BadRequest` for a place beyond the bytes so far,
        `NotFound` for one that is no longer kept."""
        if place > self.end:
            raise BadRequest(f"the stream has {self.end} bytes so far: `from` is beyond them", param="from")
        if place < self.start:
            raise NotFound(f"the stream is kept from byte {self.start} on", param="from")
        reader = self._reader = object()
        requests, self._requests = self._requests, {}
        for request in requests:  # its connection is dead, which was not noticed yet
            request.cut()
        self._heard()
        try:
            while self._reader is reader:  # until another client comes
                self._taken = place
                self._bound()
                piece = bytes(self.data[place - self.start : place - self.start + _PIECE])
                if piece:
                    yield piece
                    place += len(piece)
                elif self.over:
                    return
                else:
                    self._changed.clear()
                    await self._changed.wait()
        finally:
            if self._reader is reader:
                self._reader = None
                if not self.over:
                    self._unheard()

    def _bound(self) -> None:
        """Drops bytes above the limit that were read, and pauses the engine while too many are left or the client is
        slow."""
        taken = self.end if self._requests else self._taken if self._reader is not None else self.start
        extra = len(self.data) - self._limit
        dropped = max(0, min(extra, taken - self.start))
        del self.data[:dropped]
        self.start += dropped
        if (extra > dropped or any(self._requests.values())) is self._held or self.over:
            return
        self._held = not self._held
        self.work.pause() if self._held else self.work.resume()

    def _end(self, tell: list[Callable[[], None]]) -> None:
        super()._end(tell)
        self._changed.set()


class ResumableStreams:
    """An `Interceptor` for requests that ask to be resumable. A stream is kept for `age` seconds after its end, and
    after its client left; all streams together have at most `memory` bytes. While streams under way use all of it,
    further requests are answered without being resumable."""

    def __init__(self, exchanges: Exchanges, memory: int, age: float) -> None:
        self._exchanges = exchanges
        self._memory, self._age = memory, age
        self._streams: dict[str, ResumableStream] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def take(self, ask: Inference, sink: Sink) -> ForwardedRequest | None:
        id = ask.request_id
        if not ask.head.resumable or not ask.fields.stream or ask.only_loads or id in self._streams:
            return None
        limit = min(IMAGE_LIMIT if ask.head.route.path.startswith("/v1/images/") else LIMIT, self._memory)
        if not self._make_room(limit):
            return None
        stream = ResumableStream(
            limit,
            ask.head.owner,
            heard=lambda: self._keep(id),
            unheard=lambda: self._forget_later(id),
            ended=lambda: self._forget_later(id),
        )
        stream.work = Exchange(self._exchanges, ask, stream)
        self._streams[id] = stream
        place = f"/v1/streams/{id}".encode()
        headers = ((b"X-Modelrunner-Stream", place),)
        return ForwardedRequest(self._exchanges, ask, sink, stream, headers=headers, counted_by=stream.work)

    def find(self, id: str, owner: str) -> ResumableStream:
        """Returns the stream of the request `id`, which may have no head yet. Its owner and the daemon's owner ("") may
        see it. Raises `NotFound`."""
        stream = self._streams.get(id)
        if stream is None or owner not in ("", stream.owner):
            raise NotFound(
                f"there is no stream of a request {id!r}: it did not ask to be resumable, or is gone", param="id"
            )
        return stream

    def end(self, id: str, owner: str) -> None:
        """Ends the work of the stream, cuts its reader, and forgets it. Raises as `find`."""
        stream = self.find(id, owner)
        if not stream.over:
            stream.work.cancel()
            stream.cut()
        self._forget(id)

    def close(self) -> None:
        """Forgets the streams without a client."""
        for id in list(self._timers):
            self._forget(id)

    def _keep(self, id: str) -> None:
        if not self._streams[id].over and (timer := self._timers.pop(id, None)) is not None:
            timer.cancel()

    def _make_room(self, limit: int) -> bool:
        """Forgets complete streams until there is room for `limit` bytes, and returns whether there is. A stream under
        way counts with its limit."""
        for id in [id for id, stream in self._streams.items() if stream.over]:
            if self._used() + limit <= self._memory:
                break
            self._forget(id)
        return self._used() + limit <= self._memory

    def _used(self) -> int:
        return sum(len(stream.data) if stream.over else stream.limit for stream in self._streams.values())

    def _forget_later(self, id: str) -> None:
        if (before := self._timers.pop(id, None)) is not None:
            before.cancel()
        self._timers[id] = asyncio.get_running_loop().call_later(self._age, self._forget, id)

    def _forget(self, id: str) -> None:
        if (timer := self._timers.pop(id, None)) is not None:
            timer.cancel()
        stream = self._streams.pop(id)
        if not stream.over:
            stream.work.cancel()
