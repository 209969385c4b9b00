"""Decides which batches beside clients of the same model get a runner of their own, which can stand still while the
clients' runner computes. Pure."""

from collections.abc import Container, Iterable
from dataclasses import replace

from modelrunner.scheduler.fairness import has_clients
from modelrunner.scheduler.state import Group, Move, Phase, Slot
from modelrunner.types import RunnerKey


def lines_to_part(group: Group, slot: Slot | None, now: float) -> tuple[int, ...]:
    """Returns the requests of batches that are to get a runner of their own, none unless they would fill the engine.
    The clients' runner `slot` must be ready, run as it is configured (a smaller variant shows that memory is scarce),
    and have had a client lately."""
    if slot is None or slot.phase is not Phase.READY or slot.variant or not has_clients(slot, now):
        return ()
    lines = tuple([request.id for request in group.waiting if request.batch])
    return lines if len(lines) >= slot.parallel else ()


def rejoined(groups: Iterable[Group], live: Container[RunnerKey]) -> tuple[dict[RunnerKey, Group], list[Move]]:
    """Returns the groups by their key, and the actions that make the requests of a batch whose own runner is gone part
    of the clients' group."""
    found = {group.key: group for group in groups}
    gone = [found.pop(key) for key in list(found) if key.batch and key not in live]
    for apart in gone:
        shared = apart.key._replace(batch=False)
        mine = found.get(shared, replace(apart, key=shared, waiting=()))
        waiting = sorted((*mine.waiting, *apart.waiting), key=lambda request: request.id)
        found[shared] = replace(mine, waiting=tuple(waiting))
    return found, [Move(apart.key, tuple([request.id for request in apart.waiting])) for apart in gone]
