"""One inference request from its decision to its last byte, whichever lane it came on.

A warm request is callbacks only: `start` sends it to the engine, the engine's connection calls back, the sink writes.
A task exists only while something is waited for: a runner, or the reason why an engine went away.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any

from modelrunner.errors import EngineFailed, EngineProtocolError, ModelRunnerError, Unavailable
from modelrunner.proxy.inference import Host, Inference, Sink
from modelrunner.proxy.record import tee
from modelrunner.proxy.rename import body_for
from modelrunner.proxy.render import (
    EVENT_STREAM,
    JSON,
    chunk,
    engine_error,
    engine_headers,
    error_answer,
    error_event,
    id_line,
    progress_event,
    server_timing,
    variant_header,
)
from modelrunner.proxy.wire import Header
from modelrunner.scheduler import Lease
from modelrunner.upstream import UpstreamConnection, build_request

log = logging.getLogger(__name__)

ERROR_BODY_LIMIT = 256 << 10
_TURN = 5.0  # seconds after which a suspect that was asked again is no longer asked alone
_BLAME_WAIT = 0.25  # seconds for an engine whose connection broke to be found dead


class Exchange:
    """Made by `Pipeline.exchange`. `cancel` when the client is gone; `pause` and `resume` when it takes no more."""

    _lease: Lease | None
    _upstream: UpstreamConnection | None
    _task: asyncio.Task[None] | None
    _comments: asyncio.TimerHandle | None
    _end_turn: Callable[[], None] | None  # of a suspect that is asked again
    _refusal: tuple[int, bytearray] | None  # an engine's error while it arrives
    _error: ModelRunnerError | None
    _held_open: bool  # the head was sent while the request waited for its runner
    on_data: Callable[[bytes], None]

    __slots__ = (
        *("_ask", "_asked_at", "_comments", "_end_turn", "_error", "_held_open", "_host", "_id_line", "_lease"),
        *("_over", "_refusal", "_responded", "_retried", "_sink", "_sized_in_chunks", "_status", "_task"),
        *("_upstream", "on_data"),
    )

    def __init__(self, host: Host, inference: Inference, sink: Sink) -> None:
        self._host = host
        self._ask = inference
        self._sink = sink
        self._id_line = id_line(inference.request_id)
        self._lease = self._upstream = self._task = self._comments = None
        self._end_turn = self._refusal = self._error = None
        self._responded = self._held_open = self._sized_in_chunks = self._retried = self._over = False
        self._asked_at = 0.0
        self._status = 0
        self.on_data = sink.write

    def start(self) -> None:
        try:
            lease = self._host.lease_now(self._ask)
            if lease is not None:
                self._begin(lease)
        except ModelRunnerError as error:
            self._refuse(error)
            return
        if lease is None:
            self._do(self._wait())
            if self._ask.stream and not self._ask.terms.preload:
                after = 0.0 if self._ask.terms.progress else self._host.limits.progress_after
                self._comments = asyncio.get_running_loop().call_later(after, self._hold_open)

    def pause(self) -> None:
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()

    def cancel(self) -> None:
        """The client is gone: the engine's connection closes now, a place in the queue is given up."""
        if not self._over:
            self._status = 499
            self._close()

    # waiting for a runner

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._guarded(work))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except ModelRunnerError as error:
            self._refuse(error)
        except Exception:  # the edge of this request: a fault of ours is logged, and answered as one
            log.exception("request %s", self._ask.request_id)
            self._refuse(ModelRunnerError("a fault of modelrunner; its log says more under this request's ID"))

    async def _wait(self) -> None:
        lease = await self._host.lease(self._ask)
        if self._over:
            lease.release()
        else:
            self._begin(lease)

    def _hold_open(self) -> None:
        """Called again and again while the request waits."""
        waited = perf_counter() - self._ask.arrived
        if self._ask.terms.progress:
            news = progress_event(self._host.progress(self._ask), waited)
        else:
            news = b": waiting for the model, %.0f s\n\n" % waited
        if not self._held_open:
            self._held_open = True
            self._respond(200, EVENT_STREAM, None, self._framed(news))
        else:
            self._sink.write(self._framed(news))
        every = 1.0 if self._ask.terms.progress else self._host.limits.comment_every
        self._comments = asyncio.get_running_loop().call_later(every, self._hold_open)

    def _framed(self, data: bytes) -> bytes:
        return chunk(data) if self._sink.takes_chunks and data else data

    def _begin(self, lease: Lease, *, fresh: bool = False) -> None:
        if self._comments is not None:
            self._comments.cancel()
        self._lease = lease
        self._asked_at = perf_counter()
        terms = self._ask.terms
        if terms.preload:
            self._respond(200, (JSON, *variant_header(lease.variant)), 2, b"{}")
            self._finish()
            return
        if self._host.quarantine.alert:
            self._host.quarantine.check(lease.runner.key, terms.route.path, self._ask.body)
        if self._end_turn is not None:
            asyncio.get_running_loop().call_later(_TURN, self._end_turn)
        body = self._ask.body if lease.runner.names is None else body_for(lease.runner, self._ask.model, self._ask.body)
        request = build_request("POST", terms.route.path, body, self._id_line)
        self._upstream = lease.runner.upstream.send(request, self, fresh=fresh)

    # modelrunner.upstream.Receiver

    def splices(self, status: int) -> bool:
        return self._sink.takes_chunks and status == 200

    def on_head(self, status: int, headers: tuple[Header, ...], length: int | None, data: bytes) -> None:
        if self._end_turn is not None:
            self._end_turn()
        if status == 200 and length == 0 and not any(name == b"content-type" for name, _ in headers):
            raise EngineProtocolError("the engine's answer is empty")
        if status != 200:
            self._refusal = (status, bytearray())
            self.on_data = self._collect
            self._collect(data)
        elif self._held_open:
            if length is not None and self._sink.takes_chunks:
                self._sized_in_chunks = True
                self.on_data = self._write_chunk
            self.on_data(data)
        else:
            assert self._lease is not None
            self._respond(200, engine_headers(headers, self._lease.variant), length, data)

    def _collect(self, data: bytes) -> None:
        assert self._refusal is not None
        self._refusal[1].extend(data)
        if len(self._refusal[1]) > ERROR_BODY_LIMIT:
            raise EngineProtocolError("the engine's error is too large to pass on")

    def _write_chunk(self, data: bytes) -> None:
        self._sink.write(self._framed(data))

    def on_end(self) -> None:
        self._upstream = None  # the next request may have it
        if self._host.quarantine.alert and self._lease is not None:
            self._host.quarantine.answered(self._lease.runner.key, self._ask.terms.route.path, self._ask.body)
        if self._refusal is not None:
            assert self._lease is not None
            status, body = self._refusal
            self._refuse(engine_error(status, bytes(body), self._lease.runner.blames_client))
            return
        if self._sized_in_chunks:
            self._sink.write(b"0\r\n\r\n")
        self._finish()

    def on_failure(self, error: OSError | EngineProtocolError) -> None:
        upstream, lease = self._upstream, self._lease
        assert upstream is not None
        assert lease is not None
        if upstream.reused and not upstream.answered:
            self._begin(lease, fresh=True)  # it had been idle, and closed just as it was used: nothing was lost
        elif self._responded and not (self._held_open and not upstream.begun):
            self._do(self._break_off(error, upstream.at_event_boundary()))
        else:
            self._do(self._recover(error, lease, untouched=not upstream.begun))

    # when things go wrong

    async def _recover(self, error: OSError | EngineProtocolError, lease: Lease, *, untouched: bool) -> None:
        """Nothing of an answer went out. An engine that died before its first byte is asked once more, anew."""
        failure = await self._blame(error)
        lease.release()
        self._lease = None
        if (
            untouched
            and lease.runner.failure is not None
            and not self._retried
            and self._ask.terms.route.runner is None
        ):
            self._retried = True
            self._end_turn = await self._host.quarantine.turn(lease.runner.key)
            await self._wait()
        else:
            raise failure

    async def _blame(self, error: OSError | EngineProtocolError) -> ModelRunnerError:
        """The engine's last words, if it died; else what happened to the connection."""
        lease = self._lease
        assert lease is not None
        if await lease.engine_ended(_BLAME_WAIT):
            if lease.runner.failure is not None:
                key, path = lease.runner.key, self._ask.terms.route.path
                self._host.quarantine.died(key, lease.runner.id, path, self._ask.body)
            return lease.runner.failure or Unavailable("the model was unloaded before it answered")
        return error if isinstance(error, EngineProtocolError) else EngineFailed(f"the request failed: {error}")

    async def _break_off(self, error: OSError | EngineProtocolError, boundary: bool) -> None:
        self._error = await self._blame(error)
        if boundary:
            self._sink.write(self._framed(error_event(self._error, self._ask.request_id)))
        self._cut()

    def _refuse(self, error: ModelRunnerError) -> None:
        """Ends the request with an error, as its status or, if the head is out, as an event."""
        if self._over:
            return
        self._error = error
        if self._responded:
            self._sink.write(self._framed(error_event(error, self._ask.request_id)))
            self._cut()
            return
        headers, body = error_answer(error, self._ask.request_id)
        self._respond(error.status, headers, len(body), body)
        self._finish()

    # the end

    def _respond(self, status: int, headers: tuple[Header, ...], length: int | None, data: bytes) -> None:
        self._responded = True
        self._status = status
        lease = self._lease
        if lease is None:
            timing = server_timing(perf_counter() - self._ask.arrived, 0.0, 0.0)
        else:
            proxy = self._asked_at - self._ask.arrived - lease.waited
            timing = server_timing(lease.waited - lease.loaded, lease.loaded, proxy)
        self._sink.respond(status, headers, self._id_line + timing, length, data)
        if self._host.hooks is not None and (tap := self._host.hooks.tap(self._ask.request_id)):
            tap(data)
            self.on_data = tee(tap, self.on_data)

    def _finish(self) -> None:
        self._close()
        self._sink.finish()

    def _cut(self) -> None:
        self._close()
        self._sink.cut()

    def _close(self) -> None:
        """Gives back what the request held. Called once, by whoever ends it."""
        self._over = True
        if self._comments is not None:
            self._comments.cancel()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if self._upstream is not None:
            self._upstream.abort()
        if self._end_turn is not None:
            self._end_turn()
        if self._lease is not None:
            self._lease.release()
        self._host.over(self._ask, self._lease, self._status, self._error)
