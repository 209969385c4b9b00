"""Throughput and latency of the last hour, in steps of ten seconds."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from modelrunner.gateway.observers import RequestRecord

STEP = 10
"""Seconds."""
_KEPT = 3600 // STEP
_SAMPLES = 256  # of each latency in a step: the newest ones


class HistoryStep(msgspec.Struct, frozen=True):
    """What ended in the ten seconds from `time` on, in Unix seconds. `failed` counts answers with a status of 400 or
    more, and those that broke off; latencies are in seconds, None where no request was answered."""

    time: int
    requests: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    first_byte_p50: float | None
    first_byte_p95: float | None
    duration_p50: float | None
    duration_p95: float | None


class History:
    """A step without requests is left out. `wall` is the time of day in Unix seconds."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._steps: deque[HistoryStep] = deque(maxlen=_KEPT)
        self._begin(0)

    def take(self, records: Sequence[RequestRecord]) -> None:
        if (step := int(self._wall()) // STEP * STEP) != self._time:
            self._end(step)
        self._requests += len(records)
        self._prompt += sum([record.tokens.prompt for record in records])
        self._answer += sum([record.tokens.answer for record in records])
        good = [record for record in records if record.status < 400 and not record.error]
        self._failed += len(records) - len(good)
        self._durations.extend([record.duration for record in good])
        self._firsts.extend([record.first_byte for record in good if record.first_byte is not None])

    def __iter__(self) -> Iterator[HistoryStep]:
        """Yields the steps of the last hour that have ended, oldest first."""
        self.latest()
        return iter([step for step in self._steps if step.time > self._wall() - 3600 - STEP])

    def latest(self) -> HistoryStep | None:
        """Returns the last step with requests that has ended."""
        if (step := int(self._wall()) // STEP * STEP) != self._time:
            self._end(step)
        return self._steps[-1] if self._steps else None

    def _end(self, time: int) -> None:
        if self._requests:
            firsts, durations = sorted(self._firsts), sorted(self._durations)
            latencies = [_quantile(values, q) for values in (firsts, durations) for q in (0.5, 0.95)]
            counts = (self._requests, self._failed, self._prompt, self._answer)
            self._steps.append(HistoryStep(self._time, *counts, *latencies))
        self._begin(time)

    def _begin(self, time: int) -> None:
        self._time = time
        self._requests = self._failed = self._prompt = self._answer = 0
        self._firsts: deque[float] = deque(maxlen=_SAMPLES)
        self._durations: deque[float] = deque(maxlen=_SAMPLES)


def _quantile(ordered: Sequence[float], q: float) -> float | None:
    return round(ordered[int(q * (len(ordered) - 1))], 4) if ordered else None
