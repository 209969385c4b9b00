"""Replaces the runners of one configuration of a model by those of another.

A changed configuration applies to the next load: while a runner of an older revision is there, it gets the requests for
the newer one. Only `retire`, the end of a restart, drains a loaded runner.
"""

from modelrunner.scheduler.allocation import allocations
from modelrunner.scheduler.placement import candidates, free_now
from modelrunner.scheduler.reconciler import Reconciler
from modelrunner.scheduler.state import Reason, RunnerId, options_of
from modelrunner.scheduler.target import RetainedSettings, Target
from modelrunner.types import Mode, RunnerKey


async def fits_beside(reconciler: Reconciler, target: Target) -> bool:
    """True if the target fits beside everything that is loaded now, in some place. Raises what its estimate raises."""
    options, hosts = options_of(await reconciler.variants(target)), reconciler.budgets()
    memory = allocations(hosts, [slot.view() for slot in reconciler.slots.values()], options)
    runner, most = RunnerId(target.key), {host: memory[host].budget for host in hosts}
    best, _ = candidates(runner, options, {}, memory, most, reconciler.time())
    return free_now(runner, best, memory) is not None


def retire(reconciler: Reconciler, target: Target) -> None:
    """Drains the other runners of the target's model and mode, unless they serve other models too. Requests that wait
    for one of them wait for the target's runner instead."""
    model_id = target.model_id
    for key in [key for key, queue in reconciler.queues.items() if queue.has(model_id) and _is_other(key, target.key)]:
        reconciler.move(key, target)
    for slot in reconciler.slots.values():
        if model_id in slot.targets and _is_other(slot.target.key, target.key):
            if len(slot.targets) == 1:
                reconciler.drain(slot, Reason.REPLACED)
            else:
                slot.forget(model_id)
    reconciler.changed()


def renew(reconciler: Reconciler, backend: str) -> None:
    """Drains the runners of the backend, and forgets its failures."""
    for slot in reconciler.slots.values():
        if slot.target.key.backend == backend:
            reconciler.drain(slot, Reason.REPLACED)
    reconciler.forgive(backend)
    reconciler.changed()


def retain(reconciler: Reconciler, model_id: str, mode: Mode, settings: RetainedSettings) -> None:
    """Changes the settings of the model's runners in that mode, and of those that requests wait for."""
    for slot in reconciler.slots.values():
        if slot.target.key.mode is mode:
            slot.retain(model_id, settings)
    for queue in reconciler.queues.values():
        for ticket in queue.tickets.values():
            if ticket.asked.model_id == model_id and ticket.asked.key.mode is mode:
                ticket.asked = settings.applied(ticket.asked)
        if queue.target.model_id == model_id and queue.target.key.mode is mode:
            queue.target = settings.applied(queue.target)
    reconciler.changed()


def _is_other(key: RunnerKey, mine: RunnerKey) -> bool:
    return key.mode is mine.mode and key != mine
