"""Work with several callers: a later caller joins in and sees its progress."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from modelrunner.concurrency.threads import ended

P = TypeVar("P")
R = TypeVar("R")


class JointWork(Generic[P, R]):
    """Starts `work` at once, as a task, and hands it a function to report its progress with. `last` is the latest
    report. With `stops_alone` the work is cancelled when its last caller is; without, it goes on without callers."""

    def __init__(
        self, work: Callable[[Callable[[P], None]], Awaitable[R]], *, stops_alone: bool, name: str | None = None
    ) -> None:
        self.last: P | None = None
        self._stops_alone = stops_alone
        self._watchers: list[Callable[[P], None]] = []
        self._stopped: Exception | None = None

        async def run() -> R:
            return await work(self._report)

        self.task: asyncio.Task[R] = asyncio.create_task(run(), name=name)

    @property
    def abandoned(self) -> bool:
        """Returns whether the work was cancelled: a later caller waits for its end, and starts it anew."""
        return self.task.cancelling() > 0

    async def follow(self, watcher: Callable[[P], None] = lambda report: None) -> R:
        """Passes the latest report and each further one to `watcher`, and returns the result of the work, or raises its
        error."""
        if self.last is not None:
            watcher(self.last)
        self._watchers.append(watcher)
        try:
            return await asyncio.shield(self.task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._stopped is not None and self.task.done() and not (caller and caller.cancelling()):
                raise self._stopped from None
            raise
        finally:
            self._watchers.remove(watcher)
            if self._stops_alone and not self._watchers and not self.task.done():
                self.task.cancel()
                await ended(self.task)

    async def stop(self, reason: Exception) -> None:
        """Cancels the work, and returns when it has ended. Its callers get `reason`."""
        self._stopped = reason
        self.task.cancel()
        await ended(self.task)

    def _report(self, progress: P) -> None:
        self.last = progress
        for watcher in tuple(self._watchers):
            watcher(progress)
