"""The state of the daemon for watching clients, made once for all of them."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from modelrunner import wire
from modelrunner.api import modelforms, wireforms
from modelrunner.api.streaming import ALIVE
from modelrunner.concurrency.feed import Feed
from modelrunner.progress import RunningPull
from modelrunner.scheduler import Scheduler
from modelrunner.telemetry.telemetry import Telemetry

_EVERY = 0.5  # seconds
_SHOWN = 100  # requests under way in a snapshot, and requests that ended since the last one
_EVENTS = 50


class Board:
    """Reads the state twice a second while a client watches, and sends the changes. Its cost does not grow with the
    number of requests: it sends only the newest of those that ended since. `pulls` are those under way; `is_counted`
    is True if requests are recorded."""

    def __init__(
        self,
        scheduler: Scheduler,
        telemetry: Telemetry,
        pulls: Callable[[], list[RunningPull]],
        is_counted: Callable[[], bool],
    ) -> None:
        self._scheduler = scheduler
        self._telemetry = telemetry
        self._pulls = pulls
        self._is_counted = is_counted
        self._frames: Feed[bytes] = Feed(1, 16)
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None

    def now(self) -> wire.Now:
        scheduler, running = self._scheduler, self._telemetry.running()
        memory = scheduler.memory()
        return wire.Now(
            status=scheduler.health().value,
            budget=wireforms.memory(memory.budget),
            free=wireforms.memory(memory.free),
            runners=[wireforms.runner(view) for view in scheduler.runners()],
            waiting=scheduler.waiting(),
            paused=sorted(scheduler.paused()),
            running=len(running),
            requests=[wireforms.request(entry) for entry in running[:_SHOWN]],
            counted=self._is_counted(),
            pulls=[modelforms.pull(running) for running in self._pulls()],
            devices=wireforms.devices(scheduler.devices(), memory),
        )

    async def watch(self) -> AsyncGenerator[bytes | None, None]:
        """Yields server-sent events: first the whole state, then its changes, until the daemon ends."""
        self._watchers += 1
        try:
            if self._task is None:
                self._task = asyncio.create_task(self._look(), name="board")
            recent = [wireforms.event(event) for event in self._scheduler.events.recent()[-_EVENTS:]]
            frames = self._frames.subscribe(idle=ALIVE)
            yield _sent("events", recent) + _sent("now", self.now())
            async with aclosing(frames):
                async for frame in frames:
                    yield frame
        finally:
            self._watchers -= 1
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _look(self) -> None:
        """Runs until the scheduler's events end with the daemon."""
        events, telemetry = self._scheduler.events, self._telemetry
        (served, _), step = telemetry.ended_after(0), telemetry.latest_step()
        seen, before = events.last, self.now()
        while not events.closed:
            await asyncio.sleep(_EVERY)
            frame = b""
            if new := events.after(seen):
                seen, frame = events.last, _sent("events", [wireforms.event(event) for event in new])
            total, ended = telemetry.ended_after(served)
            if ended:
                shown = [wireforms.request(entry) for entry in ended[-_SHOWN:]]
                frame += _sent("requests", {"ended": total - served, "newest": shown})
                served = total
            if (now := self.now()) != before:
                before, frame = now, frame + _sent("now", now)
            if (latest := telemetry.latest_step()) != step and latest is not None:
                step, frame = latest, frame + _sent("history", latest)
            if frame:
                self._frames.add(frame)
        self._frames.close()


def _sent(name: str, value: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))
