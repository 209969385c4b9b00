"""The arithmetic of memory within one plan, and model files that several runners map but the kernel holds once."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace

from modelrunner.scheduler.state import Group, Phase, Slot
from modelrunner.types import RequiredMemory

# Main memory first, then each device's; all vectors of one plan are equally long.
Vector = tuple[int, ...]


def add(a: Vector, b: Vector) -> Vector:
    return tuple(map(operator.add, a, b))


def subtract(a: Vector, b: Vector) -> Vector:
    return tuple(map(operator.sub, a, b))


def covers(a: Vector, b: Vector) -> bool:
    """True if every figure of `b` that asks for something is at most the one of `a`."""
    for x, y in zip(a, b):  # noqa: B905, SIM110 - all() takes twice as long, and this is most of a plan's time
        if x < y > 0:
            return False
    return True


def total(vectors: Iterable[Vector], none: Vector) -> Vector:
    return tuple(map(sum, zip(none, *vectors, strict=True)))


class Room:
    """`free` is the budget that no runner counts for, `coming` what leaving runners still hold, `claimed` what requests
    earlier in line wait for. A request later in line starts only in what those leave over, so that small models do not
    starve a large one."""

    def __init__(
        self,
        budget: RequiredMemory,
        slots: Sequence[Slot],
        groups: Iterable[Group],
        more: Iterable[RequiredMemory] = (),
    ) -> None:
        needs = [need for group in groups for need in group.needs]
        self._devices = max(len(m.vram) for m in (budget, *(s.memory for s in slots), *needs, *more))
        self.budget = self.vector(budget)
        self.none = (0,) * (self._devices + 1)
        self.claimed = self.none
        self.free = subtract(self.budget, self.total(slots))
        self.coming = self.total(s for s in slots if s.phase in (Phase.DRAINING, Phase.STOPPING))

    def vector(self, memory: RequiredMemory) -> Vector:
        if not self._devices:
            return (memory.ram,)
        return (memory.ram, *memory.vram, *(0,) * (self._devices - len(memory.vram)))

    def total(self, slots: Iterable[Slot]) -> Vector:
        return total([self.vector(slot.memory) for slot in slots], self.none)

    def leaves(self, slot: Slot) -> None:
        """The slot's memory will be free once its process is gone."""
        self.coming = add(self.coming, self.vector(slot.memory))

    def take(self, need: Vector) -> None:
        self.free = subtract(self.free, need)

    def claim(self, need: Vector) -> None:
        self.claimed = add(self.claimed, need)

    def over(self) -> Vector:
        """What remains once leaving runners are gone and every claim is met; negative where a claim is not met."""
        return subtract(add(self.free, self.coming), self.claimed)

    def shortage(self, need: Vector) -> Vector:
        """What is missing of `need` even once leaving runners are gone."""
        return tuple([max(0, n - left) if n > 0 else 0 for n, left in zip(need, self.over(), strict=True)])

    def can_take(self, need: Vector) -> bool:
        """True if `need` is free now and no request earlier in line waits for it."""
        return covers(self.free, need) and covers(self.over(), need)


def raised(memory: RequiredMemory, most: Vector) -> RequiredMemory:
    """A quarter more memory, but not beyond `most`."""

    def more(size: int, limit: int) -> int:
        return max(size, min(size + size // 4, limit))

    return RequiredMemory(more(memory.ram, most[0]), tuple(map(more, memory.vram, most[1:])), memory.shared)


def counted_once(slots: Iterable[Slot], groups: Iterable[Group]) -> tuple[tuple[Slot, ...], tuple[Group, ...]]:
    """Counts a model's files for the oldest of its runners only; later runners of the model, running or planned, count
    their private memory. `slots` are oldest first; when the oldest has ended, the next one counts for the files."""
    counted: dict[str, int] = {}
    once = []
    for slot in slots:
        model = slot.key.model_id
        once.append(slot._replace(memory=own(slot.memory, counted[model])) if model in counted else slot)
        if slot.phase is not Phase.ENDED:
            counted[model] = max(slot.memory.shared, counted.get(model, 0))
    return tuple(once), tuple(_lighter(group, counted.get(group.key.model_id, 0)) for group in groups)


def _lighter(group: Group, counted: int) -> Group:
    return replace(group, needs=tuple(own(need, counted) for need in group.needs)) if counted else group


def own(memory: RequiredMemory, counted: int) -> RequiredMemory:
    """`memory` without the part of its files, in bytes, that other runners count for."""
    shared = min(memory.shared, counted)
    return replace(memory, ram=memory.ram - shared, shared=memory.shared - shared)


def whole(memory: RequiredMemory, shared: int) -> RequiredMemory:
    """Undoes `own`: `memory` with its `shared` bytes of files again."""
    return replace(memory, ram=memory.ram + shared - memory.shared, shared=shared)
