"""The memory of one plan, on each host: the free part, the part that leaving runners give back, and the reserved part.
Several runners of a model map its files, and the kernel holds them once, so they count once. Pure."""

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import accumulate, zip_longest
from typing import Any

from modelrunner.scheduler.state import LEAVING, Phase, RunnerId, Site, Slot
from modelrunner.types import RequiredMemory, RunnerKey

# Bytes of main memory, then of each device; all vectors of one plan are equally long.
Vector = tuple[int, ...]
_NOTHING = RequiredMemory(0)


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
    count only for the rest of their memory. It will be asked about figures of `devices` devices at most. `same` is
    shared by the hosts of a plan: equal vectors of theirs are one object."""

    def __init__(
        self,
        budget: RequiredMemory,
        slots: Iterable[Slot],
        devices: int = 0,
        same: dict[Any, Any] | None = None,
    ) -> None:
        self._present = {slot.id: slot for slot in slots if slot.phase is not Phase.ENDED}
        live = self._present.values()
        self._devices = max(devices, *[len(memory.vram) for memory in (budget, *[slot.memory for slot in live])])
        self._same = {} if same is None else same
        self._rooms: tuple[Vector, Vector] | None = None
        self._files: dict[str, int] = {}  # bytes of each model's files that a runner counts for
        self._counted: dict[RunnerId, int] = {}  # of those of its model, what older runners count for
        self._computing: dict[RunnerKey, list[tuple[int, ...]]] = {}  # the devices of each key's runners that stay
        for slot in live:
            if slot.memory.shared:
                self._counted[slot.id] = self._files.get(slot.key.files, 0)
                self._map(slot.key, slot.memory)
            if slot.phase not in LEAVING and not slot.grows:
                self._computing.setdefault(slot.key, []).append(slot.option.place.devices)
        vector = self._vector(budget)
        self.budget = self._same.setdefault(vector, vector)
        self.free = self.left = reduce(subtract, map(self.size, live), self.budget)
        for slot in live:
            if slot.phase in LEAVING:
                self.release(slot)

    def size(self, slot: Slot) -> Vector:
        """The memory that the runner counts for."""
        return self._vector(slot.memory, self._counted.get(slot.id, 0) if slot.memory.shared else 0)

    def counted(self, runner: RunnerId) -> object:
        """What `total` depends on beside the memory: equal for hosts where it is the same."""
        return self if runner in self._present else self._files.get(runner.key.files, 0)

    def likeness(self, runner: RunnerId) -> object:
        """Equal for hosts that have the same room for the runner, whatever it needs."""
        if self._rooms is None:
            likeness = self.free, self.left
            self._rooms = self._same.setdefault(likeness, likeness)
        return id(self._rooms), self.counted(runner), *self._computing.get(runner.key, ())

    def beside(self, key: RunnerKey, devices: tuple[int, ...]) -> int:
        """How many runners of the key compute on one of these `devices`; without devices, on the processors. One that
        leaves, or goes once another has come, does not count."""
        there = self._computing.get(key, ())
        return sum([devices == other or not set(devices).isdisjoint(other) for other in there])

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
        self.free, self.left, self._rooms = subtract(self.free, need), subtract(self.left, need), None
        self._map(runner.key, memory)
        return True

    def has(self, need: Vector) -> bool:
        """True if it is free and not reserved."""
        return covers(self.free, need) and covers(self.left, need)

    def release(self, slot: Slot) -> None:
        """The slot's memory will be free once its process is gone."""
        self.left, self._rooms = add(self.left, self.size(slot)), None

    def reserve(self, need: Vector) -> None:
        self.left, self._rooms = subtract(self.left, need), None

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


class JointAllocation(Allocation):
    """The memory of several hosts as one: their vectors one behind the other, as they are now. What runs over several
    hosts takes its devices whole, since Ray gives them so."""

    def __init__(self, hosts: Sequence[Allocation]) -> None:
        self._hosts = hosts
        self.budget = _joined([host.budget for host in hosts])
        self.free = _joined([host.free for host in hosts])
        self.left = _joined([host.left for host in hosts])

    def counted(self, runner: RunnerId) -> object:
        """See `Allocation`."""
        return tuple([host.counted(runner) for host in self._hosts])

    def likeness(self, runner: RunnerId) -> object:
        """See `Allocation`."""
        return tuple([host.likeness(runner) for host in self._hosts])

    def beside(self, key: RunnerKey, devices: tuple[int, ...]) -> int:
        """See `Allocation`; on the first of the hosts."""
        return self._hosts[0].beside(key, devices)

    def total(self, runner: RunnerId, memory: RequiredMemory) -> Vector:
        """See `Allocation`."""
        return _joined([host.total(runner, part) for host, part in self._parts(memory)])

    def need(self, runner: RunnerId, memory: RequiredMemory) -> Vector:
        """See `Allocation`."""
        return _joined([host.need(runner, part) for host, part in self._parts(memory)])

    def start(self, runner: RunnerId, memory: RequiredMemory) -> bool:
        """See `Allocation`."""
        if not self.has(self.need(runner, memory)):
            return False
        return all(host.start(runner, part) for host, part in self._parts(memory))

    def reserve(self, need: Vector) -> None:
        """See `Allocation`."""
        for host, part in zip(self._hosts, pieces(need, [host.budget for host in self._hosts]), strict=True):
            host.reserve(part)

    def _parts(self, memory: RequiredMemory) -> Iterable[tuple[Allocation, RequiredMemory]]:
        for host, part in zip(self._hosts, memory.each, strict=True):
            yield host, _whole(part, host.budget[1:])


def _joined(vectors: Iterable[Vector]) -> Vector:
    return tuple([figure for vector in vectors for figure in vector])


def pieces(vector: Vector, sizes: Iterable[Vector]) -> Iterator[Vector]:
    """Yields the parts of a site's vector that are as long as those of its hosts."""
    begin = 0
    for end in accumulate(map(len, sizes)):
        yield vector[begin:end]
        begin = end


def limit_of(most: Mapping[str, Vector], site: Site) -> Vector | None:
    """The figures of a site, of those of each host that answers; None if one does not."""
    if isinstance(site, str):
        return most.get(site)
    vectors = [vector for host in site if (vector := most.get(host)) is not None]
    return _joined(vectors) if len(vectors) == len(site) else None


def _whole(memory: RequiredMemory, devices: Sequence[int]) -> RequiredMemory:
    """The memory with all that these devices have, of those that it names."""
    sizes = zip_longest(memory.vram, devices[: len(memory.vram)], fillvalue=0)
    return replace(memory, vram=tuple([max(size, all_of_it) if size else 0 for size, all_of_it in sizes]))


class Allocations(dict[Site, Allocation]):
    """The allocation of each host, made with these `budgets`; of several hosts, one of all together as they are now."""

    def __init__(self, there: Mapping[str, Allocation], budgets: Mapping[str, RequiredMemory]) -> None:
        super().__init__(there.items())
        self._budgets = budgets
        self._most = tuple(map(max, zip_longest(*[room.free for room in there.values()], fillvalue=0)))

    def may_be_free(self, memory: RequiredMemory) -> bool:
        """False if no host can have so much free in this plan, which gives nothing back before its end."""
        return covers(self._most, (memory.ram - memory.shared, *memory.vram))

    def __missing__(self, site: Site) -> Allocation:
        if isinstance(site, str):
            raise KeyError(site)
        return JointAllocation([self[host] for host in site])

    def parts(self, slot: Slot) -> Sequence[tuple[str, Slot]]:
        """The hosts of a runner, each with what counts there."""
        return _parts(slot, self._budgets)


def _parts(slot: Slot, budgets: Mapping[str, RequiredMemory]) -> Sequence[tuple[str, Slot]]:
    place = slot.option.place
    if not place.others:
        return ((place.host, slot),)
    there = [(host, slot.on(host)) for host in place.hosts]
    return [(host, part._replace(memory=_whole(part.memory, budgets.get(host, _NOTHING).vram))) for host, part in there]


def allocations(
    hosts: Mapping[str, RequiredMemory], slots: Iterable[Slot], memories: Iterable[RequiredMemory] = ()
) -> Allocations:
    """The allocation of each host, and of each that has runners and does not answer, which has no memory. `memories`
    are further figures that will be asked about."""
    there: defaultdict[str, list[Slot]] = defaultdict(list)
    for slot in slots:
        if not (place := slot.option.place).others:
            there[place.host].append(slot)
        else:
            for host, part in _parts(slot, hosts):
                there[host].append(part)
    devices, same = max([len(memory.vram) for memory in memories], default=0), dict[Any, Any]()
    names = dict.fromkeys((*hosts, *there))
    return Allocations(
        {name: Allocation(hosts.get(name, _NOTHING), there[name], devices, same) for name in names}, hosts
    )


def raised(memory: RequiredMemory, most: Sequence[Vector]) -> RequiredMemory:
    """A quarter more memory, but on each host not beyond its `most`."""
    first, *others = [_raised(part, limit) for part, limit in zip(memory.each, most, strict=True)]
    return replace(first, others=tuple(others)) if others else first


def _raised(memory: RequiredMemory, most: Vector) -> RequiredMemory:
    sizes = zip((memory.ram, *memory.vram), most, strict=False)
    ram, *vram = [max(size, min(size + size // 4, limit)) for size, limit in sizes]
    return RequiredMemory(ram, tuple(vram), memory.shared)
