"""One inference request from its admission to its last byte.

A warm request is callbacks only: `start` sends it to the engine, the engine's connection calls back, the sink writes. A
task exists only while the request waits: for a runner, or for the reason of an engine's end.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from modelrunner.engine.connections import UpstreamConnection
from modelrunner.engineapi import ApiShape
from modelrunner.errors import ContextTooLong, EngineProtocolError, HostLost, InsufficientMemory, ModelRunnerError
from modelrunner.gateway.calls import JSON, Inference, Preparing, Sink, Translation, client_of
from modelrunner.gateway.dialects.one_piece import OnePiece, is_whole
from modelrunner.gateway.engine_errors import EngineRefusal, EngineRefused
from modelrunner.gateway.engine_request import MEMBERS, EngineRequest
from modelrunner.gateway.headers import chunk, engine_headers, id_line, one_line_each, own_headers, server_timing
from modelrunner.gateway.request.choice_rounds import ChoiceRounds
from modelrunner.gateway.request.in_flight import InFlight
from modelrunner.gateway.request.leases import Leases
from modelrunner.gateway.request.model_defaults import apply_defaults, limit_tokens
from modelrunner.gateway.request.observers import LEFT, RequestRecord, record_of
from modelrunner.gateway.request.required_calls import RequiredCalls, require_calls
from modelrunner.gateway.request.response_writer import ResponseWriter
from modelrunner.gateway.request.schemas import hold_schemas
from modelrunner.gateway.request.tokens import NONE, tokens_of, with_prompt
from modelrunner.gateway.request.tool_choice import choose_tools
from modelrunner.gateway.request.trace_context import begun
from modelrunner.gateway.request.unknown_fields import unread, unread_in_run
from modelrunner.gateway.request.waiting import SideWork, SignsOfLife, fault
from modelrunner.gateway.routes import check_endpoint
from modelrunner.http.answers import Header
from modelrunner.http.responsebodies import TAIL
from modelrunner.keys.allowances import hold_place
from modelrunner.scheduler import Lease
from modelrunner.types import NO_LIMITS

_LOST_HOSTS = 5  # of so many a request is asked
_STALE = 2.0
"""Seconds from its sending in which a request gets lost if the engine had closed the kept connection: a round trip of a
second, and one that TCP waits before it sends again (RFC 6298, 2.4). A later end may come in the midst of the work."""
_LONG = {"embeddings": "input", "rerank": "documents", "completions": "prompt", "responses": "input"}
"""The field of a request that was too long, by the call."""


@dataclass(frozen=True, slots=True)
class Exchanges:
    """What all exchanges share."""

    leases: Leases
    in_flight: InFlight
    preparing: Preparing | None = None
    """For the dialects."""


class Exchange:
    """Its maker starts it. Without `is_told` it counts nowhere: other requests do in its place."""

    __slots__ = (
        *("_asked_at", "_dialect", "_error", "_first_byte", "_id_line", "_ignored", "_in_flight", "_is_told", "_lost"),
        *("_leases", "_opening", "_over", "_passed", "_preparing", "_received", "_refusal", "_responded", "_rounds"),
        *("_sent_at", "_side", "_sink", "_status", "_taken", "_trace", "_translation", "_upstream", "_writer"),
        *("ask", "lease", "on_data"),
    )

    def __init__(self, exchanges: Exchanges, ask: Inference, sink: Sink, *, is_told: bool = True) -> None:
        in_flight = exchanges.in_flight
        self._leases, self._in_flight, self._preparing = exchanges.leases, in_flight, exchanges.preparing
        self.ask = ask
        self._sink = sink
        self._dialect = ask.head.route.dialect
        self._id_line = id_line(ask.request_id)
        self.lease: Lease | None = None  # while the request waits for a runner
        self._upstream: UpstreamConnection | None = None
        self._side: SideWork | None = None
        self._taken: asyncio.Event | None = None  # set while the client takes more of a stream that is made elsewhere
        self._refusal: EngineRefusal | None = None  # an engine's error while it arrives
        self._translation: Translation | None = None
        self._rounds: ChoiceRounds | None = None  # for an engine that is asked several times
        self._writer: ResponseWriter | None = None  # None while the answer goes to the sink unchanged
        self._error: ModelRunnerError | None = None
        self._ignored: tuple[str, ...] = ()  # fields of the request that the engine ignores
        self._responded = False  # the client has its head
        self._passed = False  # the engine's answer began to go to the client
        self._over = False
        self._asked_at, self._sent_at, self._first_byte, self._status = 0.0, 0.0, 0.0, 0
        self._lost = 0  # hosts that were lost under it
        # Allowances or observers hear of its end.
        self._is_told = is_told and (bool(ask.counted) or in_flight.observers.active)
        self._trace = begun(ask.head.traceparent) if in_flight.tracing else None
        self._received: tuple[int, bytes] = (0, b"")  # as of `UpstreamConnection`, once the answer is over
        self._opening = b""  # the first bytes of a stream whose family counts there
        self.on_data: Callable[[bytes], object]  # set with the head of the answer
        if is_told:
            in_flight.running.add(self)

    def start(self) -> None:
        """Asks the engine of a warm request at once; any other request waits in a task. Raises nothing."""
        ask = self.ask
        if ask.fields.prepares or ask.alias is not None:
            self._do(self._prepare())
            return
        try:
            lease = self._leases.warm(ask)
            if lease is not None:
                self._begin(lease)
                return
        except ModelRunnerError as error:
            self._refuse(error)
            return
        except Exception:
            self._refuse(fault(ask.request_id))
            return
        self._do(self._wait())
        if ask.fields.stream and not ask.only_loads:
            self._beside().signs = SignsOfLife(self._leases, self._in_flight.limits, ask, self._say)

    def pause(self) -> None:
        if self._rounds is not None:
            self._rounds.paused = True
        if self._upstream is not None:
            self._upstream.pause()
        elif self._taken is not None:
            self._taken.clear()

    def resume(self) -> None:
        if self._rounds is not None:
            self._rounds.paused = False
        if self._upstream is not None:
            self._upstream.resume()
        elif self._taken is not None:
            self._taken.set()

    def record(self) -> RequestRecord:
        """Returns the record of the request so far."""
        ask, lease, upstream, tokens = self.ask, self.lease, self._upstream, NONE
        size, tail = self._received if upstream is None else upstream.received
        if self._refusal is None:
            counted = self._translation.counted if self._translation is not None else None
            if size:
                tokens = counted or tokens_of(tail, size, self._opening)
            if not tokens.prompt and lease is not None and (tokens.answer or upstream is not None):
                tokens = with_prompt(tokens, len(ask.body), lease.runner.spec.context_size)
        error = self._error.code if self._error is not None else ""
        return record_of(ask, lease, self._status, error, self._first_byte, size, tokens, self._trace)

    def cancel(self) -> None:
        """Called when the client is gone. Ends the engine's work, or leaves the queue."""
        if not self._over:
            if not self._has_passed_last_event():
                self._status = LEFT
            self._close()

    def _has_passed_last_event(self) -> bool:
        """True if the client has the whole stream: OpenAI's own closes the connection then, before the last chunk."""
        upstream = self._upstream
        return self._passed and self._translation is None and upstream is not None and upstream.has_last_event()

    def stop(self, error: ModelRunnerError) -> None:
        """Ends the request with an error, whatever it is doing."""
        self._refuse(error)

    # waiting

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        self._beside().do(work)

    def _beside(self) -> SideWork:
        if self._side is None:
            self._side = SideWork(self.ask.request_id, self._refuse)
        return self._side

    async def _wait(self, broken: Lease | None = None) -> None:
        try:
            lease = await self._leases.lease(self.ask, broken)
        except InsufficientMemory as error:
            self.ask = self._leases.fallen_back(self.ask, error)
            lease = await self._leases.lease(self.ask)
        if self._over:
            lease.release()
        else:
            self._begin(lease)

    async def _prepare(self) -> None:
        ask = self.ask
        if ask.alias is not None:
            self.ask = ask = await self._leases.choose(ask, ask.alias)
        prepared: Inference | bytes | AsyncGenerator[bytes, None] = ask
        if ask.fields.prepares:
            assert self._preparing is not None
            prepared = await self._dialect.prepare(self._preparing, ask)
        if self._over:
            return
        if isinstance(prepared, bytes):
            self._answer_without_engine(prepared)
        elif isinstance(prepared, Inference):
            if prepared.held:
                client = client_of(prepared.head, prepared.peer)
                self._in_flight.buffer(client, prepared.held, prepared.held)
            self.ask = prepared
            self.start()
        else:
            await self._pass_on(prepared)

    async def _pass_on(self, stream: AsyncGenerator[bytes, None]) -> None:
        """Answers with a stream that is made elsewhere, no faster than the client takes it."""
        self._taken = asyncio.Event()
        self._taken.set()
        async with aclosing(stream):
            async for piece in stream:
                await self._taken.wait()
                self._say(piece)
        self._end_stream()

    # asking the engine

    def _begin(self, lease: Lease, *, fresh: bool = False) -> None:
        if self._side is not None:
            self._side.leased()
        self.lease = lease
        self._asked_at = perf_counter()
        ask, runner = self.ask, lease.runner
        if ask.only_loads:
            self._answer_without_engine(self._dialect.loaded(ask))
            return
        request, self._translation = self._dialect.request(ask, runner)
        endpoint = runner.api.endpoints.get(request.path)
        if endpoint is None:
            check_endpoint(request.path, runner.api.endpoints, runner.key.backend)
            return
        self._ignored, read = (), self._dialect.reads(ask, request.path, runner)
        if read is not None:
            members = request.members if request.passes else MEMBERS.decode(ask.body)
            self._ignored = unread(members, endpoint.shape if self._dialect.refuses_unread else None, read)
        parameters = lease.parameters
        if parameters is not None and request.is_json:
            request.set(dict.fromkeys(parameters.strip))
        if request.is_json and (defaults := lease.target.spec.bundle.defaults) is not None:
            apply_defaults(request, endpoint.shape, defaults, endpoint.reads)
        if parameters is not None and request.is_json:
            request.set(parameters.set)
        if lease.limits is not NO_LIMITS or ask.head.key is not None:
            self._limit(lease, request, endpoint.shape)
        if endpoint.unheld and request.is_json:
            self._ignored = tuple(dict.fromkeys((*self._ignored, *hold_schemas(request, endpoint.unheld))))
        fields = ask.fields
        if fields.tools or fields.dimensions:
            self._ignored += unread_in_run(runner.api, fields.watched())
        if fields.tools and fields.tool_choice:
            choose_tools(request, endpoint.shape, by_word=endpoint.chooses_by_word)
            if endpoint.prose_before_calls and require_calls(request):
                self._translation = RequiredCalls(self._translation)
        if self._in_flight.quarantine.alert:
            self._in_flight.quarantine.check(runner.key, ask)
        self._rounds, then = None, self._translation
        if then is not None and endpoint.choices_by_sequence and fields.copies > (most := runner.spec.parallel):
            self._translation = self._rounds = ChoiceRounds(request, fields.copies, most, then)
        self._send(lease, request, fresh=fresh)

    def _limit(self, lease: Lease, request: EngineRequest, shape: ApiShape) -> None:
        """Puts the request within the limits of the model and of the API key, and begins their time limit. Raises
        `BadRequest`."""
        key = self.ask.head.key
        limits = lease.limits if key is None else lease.limits.least(key.limits)
        if limits.seconds is not None:
            self._beside().limit(limits.seconds)
        if limits.tokens is not None and request.is_json:
            limit_tokens(request, shape, limits.tokens)

    def _send(self, lease: Lease, request: EngineRequest, *, fresh: bool) -> None:
        headers = self._id_line if self._trace is None else self._id_line + self._trace.line
        body, size, rest = b"", None, None
        if request.is_json:
            body = request.encoded()
        else:
            size, rest = request.pieces()
        pool = lease.runner.upstream
        data = pool.request("POST", request.path, body, headers, content_type=request.content_type, size=size)
        self._sent_at = perf_counter()
        self._upstream = pool.send(data, self, fresh=fresh, rest=rest)

    def _next_round(self, lease: Lease, rounds: ChoiceRounds, *, fresh: bool = False) -> None:
        self._send(lease, rounds.request, fresh=fresh)
        if rounds.paused and self._upstream is not None:
            self._upstream.pause()

    # modelrunner.engine.receivers.Receiver

    def splices(self, status: int, kind: bytes) -> bool:
        passes = self._sink.takes_chunks and status == 200 and self._translation is None
        return passes and not (self.ask.fields.stream and is_whole(kind))

    def on_head(self, status: int, headers: tuple[Header, ...], length: int | None, data: bytes) -> None:
        if self._is_told and not self._is_further_round:
            self._first_byte = perf_counter()
            if length == len(data):
                self._received = length, data[-TAIL:]
            elif self._dialect.counts_at_start and self.ask.fields.stream:
                self._opening = data[:TAIL]
        assert self.lease is not None
        self.lease.answered()
        if status != 200:
            self._refusal = EngineRefusal(status, headers)
            self.on_data = self._refusal.add
            self.on_data(data)
            return
        content_type = dict(headers).get(b"content-type", b"")
        if length == 0 and (not content_type or is_whole(content_type)):
            raise EngineProtocolError("the engine's answer is empty")
        if content_type.startswith(b"text/html"):
            raise EngineProtocolError(
                "the engine answered with a page of HTML: check its address, its endpoints, and what stands before it"
            )
        if self.ask.fields.stream and is_whole(content_type):
            if self._rounds is not None:
                raise EngineProtocolError(
                    "the engine gives no stream, of which answers with so many choices are made: ask for fewer"
                )
            self._translation = OnePiece(self._translation)
        elif self._rounds is not None and self._is_further_round:
            self.on_data(data)
            return
        if self._translation is None and not self._responded:
            self._passed = True
            self.on_data = self._sink.write
            passed = engine_headers(headers, self.lease.variant, self._ignored, self.ask.chosen or self.lease.preset)
            self._respond(200, passed, length, data)
        else:
            self._answer_anew(headers, length, data)

    @property
    def _is_further_round(self) -> bool:
        return self._rounds is not None and self._rounds.done > 0

    def _answer_anew(self, headers: tuple[Header, ...], length: int | None, data: bytes) -> None:
        """Begins an answer that is translated, or gets new chunks."""
        assert self.lease is not None
        translation = self._translation
        if translation is not None and translation.whole:
            self.on_data = translation.piece
            self.on_data(data)
            return
        self._passed = True
        framing = self._sink.takes_chunks and (translation is not None or (self._responded and length is not None))
        if not self._responded:  # else the client got the head while it waited
            headers = engine_headers(headers, self.lease.variant, self._ignored, self.ask.chosen or self.lease.preset)
            if translation is not None:
                headers, length = self._translated_headers(translation), None
            framing = framing and length is None
            self._respond(200, headers, length, b"")
        self._writer = ResponseWriter(self._sink, translation, framing=framing)
        self.on_data = self._writer.write
        self.on_data(data)

    def _own_headers(self) -> tuple[Header, ...]:
        if self.lease is None:
            return own_headers("", self._ignored, self.ask.chosen)
        return own_headers(self.lease.variant, self._ignored, self.ask.chosen or self.lease.preset)

    def _translated_headers(self, translation: Translation) -> tuple[Header, ...]:
        return one_line_each((*translation.headers, *self._own_headers()))

    def on_end(self) -> None:
        upstream, lease = self._upstream, self.lease
        self._upstream = None  # the next request may have it
        assert upstream is not None
        assert lease is not None
        if self._rounds is not None and self._refusal is None and self._rounds.go_on():
            self._next_round(lease, self._rounds)
            return
        if self._is_told and not self._received[0]:
            self._received = upstream.received
        if self._in_flight.quarantine.alert:
            self._in_flight.quarantine.answered(lease.runner.key, self.ask)
        try:
            if self._refusal is not None:
                raise EngineRefused(self._refusal)
            if self._writer is not None:
                self._writer.end()
            elif self._translation is not None:
                data = self._translation.end()
                self._respond(200, self._translated_headers(self._translation), len(data), data)
        except EngineRefused as refused:
            self._do(self._refuse_as_the_engine(refused.refusal, lease))
        except ModelRunnerError as error:
            self._refuse(error)
        else:
            self._close()
            self._sink.finish()

    def on_failure(self, error: OSError | EngineProtocolError) -> None:
        upstream, lease = self._upstream, self.lease
        assert upstream is not None
        assert lease is not None
        if upstream.reused and not upstream.answered and perf_counter() < self._sent_at + _STALE:
            # It had been idle, and closed just as it was used: nothing was lost.
            try:
                if self._rounds is not None and self._is_further_round:
                    self._next_round(lease, self._rounds, fresh=True)
                else:
                    self._begin(lease, fresh=True)
            except ModelRunnerError as refused:
                self._refuse(refused)
        elif self._passed:
            self._do(self._break_off(error, lease))
        else:
            self._do(self._recover(error, lease, untouched=self._translation is not None or not upstream.begun))

    # when things go wrong

    async def _recover(self, error: OSError | EngineProtocolError, lease: Lease, *, untouched: bool) -> None:
        """Handles a failure before the client got any byte. If the engine died before its first byte, the request is
        asked again, of a new runner."""
        failure = await self._in_flight.quarantine.blame(lease, self.ask, error)
        lease.release()
        if isinstance(lease.runner.failure, HostLost):
            self._lost += 1
            again = self._lost < _LOST_HOSTS
        else:
            again = lease.crashes + 1 < lease.tries
        again = again and untouched and self.ask.head.route.runner is None
        if lease.runner.failure is None or not again:
            raise failure
        self.lease = self._refusal = None
        await self._wait(lease)

    async def _refuse_as_the_engine(self, refusal: EngineRefusal, lease: Lease) -> None:
        error = await refusal.error(lease.runner.request_error)
        shorter = None
        if isinstance(error, ContextTooLong):
            shorter = await self._dialect.shortened(self.ask, lease.runner, error)
            error.param = _LONG.get(self.ask.head.route.pattern.rpartition("/v1/")[2], error.param)
        if shorter is None:
            self._refuse(error)
        elif not self._over:
            self.ask, self._refusal, self._received = shorter, None, (0, b"")
            self._begin(lease)

    async def _break_off(self, error: OSError | EngineProtocolError, lease: Lease) -> None:
        """Ends an answer in its middle."""
        self._refuse(await self._in_flight.quarantine.blame(lease, self.ask, error))

    # answers of our own

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

    def _refuse(self, error: ModelRunnerError) -> None:
        """Ends the request with an error: as its status or, if the head of a stream is out, as its last event where one
        can stand. Many clients drop what they have not read of an answer that is cut, and the event with it."""
        if self._over:
            return
        self._error = error
        if self._responded:
            if self.is_between_events():
                self._say(self._dialect.error_event(error, self.ask.request_id))
                self._end_stream(failed=True)
            else:
                self._close()
                self._sink.cut()
            return
        headers, body = self._dialect.error(error, self.ask.request_id)
        self._respond(error.status, headers, len(body), body)
        self._finish()

    def is_between_events(self) -> bool:
        """For an answer whose head is out: True if it is a stream that an event of our own can follow. Asked only once
        if the sink takes chunks."""
        upstream = self._upstream
        return not self._passed or self._translation is not None or upstream is None or upstream.at_event_boundary()

    # the end

    def _end_stream(self, *, failed: bool = False) -> None:
        """Ends a stream after an event of our own."""
        if self._sink.takes_chunks:
            self._sink.write(b"0\r\n\r\n")
        self._finish(failed=failed)

    def _finish(self, *, failed: bool = False) -> None:
        self._close()
        self._sink.finish(failed=failed)

    def _respond(self, status: int, headers: tuple[Header, ...], length: int | None, data: bytes) -> None:
        self._responded, self._status = True, status
        lease, arrived = self.lease, self.ask.arrived
        if lease is None:
            timing = server_timing(perf_counter() - arrived, 0.0, 0.0)
        else:
            ours = self._asked_at - arrived - lease.waited
            timing = server_timing(lease.waited - lease.loaded, lease.loaded, ours)
        self._sink.respond(status, headers, self._id_line + timing, length, data)

    def _close(self) -> None:
        """Gives back what the request held. Called once, by whatever ends it."""
        self._over = True
        if self._side is not None:
            self._side.stop()
        if self.lease is not None:
            if self._upstream is not None:
                self.lease.abandon(self._upstream, hold_place(self.ask.counted))
            else:
                self.lease.release()
        self._in_flight.end(self, is_told=self._is_told)
