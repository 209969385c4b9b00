"""The arithmetic of memory within one plan, and the choice of victims."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from modelrunner.scheduler.state import Phase, Slot
from modelrunner.types import RequiredMemory

# Main memory first, then each device's; all vectors of one plan are equally long.
Vector = tuple[int, ...]


def add(a: Vector, b: Vector) -> Vector:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def subtract(a: Vector, b: Vector) -> Vector:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def covers(a: Vector, b: Vector) -> bool:
    """True if every figure of `b` that asks for something is at most the one of `a`."""
    for x, y in zip(a, b, strict=True):  # noqa: SIM110 - all() takes twice as long, and this is most of a plan's time
        if y > 0 and y > x:
            return False
    return True


def total(vectors: Iterable[Vector], none: Vector) -> Vector:
    return tuple(map(sum, zip(none, *vectors, strict=True)))


class Room:
    """`free` is what no runner counts for, `coming` what leaving runners still hold, `claimed` what older requests wait
    for. A younger request starts only in what the older ones leave over, so that a large model is not starved by small
    ones."""

    def __init__(self, budget: RequiredMemory, slots: Sequence[Slot], needs: Iterable[RequiredMemory]) -> None:
        self._devices = max(len(m.vram) for m in (budget, *(s.memory for s in slots), *needs))
        self.budget = self.vector(budget)
        self.none = (0,) * (self._devices + 1)
        self.claimed = self.none
        self.free = subtract(self.budget, self.total(slots))
        self.coming = self.total(s for s in slots if s.phase in (Phase.DRAINING, Phase.STOPPING))

    def vector(self, memory: RequiredMemory) -> Vector:
        return (memory.ram, *memory.vram, *(0,) * (self._devices - len(memory.vram)))

    def total(self, slots: Iterable[Slot]) -> Vector:
        return total((self.vector(slot.memory) for slot in slots), self.none)

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
        return tuple(max(0, n - left) if n > 0 else 0 for n, left in zip(need, self.over(), strict=True))

    def can_take(self, need: Vector) -> bool:
        """Free now, and not what an older request waits for."""
        return covers(self.free, need) and covers(self.over(), need)


class Candidate(NamedTuple):
    """A runner that may have to go for another."""

    cost: float
    size: Vector
    slot: Slot


class Pool:
    """Candidates, cheapest first, and what they hold together; for most groups a look at that is enough."""

    def __init__(self, candidates: Iterable[Candidate], none: Vector) -> None:
        self.ranked = sorted(candidates, key=lambda c: c.cost)
        self.total = total((c.size for c in self.ranked), none)
        self._none = none

    def remove(self, victims: Sequence[Candidate]) -> None:
        self.ranked = [c for c in self.ranked if c not in victims]
        self.total = total((c.size for c in self.ranked), self._none)


def choose(ranked: Sequence[Candidate], shortage: Vector) -> list[Candidate]:
    """The cheapest candidates that together cover `shortage`, none of which could be spared; all of them together must.
    Cheapest first until it is enough, then without those that turned out to be needless, the dearest first; or the
    single one that costs less than that set. Not always the optimum of the knapsack problem that this is, but never
    more victims than the shortage asks for."""
    victims: list[Candidate] = []
    missing = shortage
    for candidate in ranked:
        if not any(m > 0 for m in missing):
            break
        victims.append(candidate)
        missing = subtract(missing, candidate.size)
    for candidate in reversed(victims.copy()):
        without = add(missing, candidate.size)
        if not any(m > 0 for m in without):
            victims.remove(candidate)
            missing = without
    if len(victims) > 1:
        single = next((c for c in ranked if covers(c.size, shortage)), None)
        if single is not None and single.cost < sum(c.cost for c in victims):
            return [single]
    return victims
