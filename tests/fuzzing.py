"""The time and the memory of inputs that nobody wrote on purpose, each within what its size allows."""

import time
import tracemalloc
from collections.abc import Callable

PER_KILOBYTE = 0.004  # seconds of processor: more than ten times of what a whole file takes on a slow machine
START = 0.1  # seconds for a first import, a collection of garbage and the like
PER_BYTE = 100  # bytes of memory at the most while an input is read
START_MEMORY = 4 << 20  # bytes: buffers of a fixed size, and what a first import leaves


class Figures:
    """What the inputs of one test took: how many they were, and the most of a single one."""

    def __init__(self) -> None:
        self.inputs = 0
        self.seconds = 0.0
        self.memory = 0

    def take(self, work: Callable[[], object], size: int) -> None:
        """Asserts that `work` on an input of `size` bytes is within bounds. Its time is the least of three: a
        collection of garbage, or what else the machine does, adds to one of them."""
        usual = PER_KILOBYTE * max(size, 1024) / 1024
        times: list[float] = []
        while not times or (times[-1] >= usual and len(times) < 3):
            began = time.thread_time()
            work()
            times.append(time.thread_time() - began)
        tracemalloc.start()
        try:
            work()
            memory = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        self.inputs += 1
        self.seconds = max(self.seconds, min(times) * 1024 / max(size, 1024))
        self.memory = max(self.memory, memory)
        assert min(times) < START + usual
        assert memory < START_MEMORY + PER_BYTE * size

    def __str__(self) -> str:
        most = f"{1000 * self.seconds:.2f} ms per KiB, {self.memory / (1 << 20):.2f} MiB"
        return f"{self.inputs} inputs, at the most {most}"
