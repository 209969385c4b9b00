"""Runners of one model under different configurations: which one a request gets, and how one replaces another.

A changed configuration applies to the next load: while a runner of an older revision is there, it gets the requests for
the newer one. Only `retire`, the end of a restart, drains a loaded runner.
"""

from collections.abc import Iterator
from dataclasses import replace

from modelrunner.scheduler.allocation import Allocation, covers
from modelrunner.scheduler.queues import Queue
from modelrunner.scheduler.reconciler import Reconciler
from modelrunner.scheduler.slots import RunnerSlot, Target
from modelrunner.scheduler.state import Reason
from modelrunner.types import KeepAlive, Mode, RequiredMemory, RunnerKey


def fits_beside(table: Reconciler, target: Target, need: RequiredMemory) -> bool:
    """True if `need` fits beside everything that is loaded now. The model's files, which both runners map, count
    once."""
    memory = Allocation(table.budget(), [slot.view() for slot in table.slots.values()], [need])
    return covers(memory.free, memory.need(target.key, need))


def retire(table: Reconciler, target: Target) -> None:
    """Drains the other runners of the target's model and mode. Requests that wait for one of them wait for the target's
    runner instead."""
    for key in list(_others(table.queues, target)):
        _move(table, table.queues.pop(key), target)
    for key in _others(table.slots, target):
        table.drain(table.slots[key], Reason.UNLOAD)
    table.changed()


def retain(table: Reconciler, model_id: str, mode: Mode, keep_alive: KeepAlive, pinned: bool) -> None:
    """Gives the model's runners in that mode, and those that a queue waits for, new settings."""
    for slot in table.slots.values():
        if (slot.target.key.model_id, slot.target.key.mode) == (model_id, mode):
            slot.retain(keep_alive, pinned=pinned)
    for key, queue in table.queues.items():
        if (key.model_id, key.mode) == (model_id, mode):
            queue.target = replace(queue.target, keep_alive=keep_alive, pinned=pinned)
    table.changed()


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
