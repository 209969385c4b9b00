"""Asks the lines of batches, in the capacity that interactive requests leave free.

One model at a time, so that each is loaded as seldom as possible: the model whose line is the oldest, until none of its
lines waits. The lines have the scheduler's batch priority. Answers are written while the next lines are asked.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection

from modelrunner.batches.asking import Asker, Pace
from modelrunner.batches.batch import Batch, BatchState, Line
from modelrunner.batches.batchstore import BatchStore, LineAnswer
from modelrunner.gateway.request.pipeline import Pipeline

log = logging.getLogger(__name__)

AT_ONCE = 32
"""Lines under way: more than most engines answer at once, so that none of them waits for us."""
_GROUPS = 2  # of embeddings that are under way: so the engine never waits
_READ = 2 * AT_ONCE  # lines that are read from the store at once, when fewer are left
_MOST_UNWRITTEN = 256  # answers; more are not asked for before these are written
_LOOK = 1.0  # seconds between two looks at the batches: one may have expired
_PAUSE = 1.0  # seconds after a fault
_JUMP = 60.0  # seconds by which the clock runs ahead of the time that has passed: it was set, or the machine slept
_GATHER = 0.1  # seconds in which further answers join one transaction, which takes a processor for milliseconds
_EMBEDDINGS = "/v1/embeddings"


class _AskedTogether:
    """Lines that were asked at once: `left` of them are under way."""

    def __init__(self, lines: Collection[Line], began: float) -> None:
        self.size = self.left = len(lines)
        self.began = began


class BatchWorker:
    """`look` is called after a batch was made or cancelled. `clock` is as that of `BatchStore`."""

    def __init__(self, store: BatchStore, pipeline: Pipeline, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._asker = Asker(pipeline, clock)
        self._started = clock() - time.monotonic()  # a clock that is behind is set while the daemon runs
        self._pace = Pace()
        self._wake = asyncio.Event()
        self._news = True
        self._looked = float("-inf")
        self._batches: dict[str, Batch] = {}
        self._model = ""
        self._lines: deque[Line] = deque()  # of this model, the next ones to ask
        self._read: dict[str, int] = {}  # the number of the last line of each batch that was read for this model
        self._has_more = False  # there may be lines of this model that were not read
        self._asking: dict[asyncio.Task[LineAnswer | None], tuple[Line, _AskedTogether]] = {}
        self._answers: list[LineAnswer] = []  # not written
        self._writing: asyncio.Task[None] | None = None
        self._ended = 0.0  # when the last group did

    def look(self) -> None:
        self._news = True
        self._wake.set()

    async def run(self) -> None:
        """Works until it is cancelled; the lines that are under way then are asked again by the next daemon."""
        try:
            while True:
                self._wake.clear()
                try:
                    await self._step()
                except Exception:
                    log.exception("a step of the batches failed")
                    await asyncio.sleep(_PAUSE)  # a full disk stays full for a while
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK if self._batches or self._answers else None):
                        await self._wake.wait()
        finally:
            tasks = [*self._asking, *filter(None, [self._writing])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._answers:
                with contextlib.suppress(Exception):  # else the next daemon asks them again
                    await asyncio.to_thread(self._store.record, self._answers)

    async def _step(self) -> None:
        self._collect()
        if not self._news:
            self._ask_more()  # first of all, so that the engine does not wait for SQLite
        if self._answers and self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="answers of batches")
        is_empty = not (self._lines or self._asking or self._answers)
        if self._news or is_empty or time.monotonic() >= self._looked + _LOOK:
            await self._look_around()
        if len(self._lines) < _READ and self._has_more:
            await self._read_more()
        if is_empty and not self._lines:
            await self._next_model()
        self._ask_more()

    def _collect(self) -> None:
        """Collects the answers of the tasks that ended."""
        for task in [task for task in self._asking if task.done()]:
            line, group = self._asking.pop(task)
            group.left -= 1
            if not group.left:
                now = time.monotonic()
                self._pace.note(now - max(group.began, self._ended), group.size)
                self._ended = now
            if task.cancelled():
                continue
            if (answer := _answer_of(task, line)) is not None:
                self._answers.append(answer)
            elif line.batch in self._batches:
                self._lines.appendleft(line)

    async def _write(self) -> None:
        """Writes all answers, those included that come meanwhile."""
        try:
            while self._answers:
                await asyncio.sleep(_GATHER)
                writing = self._answers[:]
                try:
                    await asyncio.to_thread(self._store.record, writing)
                except Exception:  # they are kept, and written later
                    log.exception("answers of batches cannot be written")
                    await asyncio.sleep(_PAUSE)
                else:
                    del self._answers[: len(writing)]
        finally:
            self._writing = None
            self._wake.set()

    async def _look_around(self) -> None:
        """Ends batches, and finds new ones."""
        self._news, self._looked = False, time.monotonic()
        if (jump := self._clock() - self._looked - self._started) > _JUMP:
            log.warning("the clock was set forward by %.0f s: batches get as much more time", jump)
            await asyncio.to_thread(self._store.postpone, jump)
            self._started += jump
        self._batches = {batch.id: batch for batch in await asyncio.to_thread(self._store.unfinished)}
        self._lines = deque(line for line in self._lines if self._is_open(line.batch))
        under_way = {line.batch for line, _ in self._asking.values()} | {one.line.batch for one in self._answers}
        under_way |= {line.batch for line in self._lines}
        for batch in list(self._batches.values()):
            if not self._is_open(batch.id):
                self._stop(batch)
            elif batch.completed + batch.failed < batch.total:
                continue
            if batch.id not in under_way:
                await self._finish(batch)
        self._has_more = bool(self._model)

    async def _finish(self, batch: Batch) -> None:
        try:
            over = await asyncio.to_thread(self._store.finish, batch)
        except Exception:  # it is tried again, and the others go on
            log.exception("batch %s cannot be ended", batch.id)
            return
        del self._batches[batch.id]
        log.info("batch %s is %s: %d answers, %d errors", over.id, over.status, over.completed, over.failed)

    async def _read_more(self) -> None:
        after = {id: self._read.get(id, 0) for id in self._batches if self._is_open(id)}
        lines = await asyncio.to_thread(self._store.waiting, self._model, after, _READ)
        for line in lines:
            self._read[line.batch] = line.number
        self._lines.extend(lines)
        self._has_more = len(lines) == _READ

    async def _next_model(self) -> None:
        """Finds a model for which lines wait, once none is under way."""
        self._model, self._has_more = "", False
        for model in await asyncio.to_thread(self._store.models) if self._batches else ():
            self._model, self._read = model, {}
            await self._read_more()
            if self._lines:
                return

    def _ask_more(self) -> None:
        while self._lines and len(self._answers) < _MOST_UNWRITTEN:
            first = self._lines[0]
            if not self._is_open(first.batch):
                self._lines.popleft()
                continue
            batch = self._batches[first.batch]
            together = batch.endpoint == _EMBEDDINGS
            count = self._pace.group() if together else 1
            if len(self._asking) + count > (_GROUPS * count if together else AT_ONCE):
                return
            self._ask([self._lines.popleft() for _ in range(min(count, len(self._lines)))])

    def _ask(self, lines: Collection[Line]) -> None:
        group, interceptor = _AskedTogether(lines, time.monotonic()), self._asker.together()
        for line in lines:
            task = asyncio.create_task(
                self._asker.ask(line, self._batches[line.batch], interceptor), name=f"{line.batch} {line.number}"
            )
            task.add_done_callback(lambda _: self._wake.set())
            self._asking[task] = line, group

    def _stop(self, batch: Batch) -> None:
        """Gives up the lines of a batch that are under way."""
        for task, (line, _) in self._asking.items():
            if line.batch == batch.id:
                task.cancel()

    def _is_open(self, id: str) -> bool:
        """Returns True while lines of the batch are to be asked."""
        batch = self._batches.get(id)
        return batch is not None and batch.status is BatchState.IN_PROGRESS and self._clock() < batch.expires


def _answer_of(task: asyncio.Task[LineAnswer | None], line: Line) -> LineAnswer | None:
    """Returns the answer of a task that ended; a fault of ours is logged, and becomes the line's answer."""
    if (fault := task.exception()) is None:
        return task.result()
    log.error("line %d of %s", line.number, line.batch, exc_info=fault)
    return LineAnswer(line, 500, b'"a fault of modelrunner; its log has more"', "")
