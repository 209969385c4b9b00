"""The memory of one plan, on each host: the free part, the part that leaving runners give back, and the reserved part.
Several runners of a model map its files, and the kernel holds them once, so they count once. Pure."""

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import reduce

from modelrunner.scheduler.state import LEAVING, Phase, RunnerId, RunOption, Slot
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
    """The memory of one host. `free` is the budget that no runner counts for. `left` is what is left over once leaving
    runners are gone and the requests earlier in line have what they wait for; it may be negative. A later request gets
    only that, so that small models do not starve a large one.

    `slots` are oldest first. The oldest runner of a model counts for its files; other runners and starts of the model
    count only for the rest of their memory. `memories` are further figures that will be asked about."""

    def __init__(self, budget: RequiredMemory, slots: Iterable[Slot], memories: Iterable[RequiredMemory] = ()) -> None:
        self._present = {slot.id: slot for slot in slots if slot.phase is not Phase.ENDED}
        live = self._present.values()
        self._devices = max([len(memory.vram) for memory in (budget, *memories, *[slot.memory for slot in live])])
        self._files: dict[str, int] = {}  # bytes of each model's files that a runner counts for
        self._counted: dict[RunnerId, int] = {}  # of those of its model, what older runners count for
        for slot in live:
            if slot.memory.shared:
                self._counted[slot.id] = self._files.get(slot.key.files, 0)
                self._map(slot.key, slot.memory)
        self.budget = self._vector(budget)
        self.free = self.left = reduce(subtract, map(self.size, live), self.budget)
        for slot in live:
            if slot.phase in LEAVING:
                self.release(slot)

    def size(self, slot: Slot) -> Vector:
        """The memory that the runner counts for."""
        return self._vector(slot.memory, self._counted.get(slot.id, 0) if slot.memory.shared else 0)

    def total(self, runner: RunnerId, memory: RequiredMemory) -> Vector:
        """The memory that the runner counts for as it starts with `memory`. One that falls asleep or is woken
        counts for the larger of both figures."""
        if (present := self._present.get(runner)) is None:
            return self._vector(memory, self._files.get(runner.key.files, 0))
        return self.size(present._replace(memory=present.memory.most(memory)))

    def need(self, runner: RunnerId, memory: RequiredMemory) -> Vector:
        """The part of `total` that does not count yet."""
        total, present = self.total(runner, memory), self._present.get(runner)
        return total if present is None else subtract(total, self.size(present))

    def start(self, runner: RunnerId, memory: RequiredMemory) -> bool:
        """Takes the `need` of the runner and returns True if it is free and not reserved; otherwise returns False."""
        need = self.need(runner, memory)
        if not self.has(need):
            return False
        self.free, self.left = subtract(self.free, need), subtract(self.left, need)
        self._map(runner.key, memory)
        return True

    def has(self, need: Vector) -> bool:
        """True if it is free and not reserved."""
        return covers(self.free, need) and covers(self.left, need)

    def release(self, slot: Slot) -> None:
        """The slot's memory will be free once its process is gone."""
        self.left = add(self.left, self.size(slot))

    def reserve(self, need: Vector) -> None:
        self.left = subtract(self.left, need)

    def shortage(self, need: Vector) -> Vector:
        """The part of `need` that is missing even once leaving runners are gone."""
        return tuple([max(0, n - left) if n > 0 else 0 for n, left in zip(need, self.left, strict=True)])

    def _vector(self, memory: RequiredMemory, counted: int = 0) -> Vector:
        """The figures of `memory`, without the `counted` bytes of its files that other runners count for."""
        ram = memory.ram - min(memory.shared, counted) if counted else memory.ram
        if not self._devices:
            return (ram,)
        return (ram, *memory.vram, *(0,) * (self._devices - len(memory.vram)))

    def _map(self, key: RunnerKey, memory: RequiredMemory) -> None:
        self._files[key.files] = max(memory.shared, self._files.get(key.files, 0))


def allocations(
    hosts: Mapping[str, RequiredMemory], slots: Iterable[Slot], options: Iterable[RunOption] = ()
) -> dict[str, Allocation]:
    """The allocation of each host. A host that does not answer has no memory. `options` are those that will be asked
    about."""
    there: defaultdict[str, list[Slot]] = defaultdict(list)
    sizes: defaultdict[str, list[RequiredMemory]] = defaultdict(list, {name: [] for name in hosts})
    for slot in slots:
        there[slot.option.place.host].append(slot)
    for option in options:
        sizes[option.place.host].append(option.memory)
    nothing = RequiredMemory(0)
    return {name: Allocation(hosts.get(name, nothing), there[name], sizes[name]) for name in {**sizes, **there}}


def raised(memory: RequiredMemory, most: Vector) -> RequiredMemory:
    """A quarter more memory, but not beyond `most`."""
    sizes = zip((memory.ram, *memory.vram), most, strict=False)
    ram, *vram = [max(size, min(size + size // 4, limit)) for size, limit in sizes]
    return RequiredMemory(ram, tuple(vram), memory.shared)
