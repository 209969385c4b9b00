"""Asks the lines of batches, in what interactive requests leave free.

One model at a time, so that each is loaded as seldom as possible: the model whose line is the oldest, until none of its
lines waits. The lines have the scheduler's batch priority.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from modelrunner.batches.batch import Batch, Line
from modelrunner.batches.store import BatchStore, LineAnswer
from modelrunner.errors import ModelRunnerError, Unauthorized
from modelrunner.gateway.interfaces import Terms
from modelrunner.gateway.pipeline import Pipeline
from modelrunner.gateway.render import new_request_id
from modelrunner.gateway.routes import match
from modelrunner.http.answers import Header

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Lines under way: more than most engines answer at once, so that none of them waits for us."""
_AGAIN = (429, 503)  # statuses of a request that was turned away for now
_LOOK = 1.0  # seconds between two looks at the clock, for batches that expire
_PAUSE = 1.0  # seconds before a line that was turned away is asked again
_PATIENCE = 900.0  # seconds after which a line that is turned away again and again gets its error as its answer


class BatchWorker:
    """`look` is called after a batch was made or cancelled."""

    def __init__(self, store: BatchStore, pipeline: Pipeline, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._pipeline = pipeline
        self._clock = clock
        self._news = asyncio.Event()
        self._endpoints: dict[str, Batch] = {}
        self._asking: dict[asyncio.Task[LineAnswer | None], Line] = {}
        self._model = ""
        self._turned_away: dict[tuple[str, int], float] = {}  # when it was for the first time

    def look(self) -> None:
        self._news.set()

    async def run(self) -> None:
        """Works until it is cancelled; the lines that are under way then are asked again by the next daemon."""
        try:
            while True:
                self._news.clear()
                try:
                    idle = await self._step()
                except Exception:
                    log.exception("a step of the batches failed")
                    await asyncio.sleep(_PAUSE)  # a full disk stays full for a while
                    continue
                if idle and not self._asking:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_LOOK if self._endpoints else None):
                            await self._news.wait()
                elif idle:
                    news = asyncio.ensure_future(self._news.wait())
                    await asyncio.wait((*self._asking, news), timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED)
                    news.cancel()
        finally:
            for task in self._asking:
                task.cancel()
            await asyncio.gather(*self._asking, return_exceptions=True)

    async def _step(self) -> bool:
        """Records answers, ends batches, asks more lines. Returns False if there may be more to do at once."""
        ended = [task for task in self._asking if task.done()]
        answers = [answer for task in ended if (answer := _answer_of(task, self._asking[task])) is not None]
        await asyncio.to_thread(self._store.record, answers)
        for task in ended:
            del self._asking[task]
        batches = await asyncio.to_thread(self._store.unfinished)
        self._endpoints = {batch.id: batch for batch in batches}
        under_way = {line.batch for line in self._asking.values()}
        for batch in batches:
            given_up = batch.status == "cancelling" or self._is_late(batch)
            if given_up and batch.id in under_way:
                self._stop(batch)
            elif batch.id not in under_way and (given_up or batch.completed + batch.failed == batch.total):
                try:
                    over = await asyncio.to_thread(self._store.finish, batch)
                except Exception:  # it is tried again, and the others go on
                    log.exception("batch %s cannot be ended", batch.id)
                    continue
                log.info("batch %s is %s: %d answers, %d errors", over.id, over.status, over.completed, over.failed)
                return False
        return not await self._ask_more()

    async def _ask_more(self) -> bool:
        """Returns whether it asked a line."""
        free = AT_ONCE - len(self._asking)
        open_batches = [b.id for b in self._endpoints.values() if b.status == "in_progress" and not self._is_late(b)]
        if free <= 0 or not open_batches:
            return False
        models = await asyncio.to_thread(self._store.models)
        if self._model not in models and not self._asking:
            self._model = next(iter(models), "")
        busy = set(self._asking.values())
        found = await asyncio.to_thread(self._store.waiting, self._model, open_batches, free + len(busy))
        fresh = [line for line in found if line not in busy][:free]
        if not fresh and not busy and models:
            self._model = next((model for model in models if model != self._model), "")
        for line in fresh:
            self._asking[asyncio.create_task(self._ask(line), name=f"{line.batch} {line.number}")] = line
        return bool(fresh)

    async def _ask(self, line: Line) -> LineAnswer | None:
        """Asks one line; None for one that is to be asked again."""
        request_id = new_request_id()
        batch = self._endpoints[line.batch]
        route = match(batch.endpoint)
        assert route is not None
        sink = _AnswerSink()
        key = None
        try:
            key = self._pipeline.keys.owner(batch.owner) if self._pipeline.keys and batch.owner else None
            if batch.owner and key is None:
                raise Unauthorized(f"the API key {batch.owner.partition('#')[0]}, which made the batch, was revoked")
            caller = key.key.name if key is not None else "batch"
            terms = Terms(route, None, None, caller, True, False, False, key)
            self._pipeline.buffer(len(line.body), len(line.body))
            try:
                exchange = self._pipeline.exchange(terms, line.body, request_id, sink)
            except ModelRunnerError:
                self._pipeline.unbuffer(len(line.body))
                raise
        except ModelRunnerError as error:
            self._pipeline.left(key, "", id(sink))
            if error.status in _AGAIN and self._may_try_again(line):
                await asyncio.sleep(error.retry_after or _PAUSE)
                return None
            return LineAnswer(line, error.status, route.dialect.error(error, request_id)[1], request_id)
        exchange.start()
        try:
            await sink.over
        except asyncio.CancelledError:
            exchange.cancel()
            raise
        finally:
            self._pipeline.left(key, "", id(sink))
        if sink.status in _AGAIN and not sink.is_final and self._may_try_again(line):
            await asyncio.sleep(sink.retry_after or _PAUSE)
            return None
        self._turned_away.pop((line.batch, line.number), None)
        return LineAnswer(line, sink.status or 502, bytes(sink.body), request_id)

    def _stop(self, batch: Batch) -> None:
        """Gives up the lines of a batch that are under way."""
        for task, line in self._asking.items():
            if line.batch == batch.id:
                task.cancel()

    def _may_try_again(self, line: Line) -> bool:
        now = self._clock()
        return now < self._turned_away.setdefault((line.batch, line.number), now) + _PATIENCE

    def _is_late(self, batch: Batch) -> bool:
        return self._clock() >= batch.expires


def _answer_of(task: asyncio.Task[LineAnswer | None], line: Line) -> LineAnswer | None:
    """The answer of a task that ended; a fault of ours is logged, and is the line's answer."""
    if task.cancelled():
        return None
    if (fault := task.exception()) is None:
        return task.result()
    log.error("line %d of %s", line.number, line.batch, exc_info=fault)
    return LineAnswer(line, 500, b'"a fault of modelrunner; its log has more"', "")


class _AnswerSink:
    """Keeps an answer whole. `over` is done at its end; a status of 0 means that it was cut."""

    takes_chunks = False

    def __init__(self) -> None:
        self.status = 0
        self.retry_after = 0.0
        self.is_final = False
        self.body = bytearray()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def respond(self, status: int, headers: tuple[Header, ...], own: bytes, length: int | None, data: bytes) -> None:
        self.status = status
        told = dict(headers)
        self.retry_after = float(told.get(b"Retry-After", b"0"))
        self.is_final = b"x-should-retry" in told
        self.body += data

    def write(self, data: bytes) -> None:
        self.body += data

    def finish(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def cut(self) -> None:
        self.status = 0
        self.finish()
