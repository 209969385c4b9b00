"""The scheduler's runners, and the leases by which requests hold them."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from modelrunner.engine.connections import UpstreamConnection
from modelrunner.scheduler.eventloop import Alarm
from modelrunner.scheduler.queues import Queues
from modelrunner.scheduler.state import (
    SUSPECT,
    SUSPECT_TURN,
    HostedVariant,
    Phase,
    Reason,
    Request,
    RunnerId,
    RunOption,
    Slot,
)
from modelrunner.scheduler.target import Replicas, RetainedSettings, Target
from modelrunner.types import KeepAlive, RequiredMemory, RunnerKey, Served, Variant

if TYPE_CHECKING:
    from modelrunner.engine.runner import Runner

# The allowed changes of a slot's phase. A sleeping runner is woken by way of STARTING. DRAINING again gives the drain
# another reason. A runner that has begun to end does not come back.
_NEXT: Mapping[Phase, frozenset[Phase]] = {
    Phase.STARTING: frozenset({Phase.READY, Phase.DRAINING, Phase.STOPPING, Phase.ENDED}),
    Phase.READY: frozenset({Phase.SLEEPING, Phase.DRAINING, Phase.STOPPING, Phase.ENDED}),
    Phase.SLEEPING: frozenset({Phase.STARTING, Phase.DRAINING, Phase.STOPPING, Phase.ENDED}),
    Phase.DRAINING: frozenset({Phase.DRAINING, Phase.STOPPING, Phase.ENDED}),
    Phase.STOPPING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
_READY, _SLEEPING = Phase.READY, Phase.SLEEPING  # to look them up in their class costs every request
_KEPT_PHASES = 16
_MOST_CONVERSATIONS = 4096
_MEASURED_AGE = 30.0  # seconds between two measurements of a runner in use


class RunnerSlot:
    """One runner from its start until its process is gone, and the scheduler's own figures about it. Other classes read
    the attributes; only the methods change them.

    The runner is that of its key with that `number`; `variants` are the ways in which another one could run.
    `variant` is how the runner runs its model, which was that `option`, with at most `capacity` leases at once.
    `estimated` memory counted at the start, `memory` counts now, `measured` was seen last. `load_began` is when the
    load or the waking began, `ready_at` when it ended (None before), `load_seconds` how long the load took. `held` is
    the moving mean of the seconds for which a request holds a lease. `drain` says why the runner takes no new leases,
    `room_for` which model gets its memory, `error` how it ended by itself, `ended_with` how many leases it had then.
    It was started for `target`; `targets` are those that it serves, by model ID: presets share a runner. `lent`
    are the leases. It is never evicted if it is `pinned` for one of them; `replicas` is the most that one of them asks
    for. `suspect` is the lease of the suspect whose turn it is. `gone` is set once the process is gone."""

    def __init__(
        self,
        runner: "Runner",
        target: Target,
        variant: Variant,
        option: RunOption,
        now: float,
        number: int = 0,
        variants: Sequence[HostedVariant] = (),
    ) -> None:
        self.runner = runner
        self.id = RunnerId(target.key, number)
        self.number = number
        self.variants = variants
        self.target = target
        self.targets = {target.model_id: target}
        self.pinned, self.replicas = target.pinned, target.replicas
        self.lent: set[Lease] = set()
        self._served: dict[str, Served] = {}
        self.variant, self.option = variant, option
        self.capacity = variant.spec.parallel
        self.estimated = self.memory = option.memory
        self.measured: RequiredMemory | None = None
        self.measured_at = float("-inf")  # since it was used
        self.phase = Phase.STARTING
        self.started = self.last_used = self.load_began = now
        self.load_seconds = 0.0
        self.ready_at: float | None = None
        self.held: float | None = None
        self.keep_alive = target.keep_alive
        self.leases = self.abandoned = 0
        self.drain: Reason | None = None
        self.room_for = ""
        self.error: BaseException | None = None
        self.ended_with = 0
        self.suspect: Lease | None = None
        self.gone = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._history = deque([Phase.STARTING], _KEPT_PHASES)

    def __repr__(self) -> str:
        return f"<RunnerSlot {self.target.name} {' -> '.join(self._history)}>"

    @property
    def awaited(self) -> int:
        """The leases whose clients have not left."""
        return self.leases - self.abandoned

    @property
    def interactive(self) -> int:
        """The leases whose clients wait and are no batch."""
        return sum([not (lease.batch or lease.abandoned) for lease in self.lent])

    @property
    def takes_requests(self) -> bool:
        """True unless the runner is leaving or gone."""
        return self.phase in (Phase.STARTING, Phase.READY, Phase.SLEEPING)

    @property
    def expires(self) -> float:
        """The time when an unused runner falls asleep or stops; infinity for never."""
        if self.pinned:
            return float("inf")
        keep_alives = 2 if self.phase is _SLEEPING else 1
        return self.last_used + keep_alives * self.keep_alive.seconds

    def become(self, phase: Phase, now: float, *, drain: Reason | None = None, room_for: str = "") -> None:
        """Changes the phase at time `now`. `drain` and `room_for` belong to DRAINING. Raises `RuntimeError` with the
        slot's history if the change is not allowed."""
        if phase not in _NEXT[self.phase]:
            raise RuntimeError(f"{self!r} cannot become {phase}")
        self.phase = phase
        self._history.append(phase)
        match phase:
            case Phase.STARTING:
                self.load_began = now
            case Phase.READY:
                if self.ready_at is None:
                    self.load_seconds = now - self.load_began
                self.ready_at = self.last_used = now
            case Phase.DRAINING:
                self.drain, self.room_for = drain, room_for
            case Phase.ENDED:
                self.ended_with = self.leases
            case _:
                pass

    def run(self, run: Coroutine[Any, Any, None], ended: "Callable[[asyncio.Task[None]], None]") -> None:
        """Starts the task in which the runner's process lives; `ended` is called at its end."""
        self._task = asyncio.get_running_loop().create_task(run, name=f"runner {self.runner.id}")
        self._task.add_done_callback(ended)

    def stop(self, now: float) -> bool:
        """Ends the runner's process, whoever uses it. False if it has ended, or is ending already."""
        if self._task is None or self.phase in (Phase.STOPPING, Phase.ENDED):
            return False
        self.become(Phase.STOPPING, now)
        self.runner.mark_stopping()
        self._task.cancel()
        return True

    def failed(self, error: BaseException) -> None:
        """Notes why the runner ends by itself; the first reason stays."""
        self.error = self.error or error

    def lend(self, lease: "Lease", owner: str | None) -> None:
        """Counts a lease that begins, and the `owner` of its request."""
        if owner is not None:
            self.runner.owners.add(owner)
        model_id = lease.target.spec.model_id
        if self.targets.get(model_id) is not lease.target:
            self._serve(model_id, lease.target)
        self.lent.add(lease)
        self.leases += 1
        self.last_used = lease.taken

    def abandon(self, lease: "Lease", now: float) -> None:
        """Counts a lease whose client has left."""
        lease.abandoned = True
        self.abandoned += 1
        self.last_used, self.keep_alive = now, lease.keep_alive

    def take_back(self, lease: "Lease", now: float) -> None:
        """Counts a lease that has ended."""
        self.leases -= 1
        self.lent.discard(lease)
        if lease.abandoned:
            self.abandoned -= 1
        else:
            self.last_used, self.keep_alive = now, lease.keep_alive
        held = now - lease.taken
        self.held = held if self.held is None else 0.8 * self.held + 0.2 * held

    def begin_turn(self, lease: "Lease") -> None:
        """Notes that the turn of a suspect begins."""
        self.suspect = lease

    def end_turn(self) -> None:
        """Lets the next suspect be asked."""
        self.suspect = None

    def measures(self, now: float) -> None:
        """Notes that the memory is measured at `now`."""
        self.measured_at = now

    def count(self, memory: RequiredMemory, measured: RequiredMemory | None) -> None:
        """Sets the memory that counts from now on, and what was measured."""
        self.memory, self.measured = memory, measured

    def add_label(self, label: str) -> None:
        """Adds to what is said about how the runner differs from the configured way."""
        self.variant = replace(self.variant, label=", ".join(filter(None, (self.variant.label, label))))

    def retain(self, model_id: str, settings: RetainedSettings) -> bool:
        """Gives a model that the runner serves new settings. A keep-alive that the last request asked for stays. False
        if nothing changes."""
        target = self.targets.get(model_id)
        if target is None or (changed := settings.applied(target)) == target:
            return False
        if self.keep_alive == target.keep_alive:
            self.keep_alive = settings.keep_alive
        self._serve(model_id, changed)
        return True

    def forget(self, model_id: str) -> None:
        """Serves the model no more, until it is asked for again."""
        self._serve(model_id, None)

    def _serve(self, model_id: str, target: Target | None) -> None:
        """Serves the model with the settings of this target, with None not any more."""
        if target is not None:
            self.targets[model_id] = target
        else:
            self.targets.pop(model_id, None)
        targets = [*self.targets.values()]
        self.pinned = any(target.pinned for target in targets)
        wanted = [target.replicas for target in targets or [self.target]]
        self.replicas = Replicas(*map(max, zip(*wanted, strict=True)))

    def served(self, target: Target) -> Served:
        """How the records of the target's requests name the runner: one object for each name."""
        mine = self.runner.served
        if target.model_id == self.target.model_id:
            return mine
        served = self._served.get(target.name)
        if served is None:
            served = self._served[target.name] = Served(target.name, mine.backend, mine.runner)
        return served

    def view(self) -> Slot:
        """The slot as a plan sees it."""
        return Slot(
            key=self.target.key,
            phase=self.phase,
            memory=self.memory,
            leases=self.awaited,
            last_used=self.last_used,
            keep_alive=self.keep_alive.seconds,
            pinned=self.pinned,
            load_seconds=self.load_seconds,
            drain=self.drain,
            error=self.error,
            ready_at=self.ready_at if self.ready_at is not None else float("-inf"),
            option=self.option,
            interactive=self.interactive,
            abandoned=self.abandoned,
            parallel=self.variant.spec.parallel,
            number=self.number,
            least=self.replicas.least,
            grows=self.target.grows and self.capacity == 1,
            suspects_from=self.suspect.taken + SUSPECT_TURN if self.suspect is not None else float("-inf"),
        )


class Affinity:
    """The runners that have the beginnings of conversations in their caches, by key and a hash of the beginning. Keeps
    the 4,096 that were asked last."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[RunnerKey, int], int] = {}

    def number(self, key: RunnerKey, prefix: int | None) -> int | None:
        """The number of the runner of the key that was last asked with this beginning; None if none was."""
        return self._numbers.get((key, prefix)) if prefix is not None else None

    def note(self, key: RunnerKey, prefix: int, number: int) -> None:
        self._numbers.pop((key, prefix), None)
        self._numbers[key, prefix] = number
        if len(self._numbers) > _MOST_CONVERSATIONS:
            del self._numbers[next(iter(self._numbers))]


class Slots(dict[RunnerId, RunnerSlot]):
    """The runners; grants leases and takes them back. `queues` are the requests that wait, `alarm`
    rings for the next plan, `clock` is in seconds; `measure` is called after a lease of a runner whose memory was
    measured long ago."""

    def __init__(
        self, queues: Queues, alarm: Alarm, clock: Callable[[], float], measure: Callable[[RunnerSlot], None]
    ) -> None:
        super().__init__()
        self._queues = queues
        self._alarm = alarm
        self._clock = clock
        self._measure = measure
        self._of: dict[RunnerKey, list[RunnerSlot]] = {}
        self.affinity = Affinity()
        self.last_used = -math.inf  # of the runners that are gone, in seconds of the clock

    def add(self, slot: RunnerSlot) -> None:
        self[slot.id] = slot
        self._of.setdefault(slot.target.key, []).append(slot)

    def remove(self, runner: RunnerId) -> RunnerSlot:
        """Removes and returns the slot of a runner that is gone."""
        slot = self.pop(runner)
        self.last_used = max(self.last_used, slot.last_used)
        self._of[runner.key].remove(slot)
        if not self._of[runner.key]:
            del self._of[runner.key]
        return slot

    def of(self, key: RunnerKey) -> Sequence[RunnerSlot]:
        """The runners of the key, oldest first."""
        return self._of.get(key, ())

    def first(self, key: RunnerKey) -> RunnerSlot | None:
        """The runner of the key that answers soonest: a ready one, else one that takes requests, else any."""
        slots = self.of(key)
        return max(slots, key=lambda s: (s.phase is _READY, s.takes_requests), default=None)

    def standing(self, target: Target) -> Target:
        """The target whose runner a request for `target` shares. This is `target` if its runner exists or is waited
        for, otherwise the newest with another revision that serves the model and still accepts requests."""
        if target.key in self._queues or any(slot.takes_requests for slot in self.of(target.key)):
            return target
        model, place = target.model_id, (target.key.backend, target.key.mode)
        slots = [slot.target for slot in self.values() if slot.takes_requests and model in slot.targets]
        others = slots + [queue.target for queue in self._queues.values() if queue.has(model)]
        same = [other for other in others if (other.key.backend, other.key.mode) == place]
        return same[-1] if same else target

    def warm(
        self,
        target: Target,
        keep_alive: KeepAlive | None = None,
        batch: bool = False,
        owner: str | None = None,
        prefix: int | None = None,
    ) -> "Lease | None":
        """A lease if a runner is ready and no other request waits for it; otherwise None. Never waits. `owner` and
        `prefix` are described at `Scheduler.acquire`."""
        slots = self._of.get(target.key) or self.of(self.standing(target).key)
        if not slots:
            return None
        slot = slots[0] if len(slots) == 1 else self._choose(slots, prefix)
        if slot is None or slot.phase is not _READY or slot.leases >= slot.capacity:
            return None
        if self._queues and slot.target.key in self._queues:
            return None
        return Lease(self, slot, target, keep_alive or target.keep_alive, self._clock(), batch, owner, prefix)

    def _choose(self, slots: Sequence[RunnerSlot], prefix: int | None) -> RunnerSlot | None:
        """The runner with a free place that has the conversation in its cache, else the one with the fewest leases."""
        free = [slot for slot in slots if slot.phase is _READY and slot.leases < slot.capacity]
        number = self.affinity.number(slots[0].target.key, prefix)
        return min(free, key=lambda s: (s.number != number, s.leases, s.number), default=None)

    def lease(
        self,
        slot: RunnerSlot,
        target: Target,
        keep_alive: KeepAlive,
        owner: str | None,
        request: Request | None = None,
        prefix: int | None = None,
    ) -> "Lease":
        """A lease of this runner for the target's model and the `request`, None for one that did not wait."""
        lease = Lease(
            self, slot, target, keep_alive, self._clock(), request is not None and request.batch, owner, prefix
        )
        if request is not None and slot.ready_at is not None:
            lease.crashes = request.crashes
            lease.waited = lease.taken - request.since
            lease.loaded = max(0.0, slot.ready_at - max(slot.load_began, request.since))
            if request.suspect:
                slot.begin_turn(lease)
        return lease

    def end_turn(self, lease: "Lease") -> None:
        """Called by the lease of a suspect when the next one may be asked."""
        if lease.slot.suspect is lease:
            lease.slot.end_turn()
            self._alarm.soon()

    def take_back(self, lease: "Lease") -> None:
        """Called by the lease at its end. Among concurrent requests the last to end decides the keep-alive."""
        slot, now = lease.slot, self._clock()
        slot.take_back(lease, now)
        ready = slot.phase is _READY
        if ready and now >= slot.measured_at + _MEASURED_AGE:
            slot.measures(now)
            self._measure(slot)
        if self._queues or not ready:
            self._alarm.soon()
        elif slot.leases == slot.abandoned and slot.expires < self._alarm.rings_at:
            self._alarm.at(slot.expires)

    def abandon(self, lease: "Lease") -> None:
        """Called by the lease when its client has left. No plan waits for it any more, and its place stays taken."""
        lease.slot.abandon(lease, self._clock())
        self._alarm.soon()


class Lease:
    """A request's hold on a runner: while its client is there, the runner is neither evicted nor stopped by its idle
    timer. The lease takes a place of the engine until it is released, even after it was `abandoned`.

    `waited` is the time in the queue, load included, `loaded` the part of it spent on the load, in seconds; the lease
    began at `taken`. `target` is of the model that was asked, which may be another preset than the one that the runner
    was started for. The engine crashed `crashes` times before, each time with this request. `limits` bound one request
    of the model, `parameters` change its fields. `variant` says how the runner differs from the configuration, "" if it
    does not."""

    __slots__ = (
        "_slots",
        "abandoned",
        "batch",
        "crashes",
        "keep_alive",
        "limits",
        "loaded",
        "parameters",
        "runner",
        "slot",
        "taken",
        "target",
        "variant",
        "waited",
    )

    def __init__(
        self,
        slots: Slots,
        slot: RunnerSlot,
        target: Target,
        keep_alive: KeepAlive,
        now: float,
        batch: bool,
        owner: str | None,
        prefix: int | None = None,
    ) -> None:
        self.runner = slot.runner
        self.variant = slot.variant.label
        self.target = target
        self.limits = target.limits
        self.parameters = target.parameters
        self.waited = self.loaded = 0.0
        self.crashes = 0
        self.abandoned = False
        self.slot, self.keep_alive, self.taken, self.batch = slot, keep_alive, now, batch
        self._slots: Slots | None = slots
        slot.lend(self, owner)
        if prefix is not None:
            slots.affinity.note(slot.target.key, prefix, slot.number)

    @property
    def preset(self) -> str:
        """The name of the model that was asked, if the runner was started for another preset of it, else ""."""
        wanted, started = self.target, self.slot.target
        return "" if wanted is started or wanted.model_id == started.model_id else wanted.name

    @property
    def served(self) -> Served:
        """How the record of the request names its runner."""
        return self.slot.served(self.target)

    def release(self) -> None:
        """Gives the runner back; its keep-alive is from now on the one of this request. Safe to call again."""
        slots, self._slots = self._slots, None
        if slots is not None:
            if self.crashes:
                slots.end_turn(self)
            slots.take_back(self)

    def answered(self) -> None:
        """Called with the first byte of the answer: the turn of a suspect is over. Safe to call again."""
        if self.crashes and self._slots is not None:
            self._slots.end_turn(self)

    def abandon(self, connection: UpstreamConnection, freed: Callable[[], None]) -> None:
        """The client has left a request that its engine may work on. The lease ends when the engine is done with it,
        and the runner may be stopped before that. Then `freed` is called; at once for a lease that was released."""

        def free() -> None:
            self.release()
            freed()

        if self._slots is None or self.abandoned:
            freed()
            return
        self.answered()
        self._slots.abandon(self)
        self.runner.abandoned.add(connection, free)

    @property
    def tries(self) -> int:
        """How often a request that crashes the engine each time is asked; read once the engine has ended. Twice if the
        engine had no other request in the end, else once more, apart from the other suspects."""
        return SUSPECT if self.slot.ended_with == 1 else SUSPECT + 1

    async def engine_ended(self, within: float) -> bool:
        """Waits after a broken connection for the engine's process to end, at most `within` seconds. True if it ended;
        `runner.failure` then explains it, unless we stopped it ourselves."""
        try:
            async with asyncio.timeout(within):
                await self.slot.gone.wait()
        except TimeoutError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
