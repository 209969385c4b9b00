"""The arithmetic of memory within one plan, and the choice of victims."""

from collections.abc import Callable, Iterable, Sequence

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
    return all(y <= 0 or y <= x for x, y in zip(a, b, strict=True))


class Room:
    """`free` is what no runner counts for, `coming` what leaving runners still hold, `claimed` what older requests wait
    for. A younger request starts only in what the older ones leave over, so that a large model is not starved by small
    ones."""

    def __init__(self, budget: RequiredMemory, slots: Sequence[Slot], needs: Iterable[RequiredMemory]) -> None:
        self._devices = max(len(m.vram) for m in (budget, *(s.memory for s in slots), *needs))
        self.budget = self.vector(budget)
        self.none = (0,) * (self._devices + 1)
        self.free, self.coming, self.claimed = self.budget, self.none, self.none
        for slot in slots:
            self.free = subtract(self.free, self.vector(slot.memory))
            if slot.phase in (Phase.DRAINING, Phase.STOPPING):
                self.leaves(slot)

    def vector(self, memory: RequiredMemory) -> Vector:
        return (memory.ram, *memory.vram, *(0,) * (self._devices - len(memory.vram)))

    def total(self, slots: Iterable[Slot]) -> Vector:
        total = self.none
        for slot in slots:
            total = add(total, self.vector(slot.memory))
        return total

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


def choose(
    candidates: Sequence[Slot], shortage: Vector, cost: Callable[[Slot], float], size: Callable[[Slot], Vector]
) -> list[Slot]:
    """The cheapest candidates that together cover `shortage`, none of which could be spared; empty if all of them do
    not. Cheapest first until it is enough, then without those that turned out to be needless, the dearest first; or the
    single one that costs less than that set. Not always the optimum of the knapsack problem that this is, but never
    more victims than the shortage asks for."""
    ranked = sorted(candidates, key=cost)
    victims: list[Slot] = []
    missing = shortage
    for slot in ranked:
        if not any(m > 0 for m in missing):
            break
        victims.append(slot)
        missing = subtract(missing, size(slot))
    if any(m > 0 for m in missing):
        return []
    for slot in reversed(victims.copy()):
        without = add(missing, size(slot))
        if not any(m > 0 for m in without):
            victims.remove(slot)
            missing = without
    single = next((slot for slot in ranked if covers(size(slot), shortage)), None)
    if single is not None and cost(single) < sum(map(cost, victims)):
        return [single]
    return victims
