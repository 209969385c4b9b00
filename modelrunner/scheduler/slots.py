"""What the scheduler keeps: its runners, its queues, and the leases it has given out."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, Self

from modelrunner.scheduler.order import capacity
from modelrunner.scheduler.state import Group, Phase, Reason, Request, Slot
from modelrunner.types import KeepAlive, RequiredMemory, RunnerKey, RunSpec, Variant

if TYPE_CHECKING:
    from modelrunner.runner import Runner


@dataclass(frozen=True, slots=True)
class Target:
    """What a request asks for: the runner's key, how to start one, and the model's own settings."""

    key: RunnerKey
    spec: RunSpec
    keep_alive: KeepAlive
    pinned: bool = False

    @property
    def name(self) -> str:
        """What people call the model."""
        return self.spec.bundle.name


class RunnerSlot:
    """One runner from its start until its process is gone, with what only the scheduler knows about it. `variant` is
    the way in which it runs its model, the one of that `number`, `memory` what counts for it now, `capacity` how many
    leases it gives out at once. `rest` is what it does between two times of being ready: it sleeps, or is woken
    (`STARTING`); `awake` is what counts for it when it does neither. `held` is how long its requests hold a lease, a
    moving mean in seconds."""

    def __init__(
        self, runner: "Runner", target: Target, variant: Variant, number: int, memory: RequiredMemory, now: float
    ) -> None:
        self.runner = runner
        self.target = target
        self.variant = variant
        self.number = number
        self.capacity = capacity(variant.spec.parallel)
        self.pinned = target.pinned
        self.estimated = memory
        self.memory = memory
        self.measured: RequiredMemory | None = None
        self.started = self.last_used = now
        self.load_began = now  # or its waking
        self.load_seconds = 0.0
        self.ready_at: float | None = None
        self.sleep_level = 0
        self.rest: Phase | None = None
        self.awake: RequiredMemory | None = None
        self.turn = asyncio.Lock()  # held while it falls asleep or is woken
        self.measured_at = float("-inf")  # since it was used
        self.held: float | None = None
        self.keep_alive = target.keep_alive
        self.leases = 0
        self.drain: Reason | None = None
        self.room_for = ""  # the name of the model that it is drained for
        self.stopping = False
        self.ended = False
        self.error: BaseException | None = None
        self.gone = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def phase(self) -> Phase:
        if self.ended:
            return Phase.ENDED
        if self.stopping:
            return Phase.STOPPING
        if self.drain is not None:
            return Phase.DRAINING
        return Phase.STARTING if self.ready_at is None else self.rest or Phase.READY

    @property
    def expires(self) -> float:
        """When the idle timer puts it to sleep or stops it, if nobody uses it before; infinity for never."""
        keep_alives = 2 if self.rest is Phase.SLEEPING else 1
        return float("inf") if self.pinned else self.last_used + keep_alives * self.keep_alive.seconds

    def asleep(self) -> RequiredMemory:
        """What it holds while it sleeps, at most: level 1 moves the weights, which are about as large as their files,
        to main memory."""
        memory, spec = self.awake or self.memory, self.variant.spec
        weights = spec.bundle.size + (spec.draft.size if spec.draft is not None else 0)
        moved = min(weights, sum(memory.vram)) if self.sleep_level == 1 else 0
        return replace(memory, ram=memory.ram + moved, vram=(0,) * len(memory.vram))

    def view(self) -> Slot:
        """The slot as a plan sees it."""
        ready = self.ready_at is not None
        return Slot(
            key=self.target.key,
            phase=self.phase,
            memory=self.memory,
            leases=self.leases,
            last_used=self.last_used,
            keep_alive=self.keep_alive.seconds,
            pinned=self.pinned,
            load_seconds=self.load_seconds,
            drain=self.drain,
            was_ready=ready,
            error=self.error,
            ready_at=self.ready_at if self.ready_at is not None else float("-inf"),
            capacity=self.capacity,
            variant=self.number,
            other=self.awake or (self.asleep() if self.sleep_level else None),
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
    """The requests that wait for one key, oldest first, and the ways to run their model, none while those are still
    asked for."""

    target: Target
    tickets: dict[int, Ticket] = field(default_factory=dict)
    variants: Sequence[Variant] = ()

    def view(self) -> Group:
        """The queue as a plan sees it."""
        waiting = tuple([ticket.request for ticket in self.tickets.values()])
        needs = tuple([variant.memory for variant in self.variants])
        return Group(self.target.key, waiting, needs, self.target.name, self.target.pinned)


class Queues(dict[RunnerKey, Queue]):
    """By the key that they wait for; a queue goes with its last ticket."""

    def take(self, requests: Iterable[int], key: RunnerKey) -> list[Ticket]:
        """These out of the queue; not among them is who was cancelled in this very turn of the loop."""
        queue = self.get(key)
        if queue is None:
            return []
        taken = [ticket for id in requests if (ticket := queue.tickets.pop(id, None)) is not None]
        if not queue.tickets:
            del self[key]
        return [ticket for ticket in taken if not ticket.granted.done()]


class Leases(Protocol):
    """Who takes a lease back."""

    def lease_ended(self, slot: RunnerSlot, keep_alive: KeepAlive, taken: float) -> None:
        """`taken` is when it began."""


class Lease:
    """A request's hold on a runner: while it lasts, the runner is neither evicted nor stopped by its idle timer.

    `waited` is the time in the queue, load included, `loaded` the part of it spent on the load, in seconds. `variant`
    says how the runner differs from what was asked for, "" if it does not."""

    __slots__ = ("_keep_alive", "_owner", "_slot", "_taken", "loaded", "runner", "variant", "waited")

    def __init__(
        self,
        owner: Leases,
        slot: RunnerSlot,
        keep_alive: KeepAlive,
        now: float,
        waited: float = 0.0,
        loaded: float = 0.0,
    ) -> None:
        self.runner = slot.runner
        self.variant = slot.variant.label
        self.waited = waited
        self.loaded = loaded
        self._owner: Leases | None = owner
        self._slot = slot
        self._keep_alive = keep_alive
        self._taken = now

    def release(self) -> None:
        """Gives the runner back; its keep-alive is from now on the one of this request. Safe to call again."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.lease_ended(self._slot, self._keep_alive, self._taken)

    async def engine_ended(self, within: float) -> bool:
        """After a broken connection: did the engine's process end, now or within that many seconds? If so,
        `runner.failure` explains it, unless we stopped it ourselves."""
        try:
            async with asyncio.timeout(within):
                await self._slot.gone.wait()
        except TimeoutError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
