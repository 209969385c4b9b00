"""The memory of one plan: what is free, what leaving runners give back, and what is reserved. The files of a model,
which several runners map but the kernel holds once, count once. Pure."""

import operator
from collections.abc import Iterable
from dataclasses import replace

from modelrunner.scheduler.state import Phase, Slot
from modelrunner.types import RequiredMemory, RunnerKey

# Bytes of main memory, then of each device; all vectors of one plan are equally long.
Vector = tuple[int, ...]


def add(a: Vector, b: Vector) -> Vector:
    return tuple(map(operator.add, a, b))


def subtract(a: Vector, b: Vector) -> Vector:
    return tuple(map(operator.sub, a, b))


def covers(a: Vector, b: Vector) -> bool:
    """True if every positive figure of `b` is at most the one of `a`."""
    for x, y in zip(a, b):  # noqa: B905, SIM110 - all() takes twice as long, and this is most of a plan's time
        if x < y > 0:
            return False
    return True


class Allocation:
    """`free` is the budget that no runner counts for, `releasing` what leaving runners still hold, `reserved` what
    requests earlier in line wait for. A later request gets only what those leave over, so that small models do not
    starve a large one.

    `slots` are oldest first: the oldest runner of a model counts for its files, every other one and every start for
    what they do not have in common. `memories` are further figures that will be asked about."""

    def __init__(self, budget: RequiredMemory, slots: Iterable[Slot], memories: Iterable[RequiredMemory] = ()) -> None:
        live = [slot for slot in slots if slot.phase is not Phase.ENDED]
        devices = [len(memory.vram) for memory in (budget, *memories)]
        self._devices = max(devices + [len(slot.memory.vram) for slot in live])
        self._files: dict[str, int] = {}  # bytes of each model's files that a runner counts for
        self._counted: dict[RunnerKey, int] = {}  # of those of its model, what older runners count for
        for slot in live:
            if slot.memory.shared:
                self._counted[slot.key] = self._files.get(slot.key.model_id, 0)
                self._map(slot.key, slot.memory)
        self.releasing = self.reserved = (0,) * (self._devices + 1)
        self.budget = self.free = self._vector(budget)
        for slot in live:
            self.free = subtract(self.free, self.size(slot))
            if slot.phase in (Phase.DRAINING, Phase.STOPPING):
                self.release(slot)

    def size(self, slot: Slot) -> Vector:
        """What the runner counts for."""
        return self._vector(_own(slot.memory, self._counted.get(slot.key, 0)))

    def need(self, key: RunnerKey, memory: RequiredMemory) -> Vector:
        """What a new runner of the key would count for."""
        return self._vector(_own(memory, self._files.get(key.model_id, 0)))

    def start(self, key: RunnerKey, memory: RequiredMemory) -> bool:
        """Takes the memory of a new runner, as `take` does."""
        taken = self.take(self.need(key, memory))
        if taken and memory.shared:
            self._map(key, memory)
        return taken

    def take(self, need: Vector) -> bool:
        """Takes `need` if it is free and not reserved. Returns whether it did."""
        if not (covers(self.free, need) and covers(self._unreserved(), need)):
            return False
        self.free = subtract(self.free, need)
        return True

    def release(self, slot: Slot) -> None:
        """The slot's memory will be free once its process is gone."""
        self.releasing = add(self.releasing, self.size(slot))

    def reserve(self, need: Vector) -> None:
        self.reserved = add(self.reserved, tuple([max(0, n) for n in need]))

    def shortage(self, need: Vector) -> Vector:
        """What is missing of `need` even once leaving runners are gone."""
        return tuple([max(0, n - left) if n > 0 else 0 for n, left in zip(need, self._unreserved(), strict=True)])

    def _unreserved(self) -> Vector:
        """What is left over once leaving runners are gone and every reservation is met; may be negative."""
        return subtract(add(self.free, self.releasing), self.reserved)

    def _vector(self, memory: RequiredMemory) -> Vector:
        if not self._devices:
            return (memory.ram,)
        return (memory.ram, *memory.vram, *(0,) * (self._devices - len(memory.vram)))

    def _map(self, key: RunnerKey, memory: RequiredMemory) -> None:
        self._files[key.model_id] = max(memory.shared, self._files.get(key.model_id, 0))


def raised(memory: RequiredMemory, most: Vector) -> RequiredMemory:
    """A quarter more memory, but not beyond `most`."""

    def more(size: int, limit: int) -> int:
        return max(size, min(size + size // 4, limit))

    return RequiredMemory(more(memory.ram, most[0]), tuple(map(more, memory.vram, most[1:])), memory.shared)


def _own(memory: RequiredMemory, counted: int) -> RequiredMemory:
    """`memory` without the part of its files, in bytes, that other runners count for."""
    return replace(memory, ram=memory.ram - min(memory.shared, counted)) if counted else memory
