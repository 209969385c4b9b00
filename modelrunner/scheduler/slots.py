"""The scheduler's state: runners, queues, and leases."""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, Self

from modelrunner.scheduler.state import Group, Phase, Reason, Request, Slot
from modelrunner.scheduler.turns import capacity
from modelrunner.types import KeepAlive, RequiredMemory, RunnerKey, RunSpec, Variant

if TYPE_CHECKING:
    from modelrunner.runner import Runner


@dataclass(frozen=True, slots=True)
class Target:
    """A request's runner: its key, how to start it, and the model's own settings."""

    key: RunnerKey
    spec: RunSpec
    keep_alive: KeepAlive
    pinned: bool = False

    @property
    def name(self) -> str:
        """The model's name in messages."""
        return self.spec.bundle.name


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
_KEPT_PHASES = 16


class RunnerSlot:
    """One runner from its start until its process is gone, with what only the scheduler knows about it. Others read the
    attributes; only the methods change them.

    `variant` is how the runner runs its model, the variant of that `number`, with at most `capacity` leases at once.
    `estimated` memory counted at the start, `memory` counts now, `measured` was seen last. `load_began` is when the
    load or the waking began, `ready_at` when it ended (None before), `load_seconds` how long the load took. `held` is
    how long a request holds a lease, a moving mean in seconds. `drain` says why the runner takes no new leases,
    `room_for` which model gets its memory, `error` how it ended by itself. `gone` is set once the process is gone."""

    def __init__(
        self, runner: "Runner", target: Target, variant: Variant, number: int, memory: RequiredMemory, now: float
    ) -> None:
        self.runner = runner
        self.target = target
        self.variant, self.number = variant, number
        self.capacity = capacity(variant.spec.parallel)
        self.estimated = self.memory = memory
        self.measured: RequiredMemory | None = None
        self.measured_at = float("-inf")  # since it was used
        self.phase = Phase.STARTING
        self.started = self.last_used = self.load_began = now
        self.load_seconds = 0.0
        self.ready_at: float | None = None
        self.held: float | None = None
        self.keep_alive = target.keep_alive
        self.leases = self.interactive = 0
        self.drain: Reason | None = None
        self.room_for = ""
        self.error: BaseException | None = None
        self.gone = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._history = deque([Phase.STARTING], _KEPT_PHASES)

    def __repr__(self) -> str:
        return f"<RunnerSlot {self.target.name} {' -> '.join(self._history)}>"

    @property
    def expires(self) -> float:
        """When the idle timer puts the runner to sleep or stops it if no request comes; infinity for never."""
        keep_alives = 2 if self.phase is Phase.SLEEPING else 1
        return float("inf") if self.target.pinned else self.last_used + keep_alives * self.keep_alive.seconds

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
            case _:
                pass

    def failed(self, error: BaseException) -> None:
        """Notes why the runner ends by itself; the first reason stays."""
        self.error = self.error or error

    def lend(self, now: float, *, batch: bool) -> None:
        """Counts a lease."""
        self.leases += 1
        self.interactive += not batch
        self.last_used = now

    def take_back(self, now: float, keep_alive: KeepAlive, held: float, *, batch: bool) -> None:
        """A lease has ended after `held` seconds. Among concurrent requests the last to end decides the keep-alive."""
        self.leases -= 1
        self.interactive -= not batch
        self.last_used, self.keep_alive = now, keep_alive
        self.held = held if self.held is None else 0.8 * self.held + 0.2 * held

    def count(self, memory: RequiredMemory, measured: RequiredMemory | None) -> None:
        """From now on `memory` counts; `measured` was seen."""
        self.memory, self.measured = memory, measured

    def retain(self, keep_alive: KeepAlive, *, pinned: bool) -> None:
        """Gives the runner new settings. A keep-alive that the last request asked for stays."""
        if self.keep_alive == self.target.keep_alive:
            self.keep_alive = keep_alive
        self.target = replace(self.target, keep_alive=keep_alive, pinned=pinned)

    def view(self) -> Slot:
        """The slot as a plan sees it."""
        return Slot(
            key=self.target.key,
            phase=self.phase,
            memory=self.memory,
            leases=self.leases,
            last_used=self.last_used,
            keep_alive=self.keep_alive.seconds,
            pinned=self.target.pinned,
            load_seconds=self.load_seconds,
            drain=self.drain,
            was_ready=self.ready_at is not None,
            error=self.error,
            ready_at=self.ready_at if self.ready_at is not None else float("-inf"),
            capacity=self.capacity,
            variant=self.number,
            interactive=self.interactive,
        )


@dataclass(eq=False, slots=True)
class Ticket:
    """A request in the queue. `granted` ends with its lease or its error."""

    request: Request
    target: Target
    keep_alive: KeepAlive
    granted: "asyncio.Future[Lease]"


@dataclass(eq=False, slots=True)
class Queue:
    """The requests that wait for one key, oldest first. `variants` are the ways to run their model, empty until the
    memory estimate is there. `turn` is when one of them last got a lease, or
    the key's runner was evicted."""

    target: Target
    tickets: dict[int, Ticket] = field(default_factory=dict)
    variants: Sequence[Variant] = ()
    turn: float = float("-inf")

    def view(self, load_seconds: float = 0.0) -> Group:
        """The queue as a plan sees it; `load_seconds` is how long the model's last load took."""
        waiting = tuple([ticket.request for ticket in self.tickets.values()])
        needs = tuple([variant.memory for variant in self.variants])
        target = self.target
        return Group(target.key, waiting, needs, target.name, target.pinned, load_seconds, self.turn)


class Queues(dict[RunnerKey, Queue]):
    """The queues by the key that they wait for. A queue is removed with its last ticket."""

    def take(self, requests: Iterable[int], key: RunnerKey) -> list[Ticket]:
        """Takes these requests out of the queue. Leaves out those that were cancelled in this very turn of the loop."""
        queue = self.get(key)
        if queue is None:
            return []
        taken = [ticket for id in requests if (ticket := queue.tickets.pop(id, None)) is not None]
        if not queue.tickets:
            del self[key]
        return [ticket for ticket in taken if not ticket.granted.done()]


class Leases(Protocol):
    """Takes leases back."""

    def lease_ended(self, lease: "Lease") -> None: ...


class Lease:
    """A request's hold on a runner: while it lasts, the runner is neither evicted nor stopped by its idle timer.

    `waited` is the time in the queue, load included, `loaded` the part of it spent on the load, in seconds; the lease
    began at `taken`. `variant` says how the runner differs from what was asked for, "" if it does not."""

    __slots__ = ("_owner", "batch", "keep_alive", "loaded", "runner", "slot", "taken", "variant", "waited")

    def __init__(
        self,
        owner: Leases,
        slot: RunnerSlot,
        keep_alive: KeepAlive,
        now: float,
        *,
        batch: bool = False,
        waited: float = 0.0,
        loaded: float = 0.0,
    ) -> None:
        self.runner = slot.runner
        self.variant = slot.variant.label
        self.waited, self.loaded = waited, loaded
        self.slot, self.keep_alive, self.taken, self.batch = slot, keep_alive, now, batch
        self._owner: Leases | None = owner

    def release(self) -> None:
        """Gives the runner back; its keep-alive is from now on the one of this request. Safe to call again."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.lease_ended(self)

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
