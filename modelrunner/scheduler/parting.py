"""Batches beside clients of the same model: whose requests get a runner of their own, which can stand still while the
clients' computes. Pure."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from modelrunner.scheduler.fairness import has_clients
from modelrunner.scheduler.state import Failure, Group, Phase, Rejoin, Slot
from modelrunner.types import RunnerKey


def lines_to_part(
    group: Group, live: Mapping[RunnerKey, Slot], failures: Mapping[RunnerKey, Failure], now: float
) -> tuple[int, ...]:
    """The requests of batches that are to get a runner of their own, none unless they would fill the engine: the
    clients' runner is ready, runs as it is configured (a smaller variant shows that memory is scarce), and had a client
    lately."""
    slot, own = live.get(group.key), group.key._replace(batch=True)
    if slot is None or own in live or not group.needs or slot.phase is not Phase.READY or slot.variant:
        return ()
    failure = failures.get(own)
    if not has_clients(slot, now) or (failure is not None and now < failure.until):
        return ()
    lines = tuple([request.id for request in group.waiting if request.batch])
    return lines if len(lines) >= slot.parallel else ()


def rejoined(groups: Iterable[Group], live: Container[RunnerKey]) -> tuple[dict[RunnerKey, Group], list[Rejoin]]:
    """The groups by their key, those of batches whose own runner is gone as part of the clients' group, and the actions
    for that."""
    found = {group.key: group for group in groups}
    gone = [key for key in found if key.batch and key not in live]
    for key in gone:
        apart, shared = found.pop(key), key._replace(batch=False)
        mine = found.get(shared, replace(apart, key=shared, waiting=()))
        waiting = sorted((*mine.waiting, *apart.waiting), key=lambda request: request.id)
        found[shared] = replace(mine, waiting=tuple(waiting))
    return found, [Rejoin(key) for key in gone]
