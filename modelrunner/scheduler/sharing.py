"""Counts the model files that several runners map once, as the kernel holds them once."""

from collections.abc import Iterable
from dataclasses import replace

from modelrunner.scheduler.state import Group, Phase, Slot
from modelrunner.types import RequiredMemory


def counted_once(slots: Iterable[Slot], groups: Iterable[Group]) -> tuple[tuple[Slot, ...], tuple[Group, ...]]:
    """The oldest runner of a model counts for its files, every other one and every start to come only for what it has
    of its own. `slots` are oldest first; when the oldest has gone, the next counts for the files."""
    counted: dict[str, int] = {}
    once = []
    for slot in slots:
        model = slot.key.model_id
        once.append(_without(slot, counted[model]) if model in counted else slot)
        if slot.phase is not Phase.ENDED:
            counted[model] = max(slot.memory.shared, counted.get(model, 0))
    return tuple(once), tuple(_lighter(group, counted.get(group.key.model_id, 0)) for group in groups)


def _without(slot: Slot, counted: int) -> Slot:
    other = None if slot.other is None else own(slot.other, counted)
    return slot._replace(memory=own(slot.memory, counted), other=other)


def _lighter(group: Group, counted: int) -> Group:
    return replace(group, needs=tuple(own(need, counted) for need in group.needs)) if counted else group


def own(memory: RequiredMemory, counted: int) -> RequiredMemory:
    """Without the part of its files that others count for."""
    shared = min(memory.shared, counted)
    return replace(memory, ram=memory.ram - shared, shared=memory.shared - shared)


def whole(memory: RequiredMemory, shared: int) -> RequiredMemory:
    """`memory` with its files again, which are `shared` bytes: what `own` left of it."""
    return replace(memory, ram=memory.ram + shared - memory.shared, shared=shared)
