"""The rates of a pull, as a whole and for each file, and the time that remains at that rate."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

from modelrunner.progress import WorkProgress

_WINDOW = 5.0  # seconds


class RateMeter:
    """The rates of one pull. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._phase = ""
        self._meters: defaultdict[str, _ByteMeter] = defaultdict(_ByteMeter)

    def measured(self, line: WorkProgress) -> WorkProgress:
        """Returns the line with its rates."""
        if line.phase != self._phase:
            self._phase = line.phase
            self._meters.clear()
        now, file = self._clock(), line.file
        if file is not None:
            file = replace(file, rate=self._meters[file.id].rate(now, file.current))
        return replace(line, rate=self._meters[""].rate(now, line.current), file=file)


class _ByteMeter:
    """Bytes per second over the last seconds. Bytes of an earlier attempt do not count."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def rate(self, now: float, current: int) -> float:
        if self._samples and current < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((now, current))
        while now - self._samples[0][0] > _WINDOW and len(self._samples) > 2:
            self._samples.popleft()
        began, at_first = self._samples[0]
        return (current - at_first) / (now - began) if now > began else 0.0
