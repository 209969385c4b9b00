"""Asks a line of a batch, as a request without a client."""

import asyncio
import time
from collections.abc import Callable

from modelrunner.batches.batch import Batch, Line
from modelrunner.batches.batchstore import LineAnswer
from modelrunner.errors import EngineProtocolError, ModelRunnerError, Unauthorized
from modelrunner.gateway.calls import InferenceHead, Route
from modelrunner.gateway.dialects.assembly import BODY_TOO_LARGE, LARGEST_BODY
from modelrunner.gateway.headers import new_request_id
from modelrunner.gateway.interceptors.embedding_batcher import EmbeddingBatcher
from modelrunner.gateway.request.pipeline import Pipeline
from modelrunner.gateway.request.work import Interceptor
from modelrunner.gateway.routes import match
from modelrunner.http.answers import Header

_AGAIN = (429, 503)  # statuses of a request that was turned away for now
_PAUSE = 1.0  # seconds before a line that was turned away is asked again
_PATIENCE = 900.0  # seconds after which a line that is turned away again and again gets its error as its answer
MOST = 32
"""Embeddings that go to the engine together."""
_LONGEST = 0.25  # seconds that the engine may work for a group
_FIRST = 8.0  # lines of the first group


class Asker:
    """Asks lines with the scheduler's batch priority. `clock` is as that of `BatchStore`."""

    def __init__(self, pipeline: Pipeline, clock: Callable[[], float] = time.time) -> None:
        self._pipeline = pipeline
        self._clock = clock
        self._turned_away: dict[tuple[str, int], float] = {}  # when it was for the first time

    def together(self) -> Interceptor:
        """Returns an interceptor for embeddings that are asked in one turn of the event loop: they go to the engine
        together."""
        return EmbeddingBatcher(self._pipeline.exchanges, 0.0, MOST)

    async def ask(self, line: Line, batch: Batch, interceptor: Interceptor) -> LineAnswer | None:
        """Asks one line. Returns None if it must be asked again."""
        request_id = new_request_id()
        route = _route(batch)
        sink = _AnswerSink()
        try:
            key = self._pipeline.keys.owner(batch.owner) if self._pipeline.keys and batch.owner else None
            if batch.owner and key is None:
                raise Unauthorized(f"the API key {batch.owner.partition('#')[0]}, which made the batch, was revoked")
            caller = key.key.name if key is not None else "batch"
            head = InferenceHead(route, None, None, caller, True, False, False, key, owner=batch.owner)
            self._pipeline.in_flight.buffer(head.labels.key, len(line.body), len(line.body))
            try:
                work = self._pipeline.exchange(head, line.body, request_id, sink, interceptors=(interceptor,))
            except ModelRunnerError:
                self._pipeline.in_flight.unbuffer(head.labels.key, len(line.body))
                raise
        except ModelRunnerError as error:
            if error.status in _AGAIN and self._may_try_again(line):
                await asyncio.sleep(error.retry_after or _PAUSE)
                return None
            return LineAnswer(line, error.status, route.dialect.error(error, request_id)[1], request_id)
        work.start()
        try:
            await sink.over
        except asyncio.CancelledError:
            work.cancel()
            raise
        except EngineProtocolError as error:
            work.stop(error)
            self._turned_away.pop((line.batch, line.number), None)
            return LineAnswer(line, error.status, route.dialect.error(error, request_id)[1], request_id)
        if sink.status in _AGAIN and not sink.is_final and self._may_try_again(line):
            await asyncio.sleep(sink.retry_after or _PAUSE)
            return None
        self._turned_away.pop((line.batch, line.number), None)
        return LineAnswer(line, sink.status or 502, bytes(sink.body), request_id)

    def _may_try_again(self, line: Line) -> bool:
        now = self._clock()
        return now < self._turned_away.setdefault((line.batch, line.number), now) + _PATIENCE


def _route(batch: Batch) -> Route:
    route = match(batch.endpoint)
    assert route is not None
    return route


class _AnswerSink:
    """Keeps an answer whole. `over` is done at its end; a status of 0 means that it failed after its head.
    `over` fails with an `EngineProtocolError` for an answer that is too large."""

    takes_chunks = False

    def __init__(self) -> None:
        self.status = 0
        self.retry_after = 0.0
        self.is_final = False
        self.body = bytearray()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def respond(self, status: int, headers: tuple[Header, ...], own: bytes, length: int | None, data: bytes) -> None:
        self.status = status
        fields = dict(headers)
        self.retry_after = float(fields.get(b"Retry-After", b"0"))
        self.is_final = b"x-should-retry" in fields
        self.write(data)

    def write(self, data: bytes) -> None:
        self.body += data
        if len(self.body) > LARGEST_BODY:
            self.body.clear()
            if not self.over.done():
                self.over.set_exception(EngineProtocolError(BODY_TOO_LARGE))

    def finish(self, *, failed: bool = False) -> None:
        if failed:
            self.status = 0
        if not self.over.done():
            self.over.set_result(None)

    def cut(self) -> None:
        self.finish(failed=True)


class Pace:
    """The number of embeddings of a batch that go to the engine together."""

    def __init__(self) -> None:
        self._size = _FIRST

    def group(self) -> int:
        """Returns the number of embeddings for the next group."""
        return int(self._size)

    def note(self, seconds: float, lines: int) -> None:
        """Records how long the engine worked for a group. A part of that time is the same for one line and for many, so
        the size is found by trying."""
        if seconds > _LONGEST:
            self._size = max(1.0, 0.75 * self._size)
        elif lines >= int(self._size):
            self._size = min(float(MOST), self._size + 1)
