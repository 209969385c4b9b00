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
    """Drains the other runners of the target's model and mode. Requests that wait for one of them wait for the target's
    runner instead."""
    for key in [key for key in reconciler.queues if _is_other(key, target.key)]:
        reconciler.move(key, target)
    for slot in reconciler.slots.values():
        if _is_other(slot.target.key, target.key):
            reconciler.drain(slot, Reason.REPLACED)
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
        if (slot.target.key.model_id, slot.target.key.mode) == (model_id, mode):
            slot.retain(settings)
    for key, queue in reconciler.queues.items():
        if (key.model_id, key.mode) == (model_id, mode):
            queue.target = settings.applied(queue.target)
    reconciler.changed()


def _is_other(key: RunnerKey, mine: RunnerKey) -> bool:
    return (key.model_id, key.mode) == (mine.model_id, mine.mode) and key != mine
