"""Runners of one model under different configurations: which one a request gets, and how one takes over from another.

A changed configuration is for the next load: while a runner of an older revision is there, requests for the newer go to
it. Only `retire`, the end of a restart, makes a loaded one leave.
"""

from collections.abc import Iterator
from dataclasses import replace

from modelrunner.scheduler.reconciler import Reconciler
from modelrunner.scheduler.sharing import counted_once
from modelrunner.scheduler.slots import Queue, RunnerSlot, Target
from modelrunner.scheduler.state import Group, Phase, Reason
from modelrunner.types import KeepAlive, Mode, RequiredMemory, RunnerKey


def standing(table: Reconciler, target: Target) -> Target:
    """The target whose runner a request for `target` shares: its own, if that is there or waited for, or else the
    latest other revision's that still takes requests."""
    if target.key in table.queues or takes_requests(table.slots.get(target.key)):
        return target
    others = [slot.target for slot in table.slots.values() if takes_requests(slot)]
    others += [queue.target for queue in table.queues.values()]
    same = _but_revision(target.key)
    return max(
        (other for other in others if _but_revision(other.key) == same),
        key=lambda other: other.key.revision,
        default=target,
    )


def takes_requests(slot: RunnerSlot | None) -> bool:
    """One that is drained for room may be taken back; one that was unloaded is on its way out."""
    if slot is None:
        return False
    return slot.phase in (Phase.STARTING, Phase.READY, Phase.SLEEPING) or (
        slot.phase is Phase.DRAINING and slot.drain is Reason.ROOM and slot.leases > 0
    )


def fits_beside(table: Reconciler, target: Target, need: RequiredMemory) -> bool:
    """With everything that is loaded now; the model's files, which both runners map, count once."""
    group = Group(target.key, (), (need,), target.name)
    slots, (group,) = counted_once([slot.view() for slot in table.slots.values()], [group])
    return sum((slot.memory for slot in slots), group.needs[0]).fits(table.budget())


def retire(table: Reconciler, target: Target) -> None:
    """Drains the runners of the model in that mode but the target's own; who waits for one of them waits for that."""
    for key in list(_others(table.queues, target)):
        _move(table, table.queues.pop(key), target)
    for key in _others(table.slots, target):
        table.slots[key].drain = Reason.UNLOAD
    table.changed()


def retain(table: Reconciler, model_id: str, mode: Mode, keep_alive: KeepAlive, pinned: bool) -> None:
    """Of the runners that there are and of those that a queue waits for. A keep-alive that the last request asked for
    stays."""
    for slot in table.slots.values():
        if (slot.target.key.model_id, slot.target.key.mode) == (model_id, mode):
            if slot.keep_alive == slot.target.keep_alive:
                slot.keep_alive = keep_alive
            slot.target, slot.pinned = replace(slot.target, keep_alive=keep_alive), pinned
    for key, queue in table.queues.items():
        if (key.model_id, key.mode) == (model_id, mode):
            queue.target = replace(queue.target, keep_alive=keep_alive, pinned=pinned)
    table.changed()


def _but_revision(key: RunnerKey) -> tuple[str, str, Mode, int]:
    return key.backend, key.model_id, key.mode, key.replica


def _others(keys: dict[RunnerKey, RunnerSlot] | dict[RunnerKey, Queue], target: Target) -> Iterator[RunnerKey]:
    mine = target.key
    return (key for key in keys if (key.model_id, key.mode) == (mine.model_id, mine.mode) and key != mine)


def _move(table: Reconciler, queue: Queue, target: Target) -> None:
    for ticket in queue.tickets.values():
        ticket.target = target
    mine = table.open_queue(target)
    together = sorted((mine.tickets | queue.tickets).items())
    mine.tickets.clear()
    mine.tickets.update(together)
