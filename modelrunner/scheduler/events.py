"""What happened, in order: the last events, and a feed of those to come that no slow reader can hold up."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["load", "ready", "sleep", "wake", "evict", "stop", "crash", "refuse", "pull", "configure", "install"]
_KEPT = 1000


@dataclass(frozen=True, slots=True)
class EventRecord:
    """Something that happened. `id` grows; `time` is in Unix seconds; `runner` is an ID, "" without one; `reason` is a
    sentence; `details` holds what JSON can hold."""

    id: int
    event: Kind
    time: float
    runner: str
    model: str
    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)


class Events:
    """The last `kept` events. `last` is the ID of the newest; `closed` once no more will come. IDs are consecutive, and
    begin with the time of day in microseconds, so that they go on growing when the daemon starts anew. Used from the
    event loop's thread; `wall` is the time of day in Unix seconds."""

    def __init__(self, wall: Callable[[], float] = time.time, kept: int = _KEPT) -> None:
        self._wall = wall
        self._ring: deque[EventRecord] = deque(maxlen=kept)
        self.last = int(wall() * 1e6)
        self.closed = False
        self._news = asyncio.Event()

    def emit(self, kind: Kind, *, model: str = "", runner: str = "", reason: str = "", **details: Any) -> None:
        """Notes an event; returns at once. `model` is what people call it, `runner` an ID, `reason` a sentence,
        `details` what JSON can hold."""
        self.last += 1
        self._ring.append(EventRecord(self.last, kind, self._wall(), runner, model, reason, details))
        self._tell()

    def recent(self, model: str | None = None) -> list[EventRecord]:
        """The events that are kept, oldest first; those about `model` if one is given."""
        return [event for event in self._ring if model in (None, event.model)]

    def subscribe(
        self, after: int | None = None, idle: float | None = None
    ) -> AsyncGenerator[EventRecord | None, None]:
        """The events from now on, or from those after the ID `after` on, as far as they are kept. With `idle`, None
        whenever nothing has happened for so many seconds. Ends when the daemon does, and for a reader that fell behind
        by more than is kept: it may come back with the last ID it saw."""
        if after is None:
            return self._follow(self.last, idle)
        oldest = self.last - len(self._ring)
        return self._follow(after if oldest <= after <= self.last else oldest, idle)

    def close(self) -> None:
        """Ends every feed once it has given what is there."""
        self.closed = True
        self._tell()

    async def _follow(self, seen: int, idle: float | None) -> AsyncGenerator[EventRecord | None, None]:
        while (behind := self.last - seen) <= len(self._ring):
            for event in list(self._ring)[len(self._ring) - behind :]:
                seen = event.id
                yield event
            if self.last > seen:
                continue  # more came while the reader was busy
            if self.closed:
                return
            try:
                async with asyncio.timeout(idle):
                    await self._news.wait()
            except TimeoutError:
                yield None

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
