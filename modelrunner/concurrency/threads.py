"""Threads for blocking work, in pools by purpose: work of minutes never delays short work."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

from modelrunner.errors import Unavailable

P = ParamSpec("P")
T = TypeVar("T")

_CLOSING = 5.0
_LATE = 5.0
_LOOK = 0.5  # seconds between two checks whether a thread is to stop
_pools: "WeakSet[Pool]" = WeakSet()


class Pool(ThreadPoolExecutor):
    """Runs at most `threads` pieces of work at a time; a thread ends when no work waits. It is a `ThreadPoolExecutor`
    because asyncio accepts no other default executor. The threads are daemons: a call that hangs in the kernel cannot
    keep the process from ending. In a `prompt` pool all work is short: a long wait for a thread is a fault, which
    `stuck` reports."""

    def __init__(
        self, purpose: str, threads: int, *, prompt: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(1)  # it starts no thread, since `submit` is replaced
        self.prompt = prompt
        _pools.add(self)
        self.purpose = purpose
        self._limit = threads
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[tuple[float, Future[Any], Callable[[], Any]]] = deque()
        self._running: set[Future[Any]] = set()
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads for {self.purpose} have ended")
            self._waiting.append((self._clock(), future, partial(fn, *args, **kwargs)))
            if len(self._running) >= self._limit:
                return future
            work = self._next()
        while work is not None:
            try:
                threading.Thread(target=self._work, args=work, name=self.purpose, daemon=True).start()
                break
            except RuntimeError as error:  # the system has no thread left: the place is free for later work
                failed = work[0]
                with self._lock:
                    self._running.discard(failed)
                    work = None if self._running else self._next()
                failed.set_exception(Unavailable(f"no thread can be started at the moment ({error}): try again"))
        return future

    def delay(self) -> float:
        """Returns how many seconds the oldest piece of work has waited for a thread; 0 if none waits."""
        with self._lock:
            return self._clock() - self._waiting[0][0] if self._waiting else 0.0

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more work, drops waiting work, and with `wait` gives running work 5 s to end."""
        with self._lock:
            self._closed = True
            running = tuple(self._running)
            for _, future, _ in self._waiting:
                future.cancel()
            self._waiting.clear()
        ended = threading.Semaphore(0)
        for future in running:
            future.add_done_callback(lambda _: ended.release())
        until = time.monotonic() + (_CLOSING if wait else 0.0)
        for _ in running if wait else ():
            ended.acquire(timeout=max(0.0, until - time.monotonic()))

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """Returns the next piece of work. Call it with the lock held."""
        while self._waiting:
            _, future, call = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                self._running.add(future)
                return future, call
        return None

    def _work(self, future: Future[Any], call: Callable[[], Any]) -> None:
        work: tuple[Future[Any], Callable[[], Any]] | None = (future, call)
        while work is not None:
            future, call = work
            try:
                result = call()
            except BaseException as error:
                settle = partial(future.set_exception, error)
            else:
                settle = partial(future.set_result, result)
            with self._lock:
                self._running.discard(future)
                work = self._next()
            settle()
            del future, call, settle


# This pool writes pieces of downloads, and does other short work of pulls.
TRANSFERS = Pool("transfers", 4, prompt=True)
# This pool reads large bodies of requests.
BODIES = Pool("bodies", 2, prompt=True)
# This pool copies, hashes and unpacks whole models, which takes minutes.
HASHING = Pool("hashing", 2, prompt=False)
# This pool reads archives of models while clients send them, for as long as these take.
LOADING = Pool("loading", 4, prompt=False)
# This pool removes the folders of runners, in which an engine may have put any number of files.
REMOVING = Pool("removals", 2, prompt=False)


def stuck() -> str:
    """Returns a sentence that names the pool where short work has waited more than 5 s for a thread; "" if there is
    none."""
    for pool in tuple(_pools):
        if pool.prompt and (delay := pool.delay()) > _LATE:
            return f"the threads for {pool.purpose} are stuck: work has waited {delay:.0f} s for one"
    return ""


async def in_thread(work: Callable[[threading.Event], T], pool: Pool = TRANSFERS) -> T:
    """Runs `work(stop)` in a thread of `pool`. When cancelled, it sets `stop`, which `work` checks, and ends when
    `work` has; work that has not begun is dropped."""
    stop = threading.Event()
    task = asyncio.wrap_future(begun := pool.submit(work, stop))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        if not begun.cancel():
            await ended(task)
        raise


class LoopStream:
    """The bytes of an asynchronous iterator, for a thread that `in_thread` has started with `stop`. `read` may return
    less than was asked for, b"" at the end; it raises what the iterator raises."""

    def __init__(self, pieces: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop, stop: threading.Event) -> None:
        self._pieces, self._loop, self._stop = pieces, loop, stop
        self._rest = b""

    def read(self, size: int, /) -> bytes:
        if not self._rest:
            coming = asyncio.run_coroutine_threadsafe(self._next(), self._loop)
            while not self._stop.is_set() and not wait((coming,), _LOOK).done:
                pass
            if self._stop.is_set():
                coming.cancel()
                raise asyncio.CancelledError
            self._rest = coming.result()
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece

    async def _next(self) -> bytes:
        return await anext(self._pieces, b"")


async def ended(task: asyncio.Future[Any]) -> None:
    """Waits for the end of the task, successful or not."""
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it
