"""A thread with an event loop of its own, which runs the code of one backend.

A backend that blocks its thread blocks only its own calls: the caller's loop waits with a limit and goes on."""

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]


class CallTimeout(Exception):
    """The call passed its limit, or its thread is stuck or was stopped. The message is the end of a sentence about the
    call."""


class CallCancelled(Exception):
    """The work was cancelled, but not by its caller."""


class BackendThread:
    """A thread that starts at the first call. `name` is the thread's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._changing = threading.Lock()
        self._stuck_since: float | None = None

    async def run(
        self,
        work: Work[T],
        *,
        limit: float | None = None,
        patience: float = 0.0,
        abandon: Callable[[], None] = lambda: None,
    ) -> T:
        """Runs `work()` on the thread. Raises what it raises, and `CallTimeout` after `limit` seconds
        (None: no limit), or at once while the thread is stuck in an earlier call.

        When the caller is cancelled, so is the work, again for each further cancellation. It has `patience` seconds to
        end; then `abandon` is called and the work is left alone.
        """
        self._refuse_if_stuck()
        call = _ThreadCall(work, self._started())
        try:
            async with asyncio.timeout(limit):
                return await asyncio.shield(call.outcome)
        except TimeoutError:
            if call.outcome.done():  # the work itself raised it
                raise
            self._give_up(call)
            raise CallTimeout(f"did not return within {limit:g} s") from None
        except asyncio.CancelledError:
            if call.outcome.done():
                raise
            call.outcome.add_done_callback(_looked_at)
            call.cancel()
            await self._see_off(call, patience, abandon)
            raise

    def wait_for(self, work: Work[T], limit: float) -> T:
        """Runs `work()` as `run` does, for a caller in a thread."""
        self._refuse_if_stuck()
        loop = self._started()
        future = asyncio.run_coroutine_threadsafe(_contained(work), loop)
        try:
            return future.result(limit)
        except concurrent.futures.CancelledError:
            raise CallCancelled("the call was cancelled") from None
        except TimeoutError:
            if future.done():  # the work itself raised it
                raise
            future.cancel()
            self._stuck_since = time.monotonic()
            loop.call_soon_threadsafe(self._unstick)
            raise CallTimeout(f"did not return within {limit:g} s") from None

    def _refuse_if_stuck(self) -> None:
        if self._stuck_since is not None:
            since = time.monotonic() - self._stuck_since
            raise CallTimeout(f"cannot run: the backend has been stuck in an earlier call for {since:.0f} s")

    def stop(self, patience: float) -> None:
        """Cancels the running work; the thread ends after it. Waits for that at most `patience` seconds. A stuck thread
        ends with the process. Later calls are refused, so that none of them starts another thread."""
        with self._changing:
            self._stopped = True
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(lambda: _ending.add(loop.create_task(_end())))
        if self._thread is not None:
            self._thread.join(patience)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._changing:
            if self._stopped:
                raise CallTimeout("cannot run: the daemon has closed the backend")
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_serve, args=(loop,), name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no thread left: the next call tries again
                    loop.close()
                    raise
                self._loop, self._thread = loop, thread
            return self._loop

    async def _see_off(self, call: "_ThreadCall[Any]", patience: float, abandon: Callable[[], None]) -> None:
        """Waits for the end of the cancelled work, through further cancellations."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while not call.outcome.done() and (left := deadline - loop.time()) > 0:
            try:
                await asyncio.wait([call.outcome], timeout=left)
            except asyncio.CancelledError:
                call.cancel()
        if not call.outcome.done():
            if patience:
                log.error("%s does not end a call that was cancelled %g s ago", self._name, patience)
            self._give_up(call)
            abandon()

    def _give_up(self, call: "_ThreadCall[Any]") -> None:
        """Cancels the work; the thread counts as stuck until its loop has reacted."""
        call.outcome.add_done_callback(_looked_at)
        call.cancel()
        self._stuck_since = time.monotonic()
        call.loop.call_soon_threadsafe(self._unstick)

    def _unstick(self) -> None:
        self._stuck_since = None


class _ThreadCall(Generic[T]):
    """Work on the loop of a thread, and its outcome on the loop of the caller."""

    def __init__(self, work: Work[T], loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._here = asyncio.get_running_loop()
        self.outcome: asyncio.Future[T] = self._here.create_future()
        self._task: asyncio.Task[T] | None = None
        self._cancelled = False
        loop.call_soon_threadsafe(self._begin, work)

    def cancel(self) -> None:
        self.loop.call_soon_threadsafe(self._cancel)

    # on the thread

    def _begin(self, work: Work[T]) -> None:
        self._task = self.loop.create_task(_contained(work))
        self._task.add_done_callback(self._ended)
        if self._cancelled:
            self._task.cancel()

    def _cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed
            self._here.call_soon_threadsafe(self._settle, task)

    # on the caller's loop

    def _settle(self, task: asyncio.Task[T]) -> None:
        if self.outcome.done():
            return
        if task.cancelled():
            self.outcome.set_exception(CallCancelled("the call was cancelled"))
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


async def _contained(work: Work[T]) -> T:
    try:
        return await work()
    except (SystemExit, KeyboardInterrupt) as error:  # would end the thread
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


_ending: set[asyncio.Task[None]] = set()


async def _end() -> None:
    """Ends the loop that it runs on, after its tasks."""
    this = asyncio.current_task()
    assert this is not None
    others = asyncio.all_tasks() - {this}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)
    _ending.discard(this)
    asyncio.get_running_loop().stop()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _looked_at(outcome: asyncio.Future[Any]) -> None:
    """Retrieves the error of a call without a waiter; otherwise asyncio would log it."""
    if not outcome.cancelled():
        outcome.exception()
