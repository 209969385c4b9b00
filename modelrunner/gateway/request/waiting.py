"""The work of a request beside the callbacks of its connections: tasks, timers, signs of life in its stream."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any

from modelrunner.errors import ModelRunnerError, RequestTooLong
from modelrunner.gateway.calls import Inference
from modelrunner.gateway.request.leases import Leases
from modelrunner.http.limits import Limits

log = logging.getLogger(__name__)


def guarded(
    work: Coroutine[Any, Any, None], request_id: str, refuse: Callable[[ModelRunnerError], None]
) -> asyncio.Task[None]:
    """Starts the `work` of a request as a task. An error that it raises goes to `refuse`; any other exception is logged
    as a fault of the daemon, which the client is told of."""
    task = asyncio.get_running_loop().create_task(_guard(work, request_id, refuse))
    task.add_done_callback(lambda _: work.close())  # a task that is cancelled before its first step never awaits it
    return task


async def _guard(work: Coroutine[Any, Any, None], request_id: str, refuse: Callable[[ModelRunnerError], None]) -> None:
    try:
        await work
    except ModelRunnerError as error:
        refuse(error)
    except Exception:
        refuse(fault(request_id))


def fault(request_id: str) -> ModelRunnerError:
    """Logs the exception that is being handled, a fault of the daemon; returns the error for the client."""
    log.exception("request %s", request_id)
    return ModelRunnerError("this is a fault of modelrunner; its log has more under this request's ID")


class SignsOfLife:
    """Writes the comments or the progress of the dialect of `ask` with `say` while the request waits, until `stop`: the
    first after `progress_after` seconds, or at once for a client that asked for progress."""

    def __init__(self, leases: Leases, limits: Limits, ask: Inference, say: Callable[[bytes], None]) -> None:
        self._leases, self._limits, self._ask, self._say = leases, limits, ask, say
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(0.0 if ask.head.progress else limits.progress_after, self._give)

    def stop(self) -> None:
        self._next.cancel()

    def _give(self) -> None:
        ask = self._ask
        progress = self._leases.progress(ask) if ask.head.progress else None
        self._say(ask.head.route.dialect.waiting(progress, perf_counter() - ask.arrived))
        every = 1.0 if progress is not None else self._limits.comment_every
        self._next = self._loop.call_later(every, self._give)


class SideWork:
    """The tasks and timers of one request, which end with it. Few requests have any. `signs` are its signs of life
    while it waits. `refuse` ends the request with an error."""

    __slots__ = ("_refuse", "_request_id", "_task", "_time_limit", "signs")

    def __init__(self, request_id: str, refuse: Callable[[ModelRunnerError], None]) -> None:
        self._request_id, self._refuse = request_id, refuse
        self._task: asyncio.Task[None] | None = None
        self._time_limit: asyncio.TimerHandle | None = None
        self.signs: SignsOfLife | None = None

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts `work` in a task, as `guarded` does."""
        self._task = guarded(work, self._request_id, self._refuse)

    def limit(self, seconds: float) -> None:
        """Refuses the request after so many seconds, which begin with the first call."""
        if self._time_limit is None:
            error = RequestTooLong(f"the engine has worked {seconds:g} s on this request: its limit")
            self._time_limit = asyncio.get_running_loop().call_later(seconds, self._refuse, error)

    def leased(self) -> None:
        """Called when the request has its lease, and waits no more."""
        if self.signs is not None:
            self.signs.stop()

    def stop(self) -> None:
        """Ends every task and timer, except the task that calls this."""
        self.leased()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if self._time_limit is not None:
            self._time_limit.cancel()
