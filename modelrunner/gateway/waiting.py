"""What a request does until its engine is asked: its work in a task, signs of life in its stream, its refusal."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import TYPE_CHECKING, Any

from modelrunner.errors import ModelRunnerError, RequestTooLong
from modelrunner.gateway.dialects.dialect import JSON, Dialect
from modelrunner.gateway.interfaces import Inference, Sink
from modelrunner.gateway.render import chunk
from modelrunner.gateway.tokenlimit import with_most_tokens
from modelrunner.http.answers import Header
from modelrunner.scheduler import Lease
from modelrunner.types import NO_LIMITS

if TYPE_CHECKING:
    from modelrunner.gateway.pipeline import Pipeline


log = logging.getLogger(__name__)
_TURN = 5.0  # seconds after which a suspect that was asked again is no longer asked alone


def guarded(
    work: Coroutine[Any, Any, None],
    request_id: str,
    refuse: Callable[[ModelRunnerError], None],
    name: str | None = None,
) -> asyncio.Task[None]:
    """Starts the `work` of a request as a task. What it raises is the request's answer; a fault of ours is logged, and
    answered as one."""
    task = asyncio.get_running_loop().create_task(_guard(work, request_id, refuse), name=name)
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
    """Logs the exception that is handled, a fault of ours; returns what the client gets."""
    log.exception("request %s", request_id)
    return ModelRunnerError("a fault of modelrunner; its log says more under this request's ID")


class SignsOfLife:
    """What the dialect of `ask` says while the request waits, again and again until `stop`. `say` writes it to the
    client. The first comes after a while, or at once for a client that asked for progress."""

    def __init__(self, pipeline: "Pipeline", ask: Inference, say: Callable[[bytes], None]) -> None:
        self._pipeline, self._ask, self._say = pipeline, ask, say
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(0.0 if ask.terms.progress else pipeline.limits.progress_after, self._give)

    def stop(self) -> None:
        self._next.cancel()

    def _give(self) -> None:
        ask = self._ask
        progress = self._pipeline.progress(ask) if ask.terms.progress else None
        self._say(ask.terms.route.dialect.waiting(progress, perf_counter() - ask.arrived))
        every = 1.0 if progress is not None else self._pipeline.limits.comment_every
        self._next = self._loop.call_later(every, self._give)


class SideWork:
    """What goes on for a request beside the callbacks of its connections, and ends with it. Few requests have any.
    `task` is where it waits, `signs` are those of life meanwhile. `time_limit` ends it, `end_turn` its turn among the
    suspects that are asked again, one at a time."""

    __slots__ = ("end_turn", "signs", "task", "time_limit")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.signs: SignsOfLife | None = None
        self.time_limit: asyncio.TimerHandle | None = None
        self.end_turn: Callable[[], None] | None = None

    def leased(self) -> None:
        """The request waits no more."""
        if self.signs is not None:
            self.signs.stop()

    def asked(self) -> None:
        """Its engine is asked: a turn ends with the first byte of the answer, or after a while."""
        if self.end_turn is not None:
            asyncio.get_running_loop().call_later(_TURN, self.end_turn)

    def answered(self) -> None:
        if self.end_turn is not None:
            self.end_turn()

    def stop(self) -> None:
        """Ends all of it, but for the task that calls this."""
        self.leased()
        self.answered()
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        if self.time_limit is not None:
            self.time_limit.cancel()


class Unasked(ABC):
    """The half of an exchange in which its engine was not asked yet, with the work that waits in a task."""

    __slots__ = ("_dialect", "_error", "_over", "_pipeline", "_responded", "_side", "_sink", "ask")
    _pipeline: "Pipeline"
    _dialect: Dialect
    _sink: Sink
    _side: SideWork | None
    _error: ModelRunnerError | None
    _over: bool
    _responded: bool
    ask: Inference

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        self._beside().task = guarded(work, self.ask.request_id, self._refuse)

    def _beside(self) -> SideWork:
        if self._side is None:
            self._side = SideWork()
        return self._side

    async def _wait(self) -> None:
        lease = await self._pipeline.lease(self.ask)
        if self._over:
            lease.release()
        else:
            self._begin(lease)

    async def _prepare(self) -> None:
        ask = self.ask
        if ask.alias is not None:
            self.ask = ask = await self._pipeline.choose(ask, ask.alias)
        prepared = await self._dialect.prepare(self._pipeline, ask) if ask.fields.prepares else ask
        if self._over:
            return
        if isinstance(prepared, bytes):
            self._answer_without_engine(prepared)
        else:
            self.ask = prepared
            self.start()

    def _limited(self, lease: Lease, path: str, body: bytes) -> bytes:
        """The engine's body within the limits of the model and of the API key; their time begins with the first call.
        Raises `BadRequest`."""
        key = self.ask.terms.key
        limits = lease.limits if key is None else lease.limits.least(key.limits)
        if limits is NO_LIMITS:
            return body
        if limits.seconds is not None and (side := self._beside()).time_limit is None:
            error = RequestTooLong(f"the engine has worked {limits.seconds:g} s on this request: its limit")
            side.time_limit = asyncio.get_running_loop().call_later(limits.seconds, self._refuse, error)
        return body if limits.tokens is None else with_most_tokens(path, body, limits.tokens)

    def _answer_without_engine(self, data: bytes) -> None:
        self._respond(200, (JSON, *self._own_headers()), len(data), data)
        self._finish()

    def _say(self, data: bytes) -> None:
        """Writes an event of our own to the client's stream."""
        data = chunk(data) if self._sink.takes_chunks and data else data
        if self._responded:
            self._sink.write(data)
        else:
            self._respond(200, self._dialect.stream_headers, None, data)

    def stop(self, error: ModelRunnerError) -> None:
        """Ends the request with an error, whatever it is doing."""
        self._refuse(error)

    def _refuse(self, error: ModelRunnerError, *, tell: bool = True) -> None:
        """Ends the request with an error: as its status or, if the head of a stream is out, as an event."""
        if self._over:
            return
        self._error = error
        if self._responded:
            if tell and self.ask.fields.stream:
                self._say(self._dialect.error_event(error, self.ask.request_id))
            self._close()
            self._sink.cut()
            return
        headers, body = self._dialect.error(error, self.ask.request_id)
        self._respond(error.status, headers, len(body), body)
        self._finish()

    def _finish(self) -> None:
        self._close()
        self._sink.finish()

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def _begin(self, lease: Lease) -> None:
        """Asks the engine."""

    @abstractmethod
    def _own_headers(self) -> tuple[Header, ...]: ...

    @abstractmethod
    def _respond(self, status: int, headers: tuple[Header, ...], length: int | None, data: bytes) -> None: ...

    @abstractmethod
    def _close(self) -> None:
        """Gives back what the request held. Called once, by whoever ends it."""
