"""Owns queues and runners: makes a plan after every change, and carries it out."""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import assert_never

from modelrunner.errors import EngineFailed, HostLost, ModelRunnerError, Unavailable, code_of
from modelrunner.scheduler.allocation import allocations
from modelrunner.scheduler.eventloop import Alarm, Background
from modelrunner.scheduler.events import Events
from modelrunner.scheduler.failures import is_past
from modelrunner.scheduler.fairness import note_turn
from modelrunner.scheduler.host import Host
from modelrunner.scheduler.ledger import Account
from modelrunner.scheduler.plan import plan
from modelrunner.scheduler.queues import Queue, Queues, Ticket
from modelrunner.scheduler.sleeping import Sleeping
from modelrunner.scheduler.slots import Lease, RunnerSlot, Slots
from modelrunner.scheduler.state import (
    Action,
    Failure,
    Forget,
    Grant,
    Group,
    HostedVariant,
    Line,
    Phase,
    Policy,
    Reason,
    Refuse,
    Request,
    RunnerId,
    RunOption,
    RunPlace,
    Sleep,
    Start,
    State,
    Stop,
    WakeAt,
    first_of,
    options_of,
    waits_for_hosts,
)
from modelrunner.scheduler.target import Target
from modelrunner.types import KeepAlive, RequiredMemory, RunnerKey

log = logging.getLogger(__name__)
_REST, _LONGEST_REST = 9.0, 5.0  # pause after a look for places, in times what it took, and in seconds at most
_PATIENCE = 0.1  # seconds that the others of a look wait for a slow estimate
_AGAIN = 0.5  # seconds until a model is looked at again that may run on no host that is there, while more may come


class Reconciler:
    """Called only from the event loop's thread. `Scheduler` reads `slots` and `queues`; they are changed here. `stuck`
    is true if the last plan could not be made or carried out. `paused` has the ID of the model that was paused, by its
    files. `load_seconds` has the duration of each key's last load,
    `failed` the IDs of the models that the last runner of a key served which ended by itself. `moved` returns
    `State.moved`. `unasked` is described at `Scheduler`."""

    def __init__(
        self,
        *,
        account: Account,
        policy: Policy,
        hosts: Mapping[str, Host],
        events: Events,
        clock: Callable[[], float],
        unasked: Callable[[], str | None],
    ) -> None:
        self._alarm = Alarm(self._reconcile, clock)
        self._background = Background()
        self.queues = Queues()
        self.slots = Slots(self.queues, self._alarm, clock, self._measure)
        self.closing = False
        self.paused: dict[str, str] = {}
        self.stuck = False
        self.load_seconds: dict[RunnerKey, float] = {}
        self.failed: dict[RunnerKey, frozenset[str]] = {}
        self.grown: set[RunnerKey] = set()
        self.moved: Callable[[], float] = lambda: -math.inf
        self._places_changed = self._looking = False
        self.time = clock
        self.policy = policy
        self._account = account
        self._hosts = hosts
        self._events = events
        self._unasked = unasked
        self._failures: dict[tuple[RunnerKey, RunPlace], Failure] = {}
        self._served: dict[Line, float] = {}
        self._budgets_at_start: dict[str, RequiredMemory] = {}
        self._ids = itertools.count(1)
        self._sleeping = Sleeping(account, events, self._background, self.changed, clock)

    def queue_up(
        self,
        target: Target,
        keep_alive: KeepAlive,
        caller: str = "",
        batch: bool = False,
        owner: str | None = None,
        broken: Lease | None = None,
        prefix: int | None = None,
        asked: Target | None = None,
    ) -> Ticket:
        """Puts a request, for the model of `asked` (default: the target's), at the end of the target's queue; one that
        is asked again after its lease was `broken` goes to its place by the time that it has waited in all."""
        queue, since, crashes = self.open_queue(target), self.time(), 0
        if broken is not None:
            lost = isinstance(broken.runner.failure, HostLost)  # no fault of the request's
            since, crashes = since - broken.waited, broken.crashes + (not lost)
        granted: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        prefers = self.slots.affinity.number(target.key, prefix)
        request = Request(next(self._ids), since, caller, batch, crashes, prefers)
        ticket = Ticket(request, target, asked or target, keep_alive, granted, owner, prefix)
        if broken is None:
            queue.tickets[request.id] = ticket
        else:
            queue.add(ticket)
        self.changed()
        return ticket

    def open_queue(self, target: Target) -> Queue:
        """Returns the queue of the target's key, a new one if there was none. The caller adds a ticket."""
        queue = self.queues.get(target.key)
        if queue is None:
            queue = self.queues[target.key] = Queue(target)
            self._background.start(self._estimate(queue))
        return queue

    def move(self, key: RunnerKey, target: Target) -> None:
        """Makes the requests for the target's model that wait for the key wait for the target's runner."""
        tickets = self.queues[key].tickets.values()
        moved = self.queues.take([t.request.id for t in tickets if t.asked.model_id == target.model_id], key)
        for ticket in moved:
            ticket.target = ticket.asked = target
        if moved:
            self.open_queue(target).add(*moved)

    def leave(self, ticket: Ticket) -> None:
        """Removes a cancelled request; takes the lease back that it may have got in the same moment."""
        if ticket.granted.done() and not ticket.granted.cancelled():
            if ticket.granted.exception() is None:
                ticket.granted.result().release()
        else:
            self.queues.take([ticket.request.id], ticket.target.key)
            self.changed()

    def drain(self, slot: RunnerSlot, reason: Reason, room_for: str = "") -> None:
        """Grants no new leases of the runner; a plan stops it after the last. Does nothing if the runner is ending."""
        if slot.phase not in (Phase.STOPPING, Phase.ENDED):
            log.info("no new requests for %s: %s", slot.target.name, reason)
            slot.become(Phase.DRAINING, self.time(), drain=reason, room_for=room_for)
            self.changed()

    def end(self, slot: RunnerSlot, reason: Reason, room_for: str = "") -> None:
        """Ends the runner's process, whoever uses it. `room_for` names the model that gets its memory."""
        if slot.stop(self.time()):
            self._tell_end(slot, reason, room_for or slot.room_for)

    def refuse(self, key: RunnerKey, error: BaseException) -> None:
        """Refuses every request that waits for the key."""
        queue = self.queues.get(key)
        if queue is not None:
            self._refuse(key, tuple(queue.tickets), error)

    def forgive(self, backend: str) -> None:
        """Forgets the failures of the backend's runners, so that the next ones start at once."""
        self._failures = {where: failure for where, failure in self._failures.items() if where[0].backend != backend}

    def pause(self, model_id: str, files: str) -> None:
        """Ends the runners of the model's files after their last lease; their requests wait for `resume`."""
        self.paused[files] = model_id
        self.changed()

    def resume(self, files: str) -> None:
        self.paused.pop(files, None)
        self.changed()

    def budgets(self) -> dict[str, RequiredMemory]:
        """The memory that all runners of a host together may hold, for each host that answers."""
        return self._account.budgets(self.slots.values())

    def changed(self) -> None:
        """Has a plan made in the loop's next turn, one for all calls before it."""
        self._alarm.soon()

    def hosts_changed(self) -> None:
        """Has the places of all waiting requests looked for again, and a plan made. A look serves all calls before it,
        and takes a tenth of the time at most: many hosts change all the time."""
        self._places_changed = True
        if not self._looking:
            self._looking = True
            self._background.start(self._look_again())
        self.changed()

    async def _look_again(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._places_changed:
                self._places_changed, began = False, loop.time()
                looks = []
                for queue in list(self.queues.values()):
                    looks.append(self._background.start(self._estimate(queue)))
                    await asyncio.sleep(0)  # others have their turn between two
                if looks:
                    await asyncio.wait(looks, timeout=_PATIENCE)
                await asyncio.sleep(_rest(loop.time() - began))
        finally:
            self._looking = False

    async def finish(self) -> None:
        """Ends the timer and the background tasks, after the last runner."""
        self._alarm.cancel()
        await self._background.cancel()

    def _reconcile(self) -> None:
        self.stuck = True  # unless it comes to its end
        now = self.time()
        for slot in self.slots.values():
            if slot.phase is Phase.STARTING and slot.ready_at is None and slot.runner.ready_at is not None:
                self._became_ready(slot, now)
        evicted = True
        while evicted:  # what leaves may let others start elsewhere
            actions = plan(self.state(), now)
            for action in actions:
                self._carry_out(action)
            evicted = any(isinstance(action, Stop) for action in actions)
        self.stuck = False

    def state(self) -> State:
        """The input of a plan."""
        groups = [queue.view(self.load_seconds.get(key, 0.0), key in self.grown) for key, queue in self.queues.items()]
        alone = {s.target.key: s for s in self.slots.values() if s.replicas.most > 1 and s.variants}
        groups += [
            Group(key, (), options_of(slot.variants), slot.target.name, False, 0.0, -math.inf, *slot.replicas)
            for key, slot in alone.items()
            if key not in self.queues
        ]
        budgets = self.budgets()
        return State(
            tuple(groups),
            tuple([slot.view() for slot in self.slots.values()]),
            budgets,
            self._failures,
            self.policy,
            self.closing,
            frozenset(self.paused),
            self._served,
            self._sleeping.view(),
            self._shrunk(budgets),
            self.moved(),
        )

    def _shrunk(self, budgets: Mapping[str, RequiredMemory]) -> frozenset[str]:
        """The value of `State.shrunk`."""
        before = self._budgets_at_start
        return frozenset([host for host, budget in budgets.items() if not before.get(host, budget).fits(budget)])

    def _carry_out(self, action: Action) -> None:
        match action:
            case Grant(runner, requests):
                self._grant(self.slots[runner], requests)
            case Start(runner) if runner in self.slots:
                self._sleeping.wake(self.slots[runner])
            case Start(runner, option):
                if self.slots.of(runner.key):
                    self.grown.add(runner.key)
                self._start(runner, option)
            case Sleep(runner):
                self._sleeping.sleep(self.slots[runner])
            case Stop(runner, reason, room_for):
                self._note_turn(runner.key)
                slot = self.slots[runner]
                if reason is Reason.GROWN:
                    self.grown.add(runner.key)
                (self.drain if slot.awaited else self.end)(slot, reason, room_for)
            case Forget(runner, failure):
                self._sleeping.remove(slot := self.slots.remove(runner))
                if not self.slots.of(runner.key) and runner.key not in self.queues:
                    self.grown.discard(runner.key)
                if failure is not None:
                    self.failed[runner.key] = frozenset(slot.targets)
                    self._remember(runner.key, slot.option.place, failure)
            case Refuse(key, requests, error):
                self._refuse(key, requests, error)
            case WakeAt(at):
                self._alarm.at(at)
            case _:
                assert_never(action)

    def look_at_budget(self) -> None:
        """Has a plan made where other programs have taken memory that idle runners hold."""
        if any(slot.phase in (Phase.READY, Phase.SLEEPING) and not slot.leases for slot in self.slots.values()):
            hosts, slots = self.budgets(), [slot.view() for slot in self.slots.values()]
            by_host = allocations(hosts, slots)
            if any(min(by_host[host].left) < 0 for host in self._shrunk(hosts)):
                self.changed()

    def _grant(self, slot: RunnerSlot, requests: Sequence[int]) -> None:
        now, key = self.time(), slot.target.key
        self._note_turn(key)
        for ticket in self.queues.take(requests, key):
            request = ticket.request
            note_turn(self._served, (request.caller, request.batch), now)
            lease = self.slots.lease(slot, ticket.asked, ticket.keep_alive, ticket.owner, request, ticket.prefix)
            ticket.granted.set_result(lease)

    def _note_turn(self, key: RunnerKey) -> None:
        """Records a turn of the key's queue: its requests got a lease, or lose their runner to another model."""
        if (queue := self.queues.get(key)) is not None:
            queue.turn = self.time()

    def _remember(self, key: RunnerKey, place: RunPlace, failure: Failure) -> None:
        now = self.time()
        self._failures = {k: f for k, f in self._failures.items() if not is_past(f, now)} | {(key, place): failure}

    def _refuse(self, key: RunnerKey, requests: Collection[int], error: BaseException) -> None:
        name = self.queues[key].target.name if key in self.queues else ""
        refused = self.queues.take(requests, key)
        for ticket in refused:
            ticket.granted.set_exception(error)
        if refused:
            self._events.emit("refuse", model=name, reason=str(error), requests=len(refused), code=code_of(error))

    def _tell_end(self, slot: RunnerSlot, reason: Reason, room_for: str) -> None:
        name = slot.target.name
        log.info("stopping %s: %s%s", name, reason, room_for and f" ({room_for})")
        if reason is Reason.ROOM:
            why = f"{room_for or 'another model'} needs the room"
            details = {"code": reason.code, "room_for": room_for}
            self._events.emit("evict", model=name, runner=slot.runner.id, reason=why, **details)
        else:
            self._events.emit("stop", model=name, runner=slot.runner.id, reason=reason, code=reason.code)

    def _start(self, id: RunnerId, option: RunOption) -> None:
        """Starts a runner for the requests that wait for its key, or beside those that the key has."""
        key, present = id.key, self.slots.of(id.key)
        queue = self.queues.get(key)
        target, variants = (queue.target, queue.variants) if queue else (present[0].target, present[0].variants)
        variant = variants[option.number].variant
        host, *others = [self._hosts[name] for name in option.place.hosts]
        try:
            runner = host.start(id, variant.spec, others)
        except (ModelRunnerError, OSError) as error:
            self.refuse(key, error)
            return
        except Exception as error:  # a fault of the backend's: the plan goes on for the other models
            log.error("the backend %s failed to make a runner", key.backend, exc_info=error)
            what = f"the backend {key.backend} failed to start {target.name}: {type(error).__name__}: {error}"
            self.refuse(key, EngineFailed(what))
            return
        runner.expect(option.memory)
        log.info("starting %s (%s)%s", target.name, runner.id, option.place)
        memory = option.memory
        self._events.emit("load", model=target.name, runner=runner.id, ram=memory.ram, vram=list(memory.vram))
        slot = RunnerSlot(runner, target, variant, option, self.time(), id.number, variants)
        self.slots.add(slot)
        self._budgets_at_start |= self.budgets()
        owner = partial(self.queues.owner, key, self._unasked)
        slot.run(runner.run(self.changed, owner), partial(self._ended, slot))

    def _ended(self, slot: RunnerSlot, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and slot.phase is not Phase.STOPPING:
            slot.failed(task.exception() or EngineFailed("the backend's run() returned"))
        if slot.error is not None:
            log.warning("%s ended: %s", slot.target.name, slot.error)
            code, why = code_of(slot.error), str(slot.error)
            self._events.emit("crash", model=slot.target.name, runner=slot.runner.id, reason=why, code=code)
        slot.become(Phase.ENDED, self.time())
        self.changed()  # before those that wait for its end go on: they see it forgotten
        slot.gone.set()

    def _became_ready(self, slot: RunnerSlot, now: float) -> None:
        slot.become(Phase.READY, now)
        self._sleeping.add(slot)
        loaded = self.load_seconds[slot.target.key] = round(slot.load_seconds, 3)
        self._events.emit("ready", model=slot.target.name, runner=slot.runner.id, seconds=loaded)
        self._measure(slot, fresh=True)

    def _measure(self, slot: RunnerSlot, fresh: bool = False) -> None:
        """Measures a runner when it is loaded, after its first use, and again while it is used: some engines grow with
        their requests."""
        self._background.start(self._measure_now(slot, fresh))

    async def _measure_now(self, slot: RunnerSlot, fresh: bool) -> None:
        if await self._account.measure(slot, fresh=fresh):
            self.changed()

    async def _estimate(self, queue: Queue) -> None:
        """Gets the estimate that the queue waits for, or another one, a rest after the one that may be under way. If
        that fails, the error answers its requests. For nobody it makes none."""
        queue.is_stale = True
        if queue.is_looking:
            return
        loop, queue.is_looking = asyncio.get_running_loop(), True
        try:
            while queue.is_stale and queue.tickets:
                queue.is_stale, began = False, loop.time()
                await self._look(queue)
                self.changed()
                if queue.is_stale:
                    await asyncio.sleep(_rest(loop.time() - began))
        finally:
            queue.is_looking = False

    async def _look(self, queue: Queue) -> None:
        target, variants = queue.target, None
        try:
            while variants is None or queue.target is not target:  # its settings have changed meanwhile
                target, variants = queue.target, None
                try:
                    variants = await self.variants(target)
                except Unavailable:
                    waiting = [ticket.request for ticket in queue.tickets.values()]
                    if self.time() >= waits_for_hosts(self.moved(), waiting, self.policy):
                        raise
                    await asyncio.sleep(_AGAIN)
            queue.learn(variants)
        except Exception as error:
            self._refuse(target.key, tuple(queue.tickets), error)

    async def variants(self, target: Target) -> Sequence[HostedVariant]:
        """The ways to run the target, those of each host together, the preferred one first."""
        return await self._account.variants(target, self.budgets())

    async def options(self, target: Target) -> tuple[RunOption, ...]:
        """The options that a request for the target would have now."""
        options = options_of(await self.variants(target))
        return first_of(options) if target.grows and target.key not in self.grown else options


def _rest(took: float) -> float:
    """Returns the seconds to rest after a look for places that took so many."""
    return min(_LONGEST_REST, _REST * took)
