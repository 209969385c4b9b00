"""The arithmetic of memory within one plan."""

import operator
from collections.abc import Iterable, Sequence

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
    """`free` is what no runner counts for, `coming` what leaving runners still hold, `claimed` what older requests wait
    for. A younger request starts only in what the older ones leave over, so that a large model is not starved by small
    ones."""

    def __init__(self, budget: RequiredMemory, slots: Sequence[Slot], groups: Iterable[Group]) -> None:
        needs = [need for group in groups for need in group.needs]
        needs += [slot.other for slot in slots if slot.other is not None]
        self._devices = max(len(m.vram) for m in (budget, *(s.memory for s in slots), *needs))
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
        """The slot's memory will be free in a while."""
        self.coming = add(self.coming, self.vector(slot.memory))

    def stays(self, slot: Slot) -> None:
        """The slot's drain was taken back."""
        self.coming = subtract(self.coming, self.vector(slot.memory))

    def take(self, need: Vector) -> None:
        self.free = subtract(self.free, need)

    def claim(self, need: Vector) -> None:
        self.claimed = add(self.claimed, need)

    def over(self) -> Vector:
        """What is left over once everything on its way has come and every claim is met; negative where it is not."""
        return subtract(add(self.free, self.coming), self.claimed)

    def shortage(self, need: Vector) -> Vector:
        """What is missing of `need` even then."""
        return tuple([max(0, n - left) if n > 0 else 0 for n, left in zip(need, self.over(), strict=True)])

    def can_take(self, need: Vector) -> bool:
        """Free now, and not what an older request waits for."""
        return covers(self.free, need) and covers(self.over(), need)


def raised(memory: RequiredMemory, most: Vector) -> RequiredMemory:
    """A quarter more, as far as there is so much."""

    def more(size: int, limit: int) -> int:
        return max(size, min(size + size // 4, limit))

    return RequiredMemory(more(memory.ram, most[0]), tuple(map(more, memory.vram, most[1:])), memory.shared)
