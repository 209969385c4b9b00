"""The processor time of a piece of work, measured so that a slow or busy machine changes nothing."""

import time
from collections.abc import Callable

_STEPS = 100_000


def cost(work: Callable[[], object]) -> float:
    """The processor time that `work` takes in this thread, as a multiple of what an empty loop of 100,000 steps takes
    right before it: 1.0 is about 2 ms on an idle machine."""
    loop = _processor_time(_empty_loop)
    return _processor_time(work) / loop


def _processor_time(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def _empty_loop() -> None:
    for _ in range(_STEPS):
        pass
