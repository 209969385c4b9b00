"""The scheduler's interface to the rest of the daemon."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from typing import NoReturn

from modelrunner.concurrency.beat import beat
from modelrunner.errors import QueueFull, RunnerNotFound, Unavailable
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.scheduler import failures, views
from modelrunner.scheduler.allocation import allocations, subtract
from modelrunner.scheduler.devices import Device
from modelrunner.scheduler.diagnostics import Diagnostics
from modelrunner.scheduler.events import Events
from modelrunner.scheduler.host import Host
from modelrunner.scheduler.ledger import Account, Ledger
from modelrunner.scheduler.memory import BUDGET_LOOK
from modelrunner.scheduler.placement import candidates, free_now
from modelrunner.scheduler.queues import Ticket
from modelrunner.scheduler.reconciler import Reconciler
from modelrunner.scheduler.slots import Lease, RunnerSlot
from modelrunner.scheduler.state import Phase, Policy, Reason, RunnerId
from modelrunner.scheduler.target import RetainedSettings, Target
from modelrunner.types import KeepAlive, Mode, RequiredMemory, RunnerKey, RunSpec

log = logging.getLogger(__name__)
# Seconds in Retry-After while nothing was measured yet.
_RETRY_AFTER = 5.0


class Scheduler:
    """Decides which runners exist, and gives requests their lease of one. Called only from the event loop's thread; all
    times are in seconds.

    `hosts` run the runners; the first one is preferred where all else is equal. `max_queue` bounds the requests that
    wait for one model, those inside the engine included; `max_wait` bounds the wait of one request. A request that
    waits for memory drains a busy runner after `patience` at the latest. `drain_limit` is how long `unload` waits for
    leases to end. `warm` is the method of `Slots`. `unasked` gives the owner (see `SavesState.after_ready`) of a runner
    that is loaded without a request that waits for it.
    """

    def __init__(
        self,
        registry: BackendRegistry,
        hosts: Sequence[Host],
        *,
        ledger: Ledger | None = None,
        max_queue: int = 512,
        max_wait: float = 600.0,
        patience: float = 6.5,
        drain_limit: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        unasked: Callable[[], str | None] = lambda: "",
    ) -> None:
        self._max_queue = max_queue
        self._drain_limit = drain_limit
        self._clock = clock
        self.events = Events()
        self._hosts = {host.name: host for host in hosts}
        self._account = Account(registry, self._hosts, ledger or Ledger())
        self._reconciler = Reconciler(
            account=self._account,
            policy=Policy(max_wait, patience),
            hosts=self._hosts,
            events=self.events,
            clock=clock,
            unasked=unasked,
        )
        self.diagnostics = Diagnostics(self._reconciler, self._hosts, self.events, clock)
        self._slots, self._queues = self._reconciler.slots, self._reconciler.queues
        self.warm = self._slots.warm

    def set_limits(self, *, max_queue: int, max_wait: float) -> None:
        """Sets the limits from now on, also for requests that wait already."""
        self._max_queue = max_queue
        self._reconciler.policy = replace(self._reconciler.policy, max_wait=max_wait)
        self._reconciler.changed()

    async def acquire(
        self,
        target: Target,
        keep_alive: KeepAlive | None = None,
        caller: str = "",
        batch: bool = False,
        owner: str | None = None,
        broken: Lease | None = None,
        prefix: int | None = None,
    ) -> Lease:
        """Waits until the target's runner is ready, and starts it if there is none. A cancelled request leaves the
        queue; a load that began for it goes on. Waiting requests take turns by `caller`; a `batch` lets the others go
        first. `owner` is the owner of the request (see `SavesState.after_ready`); None for a lease that asks the engine
        nothing. `broken` is the lease under which the engine crashed, for a request that is asked again; the time that
        it waited then counts for `max_wait`. After the second crash such requests are asked one at a time. `prefix` is
        a hash of the beginning of its conversation: of several runners the one that has it in its cache is asked, if it
        has a place.

        Raises `QueueFull`, `ShuttingDown`, `BackingOff`, `TimedOut`, `InsufficientMemory`, or what the backend or the
        engine failed with."""
        if broken is None and (lease := self.warm(target, keep_alive, batch, owner, prefix)) is not None:
            return lease
        keep_alive, asked, target = keep_alive or target.keep_alive, target, self._slots.standing(target)
        self._check_open(target)
        log.debug("%s waits for %s", caller or "a request", target.name)
        queued = self._reconciler.queue_up(target, keep_alive, caller, batch, owner, broken, prefix, asked)
        return await self._granted(queued)

    async def restart(self, target: Target, *, batch: bool = False, owner: str | None = None) -> Lease:
        """A lease of a new runner of exactly this configuration. The model's other runners go on until `retire`; if
        both do not fit, they are drained first. `batch` and `owner` are those of `acquire`, and it raises as that."""
        if not await self.fits_beside(target):
            self.retire(target)
        return await self._granted(self._reconciler.queue_up(target, target.keep_alive, batch=batch, owner=owner))

    async def fits_beside(self, target: Target) -> bool:
        """True if the target fits beside everything that is loaded now, in some place."""
        reconciler = self._reconciler
        options, hosts = await reconciler.options(target), reconciler.budgets()
        memory = allocations(
            hosts, [slot.view() for slot in self._slots.values()], [m for o in options for m in o.memory.each]
        )
        runner, most = RunnerId(target.key), {host: memory[host].budget for host in hosts}
        best = candidates(runner, options, {}, memory, most, reconciler.time())
        return free_now(runner, best.kinds, memory) is not None

    def retire(self, target: Target) -> None:
        """Drains the runners of the target's model and mode that have another configuration, unless they serve other
        models too. Requests that wait for one of them wait for the target's runner instead. A changed configuration
        applies to the next load: until then the runners of the old one get the requests, and only this drains them."""
        reconciler, model_id = self._reconciler, target.model_id
        for key in [k for k, queue in self._queues.items() if queue.has(model_id) and _is_other(k, target.key)]:
            reconciler.move(key, target)
        for slot in self._slots.values():
            if model_id in slot.targets and _is_other(slot.target.key, target.key):
                if len(slot.targets) == 1:
                    reconciler.drain(slot, Reason.REPLACED)
                else:
                    slot.forget(model_id)
        reconciler.changed()

    def renew(self, backend: str) -> None:
        """Drains the runners of a backend that was replaced. Requests that wait, or come, get new runners, also where
        the old ones failed."""
        for slot in self._slots.values():
            if slot.target.key.backend == backend:
                self._reconciler.drain(slot, Reason.REPLACED)
        self._reconciler.forgive(backend)
        self._reconciler.changed()

    def discard(self, target: Target) -> None:
        """Drains the runners of exactly this configuration, after a restart that failed."""
        for slot in self._slots.of(target.key):
            self._reconciler.drain(slot, Reason.REPLACED)

    async def end(self, target: Target) -> None:
        """Ends the runners of exactly this configuration after their last request, and waits for that."""
        slots = self._slots.of(target.key)
        self.discard(target)
        self._reconciler.changed()
        await _gone(slots, self._drain_limit)

    def modes(self, model_id: str) -> set[Mode]:
        """The modes in which the model is loaded, or in which requests wait for it."""
        modes = {s.target.key.mode for s in self._slots.values() if s.takes_requests and model_id in s.targets}
        return modes | {key.mode for key, queue in self._queues.items() if queue.has(model_id)}

    def has(self, target: Target) -> bool:
        """True if a runner of exactly this configuration takes requests, now or when it is loaded."""
        return any(slot.takes_requests for slot in self._slots.of(target.key))

    async def _granted(self, ticket: Ticket) -> Lease:
        try:
            return await ticket.granted
        except asyncio.CancelledError:
            self._reconciler.leave(ticket)
            raise

    def lease_runner(self, runner_id: str, owner: str | None = None, asked: Target | None = None) -> Lease:
        """A lease of exactly that runner, for the model of `asked` (default: the one that it was started for); nothing
        is ever loaded. Raises `RunnerNotFound`, `Unavailable` while the runner loads or sleeps, or `QueueFull`."""
        slot = next((s for s in self._slots.values() if s.runner.id == runner_id), None)
        if slot is None or not slot.takes_requests:
            raise RunnerNotFound(f"there is no runner {runner_id} any more: ask for the model by its name instead")
        if slot.phase is Phase.SLEEPING:
            raise Unavailable(f"runner {runner_id} sleeps: ask for {slot.target.name} by its name, which wakes it")
        if slot.phase is Phase.STARTING:
            raise Unavailable(f"runner {runner_id} is still loading its model")
        self._check_open(slot.target)
        return self._slots.lease(slot, asked or slot.target, slot.keep_alive, owner)

    def log(self, runner_id: str, lines: int | None, ending: asyncio.Event | None) -> AsyncIterator[bytes]:
        """The log of the runner's engine, from its host: see `Host.log`. Raises `RunnerNotFound`."""
        slot = next((s for s in self._slots.values() if s.runner.id == runner_id), None)
        if slot is None:
            raise RunnerNotFound(f"there is no runner {runner_id}: `modelrunner ps` shows them", param="runner")
        return self._hosts[slot.option.place.host].log(slot.runner, lines, ending)

    def runners(self) -> list[views.RunnerView]:
        """Every runner whose process may still exist, oldest first. The requests that wait for several are told with
        the oldest."""
        now, wall = self._clock(), time.time()
        runners = []
        for slot in self._slots.values():
            queue = self._queues.get(slot.target.key) if slot is self._slots.of(slot.target.key)[0] else None
            runners.append(views.runner(slot, len(queue.tickets) if queue is not None else 0, now, wall))
        return runners

    def runs(self) -> dict[tuple[str, Mode], RunSpec]:
        """How each loaded model runs, by its ID and mode."""
        return {(id, slot.target.key.mode): slot.variant.spec for slot in self._slots.values() for id in slot.targets}

    def waiting(self) -> dict[str, int]:
        """The number of requests that wait for a runner, by the name of their model."""
        waiting: dict[str, int] = {}
        for queue in self._queues.values():
            for ticket in queue.tickets.values():
                waiting[ticket.asked.name] = waiting.get(ticket.asked.name, 0) + 1
        return waiting

    def health(self) -> views.HealthState:
        """Says whether requests wait, and whether plans succeed. Cheap."""
        if self._reconciler.closing:
            return views.HealthState.SHUTTING_DOWN
        if self._reconciler.stuck:
            return views.HealthState.ERROR
        return views.HealthState.BUSY if self._queues else views.HealthState.READY

    def awaited(self) -> bool:
        """True while a client waits for an answer, or for its end; requests of batches do not count. Cheap."""
        waiting = (ticket.request for queue in self._queues.values() for ticket in queue.tickets.values())
        return not all(request.batch for request in waiting) or any(slot.interactive for slot in self._slots.values())

    def idle_for(self) -> float | None:
        """For how many seconds nobody has used a runner, also of those that are gone; infinite if there was none. None
        while a request is served or waits, and while a runner starts."""
        slots = self._slots.values()
        if self._queues or any(slot.leases or slot.ready_at is None for slot in slots):
            return None
        return self._clock() - max([self._slots.last_used, *(slot.last_used for slot in slots)])

    def add_host(self, host: Host) -> None:
        """Uses another host from now on, in place of one with its name that is gone. Requests that wait may run
        there."""
        self._hosts[host.name] = host
        self._reconciler.hosts_changed()

    def remove_host(self, name: str) -> None:
        """Forgets a host that is gone and has no runner."""
        del self._hosts[name]

    def expect_hosts(self, moved: Callable[[], float]) -> None:
        """Has requests that no host can serve wait for others that may come soon after one came or was lost, at the
        time of its clock that `moved` returns."""
        self._reconciler.moved = moved

    def hosts_changed(self) -> None:
        """Must be called when a host comes, goes or has another budget."""
        self._reconciler.hosts_changed()

    def devices(self) -> tuple[Device, ...]:
        """The devices of this machine with their last figures, in the order of its budget. A call starts a look at
        them, which the next one sees."""
        self._reconciler.budgets()
        return next(iter(self._hosts.values())).devices()

    def memory(self) -> views.MemoryUse:
        """The budget of this machine, and what its runners count for."""
        host, budgets = next(iter(self._hosts)), self._reconciler.budgets()
        budget = budgets.get(host, RequiredMemory(0))
        allocation = allocations(budgets, [slot.view() for slot in self._slots.values()])[host]
        ram, *vram = subtract(allocation.budget, allocation.free)
        return views.MemoryUse(budget, RequiredMemory(ram, tuple(vram)))

    async def watch_budget(self) -> NoReturn:
        """Lets idle runners go, within some seconds, when other programs take the memory that they hold."""
        while True:
            await beat(BUDGET_LOOK)
            self._reconciler.look_at_budget()

    def paused(self) -> Collection[str]:
        """The IDs of the paused models."""
        return self._reconciler.paused.values()

    def retain(self, model_id: str, mode: Mode, settings: RetainedSettings) -> None:
        """Changes the settings of the model's present runners in that mode, and of those that requests wait for. A
        keep-alive that the last request asked for stays. Later loads take them from their target."""
        changed = bool(self._queues)
        for slot in self._slots.values():
            if slot.target.key.mode is mode:
                changed |= slot.retain(model_id, settings)
        for queue in self._queues.values():
            for ticket in queue.tickets.values():
                if ticket.asked.model_id == model_id and ticket.asked.key.mode is mode:
                    ticket.asked = settings.applied(ticket.asked)
            if queue.target.model_id == model_id and queue.target.key.mode is mode:
                queue.target = settings.applied(queue.target)
        if changed:
            self._reconciler.hosts_changed()

    async def pause(self, model_id: str, files: str) -> None:
        """Ends the runners of the model's files (`RunnerKey.files`) after their last request, and waits for that at
        most `drain_limit`. Requests for a model with these files wait in the queue until `resume`, or until the daemon
        ends."""
        self._reconciler.pause(model_id, files)
        await _gone([s for s in self._slots.values() if s.target.key.files == files], self._drain_limit)

    def resume(self, files: str) -> None:
        self._reconciler.resume(files)

    def forget(self, model_id: str) -> None:
        """Takes a model that is removed away from the runners that were started for presets of it, and ends its
        pause."""
        for files in [files for files, paused in self._reconciler.paused.items() if paused == model_id]:
            self._reconciler.resume(files)
        for slot in self._slots.values():
            if slot.target.model_id != model_id:
                slot.forget(model_id)

    def uses(self, model_id: str) -> bool:
        """True if a request holds a runner of this model, or waits for one; also of a model of which it is the
        draft."""
        slots, queues = self._slots.values(), self._queues.values()
        targets = [*(slot.target for slot in slots if slot.leases), *(queue.target for queue in queues)]
        is_asked = any(lease.target.spec.model_id == model_id for slot in slots for lease in slot.lent) or any(
            queue.has(model_id) for queue in queues
        )
        return is_asked or any(model_id in _models(target) for target in targets)

    async def unload(
        self,
        *,
        all: bool = False,
        backend: str | None = None,
        model_ids: Collection[str] = (),
        host: str | None = None,
        force: bool = False,
    ) -> views.UnloadResult:
        """Ends the runners of these models, of this backend, or on this host, or all. Waits for requests that hold one,
        at most `drain_limit`; a runner that is still held then is reported as kept, and ends after its last request. A
        runner that loads for waiting requests is kept. `force` ends them all at once; requests that wait for a load get
        `Unavailable`."""
        wanted = [s for s in self._slots.values() if all or _matches(s, backend, model_ids, host)]
        chosen = [s for s in wanted if force or s.phase is not Phase.STARTING or s.target.key not in self._queues]
        for slot in chosen:
            self._reconciler.drain(slot, Reason.UNLOAD)
            if force:
                gone = Unavailable(f"{slot.target.name} was unloaded while it was being loaded")
                self._reconciler.refuse(slot.target.key, gone)
                self._reconciler.end(slot, Reason.UNLOAD)
        self._reconciler.changed()
        await _gone(chosen, None if force else self._drain_limit)
        return views.unloaded(wanted)

    async def close(self, drain: float) -> None:
        """Refuses all requests that wait or come, lets leases end for `drain` seconds, then ends every runner. Returns
        when no process is left."""
        self._reconciler.closing = True
        self._reconciler.changed()
        slots = list(self._slots.values())
        await _gone(slots, drain)
        for slot in slots:
            self._reconciler.end(slot, Reason.SHUTDOWN)
        await _gone(slots, None)
        await self._reconciler.finish()
        for host in list(self._hosts.values()):  # one may come meanwhile
            await host.close()
        self.events.close()

    def _check_open(self, target: Target) -> None:
        if self._reconciler.closing:
            raise failures.shutting_down()
        slot, queue = self._slots.first(target.key), self._queues.get(target.key)
        if (len(queue.tickets) if queue else 0) >= self._max_queue:
            # A place is free as soon as one of the sequences is done.
            pause = slot.held / slot.capacity if slot and slot.held is not None else _RETRY_AFTER
            raise QueueFull(
                f"{self._max_queue} requests wait for {target.name}, as many as `max_queue` allows; try again later",
                retry_after=max(1.0, pause),
            )


def _matches(slot: RunnerSlot, backend: str | None, model_ids: Collection[str], host: str | None) -> bool:
    """True if every given condition holds; False if none is given."""
    if backend is None and not model_ids and host is None:
        return False
    on, served = (None, *slot.option.place.hosts), {slot.target.model_id, *slot.targets}
    mine = backend in (None, slot.target.key.backend) and host in on
    return mine and (not model_ids or not served.isdisjoint(model_ids))


def _is_other(key: RunnerKey, mine: RunnerKey) -> bool:
    return key.mode is mine.mode and key != mine


def _models(target: Target) -> set[str]:
    draft = target.spec.draft
    return {target.model_id} | ({draft.model_id} if draft else set())


async def _gone(slots: Collection[RunnerSlot], within: float | None) -> None:
    """Waits until all these processes have ended, at most `within` seconds."""
    try:
        async with asyncio.timeout(within):
            for slot in slots:
                await slot.gone.wait()
    except TimeoutError:
        return
