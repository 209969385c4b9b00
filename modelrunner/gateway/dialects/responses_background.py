"""A response in the background: its work goes on without its client, who may follow its events."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from modelrunner.errors import NotFound
from modelrunner.gateway.calls import BackgroundWork
from modelrunner.gateway.dialects.responses_answer import keep, response_of
from modelrunner.gateway.dialects.responses_request import PreparedFields
from modelrunner.gateway.response_store import ResponseStore
from modelrunner.http.answers import Header

_MOST_EVENTS = 1 << 20
"""The most bytes of events that are kept for those who follow; the work waits for none of them."""
_GONE = "earlier events of this response are not kept any more: ask for it without `stream`"


class BackgroundResponse:
    """The `Sink` of the work on a response, and what its store knows of it meanwhile (`Underway`). The translation has
    stored a complete response. `work` is set by its maker."""

    takes_chunks = False

    def __init__(self, fields: PreparedFields) -> None:
        self.work: BackgroundWork
        self.queued = response_of(fields, "queued", [])
        self._fields = fields
        self._events: list[tuple[int, bytes]] = []  # with their numbers
        self._dropped = self._size = self._next = 0
        self._over = False
        self._changed = asyncio.Event()

    def begin(self, store: ResponseStore) -> None:
        """Stores the first state, and begins the work."""
        store.running[self._fields.id] = self
        keep(self._fields, self.queued)
        self._tell("response.created", response=self.queued)
        self.work.start()

    @property
    def streams(self) -> bool:
        return bool(self._fields.stream)

    def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Returns the events with a higher number than `after`, as they come, to the end. Raises `NotFound` where some
        are not kept any more."""
        if self._events and self._events[0][0] > after + 1:
            raise NotFound(_GONE, param="starting_after")
        return self._from(self._dropped + sum(number <= after for number, _ in self._events))

    async def _from(self, place: int) -> AsyncGenerator[bytes, None]:
        while True:
            if place < self._dropped:
                raise NotFound(_GONE)
            if events := self._events[place - self._dropped :]:
                place += len(events)
                yield b"".join([event for _, event in events])
            elif self._over:
                return
            else:
                self._changed.clear()
                await self._changed.wait()

    def cancel(self) -> None:
        """Ends the work, and tells those who follow."""
        self.work.cancel()
        self._tell("response.failed", response=response_of(self._fields, "cancelled", []))
        self._end()

    # Sink

    def respond(self, status: int, headers: tuple[Header, ...], own: bytes, length: int | None, data: bytes) -> None:
        if status == 200:
            self.write(data)
        else:
            self._fail(msgspec.json.decode(data)["error"])

    def write(self, data: bytes) -> None:
        if not self.streams:
            return
        for event in data.split(b"\n\n"):
            if event.startswith(b"event: error\n"):
                self._fail(msgspec.json.decode(event.partition(b"data: ")[2]))
            elif event:
                self._add(event + b"\n\n")

    def finish(self, *, failed: bool = False) -> None:
        self._end()

    def cut(self) -> None:
        self._end()

    def _fail(self, error: dict[str, Any]) -> None:
        said = {"code": error["code"], "message": error["message"]}
        failed = response_of(self._fields, "failed", []) | {"error": said}
        keep(self._fields, failed)
        self._tell("response.failed", response=failed)

    def _tell(self, kind: str, **more: Any) -> None:
        if self.streams:
            data = msgspec.json.encode({"type": kind, "sequence_number": self._next, **more})
            self._add(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))

    def _add(self, event: bytes) -> None:
        """Keeps an event, or a comment, which has the number of the event before it."""
        self._next += not event.startswith(b":")
        self._events.append((self._next - 1, event))
        self._size += len(event)
        while self._size > _MOST_EVENTS and len(self._events) > 1:
            self._size -= len(self._events.pop(0)[1])
            self._dropped += 1
        self._changed.set()

    def _end(self) -> None:
        self._over = True
        self._changed.set()
        store = self._fields.responses
        assert store is not None
        store.running.pop(self._fields.id, None)
