"""Throughput and latency of the last hour, in steps of ten seconds."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator

from modelrunner import wire
from modelrunner.gateway.request.observers import LEFT, RequestRecord

STEP = 10
"""The length of a step in seconds."""
_KEPT = 3600 // STEP
_SAMPLES = 256  # the newest samples that are kept of each latency in a step


class History:
    """The steps with requests. `wall` is the time of day in Unix seconds."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._steps: deque[wire.HistoryStep] = deque(maxlen=_KEPT)
        self._begin(0)

    def add(self, record: RequestRecord) -> None:
        if (step := int(self._wall()) // STEP * STEP) != self._time:
            self._end(step)
        self._requests += 1
        self._prompt += record.tokens.prompt
        self._answer += record.tokens.answer
        if record.status == LEFT:
            return
        if record.status >= 400 or record.error:
            self._failed += 1
            return
        self._durations.append(record.duration)
        if record.first_byte is not None:
            self._firsts.append(record.first_byte)

    def __iter__(self) -> Iterator[wire.HistoryStep]:
        """Yields the steps of the last hour that have ended, oldest first."""
        self.latest()
        return iter([step for step in self._steps if step.time > self._wall() - 3600 - STEP])

    def latest(self) -> wire.HistoryStep | None:
        """Returns the last step with requests that has ended."""
        if (step := int(self._wall()) // STEP * STEP) != self._time:
            self._end(step)
        return self._steps[-1] if self._steps else None

    def _end(self, time: int) -> None:
        if self._requests:
            counts = self._requests, self._failed, self._prompt, self._answer
            latencies = *_latency(self._firsts), *_latency(self._durations)
            self._steps.append(wire.HistoryStep(self._time, *counts, *latencies))
        self._begin(time)

    def _begin(self, time: int) -> None:
        self._time = time
        self._requests = self._failed = self._prompt = self._answer = 0
        self._firsts: deque[float] = deque(maxlen=_SAMPLES)
        self._durations: deque[float] = deque(maxlen=_SAMPLES)


def _latency(times: Collection[float]) -> tuple[float | None, float | None]:
    """Returns the median and the 95th percentile."""
    ordered = sorted(times)
    if not ordered:
        return None, None
    last = len(ordered) - 1
    return round(ordered[last // 2], 4), round(ordered[int(0.95 * last)], 4)
