"""The leases by which requests hold runners, and the scheduler's runners, which grant them."""

import asyncio
from collections.abc import Callable
from typing import Self

from modelrunner.engine.connections import UpstreamConnection
from modelrunner.scheduler.eventloop import Alarm
from modelrunner.scheduler.queues import Queues
from modelrunner.scheduler.slots import RunnerSlot
from modelrunner.scheduler.standstill import Standstill
from modelrunner.scheduler.state import Phase
from modelrunner.scheduler.target import Target
from modelrunner.types import KeepAlive, RunnerKey

_READY = Phase.READY  # to look it up in its class costs every request
_MEASURED_AGE = 30.0  # seconds between two measurements of a runner in use


class Slots(dict[RunnerKey, RunnerSlot]):
    """The runners by their key; grants leases and takes them back. `queues` are the requests that wait, `alarm`
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
        self.batches = 0  # their leases
        self.standstill = Standstill(self, queues, clock)

    def standing(self, target: Target) -> Target:
        """The target whose runner a request for `target` shares. This is `target` if its runner exists or is waited
        for, otherwise the newest other revision whose runner still accepts requests, and the runner of batches if there
        is no other."""
        slot = self.get(target.key)
        if target.key in self._queues or (slot is not None and slot.takes_requests):
            return target
        others = [slot.target for slot in self.values() if slot.takes_requests]
        others += [queue.target for queue in self._queues.values()]
        same = [o for o in others if o.key._replace(revision=target.key.revision, batch=False) == target.key]
        return max(same, key=lambda other: (other.key.revision, not other.key.batch), default=target)

    def for_batch(self, target: Target) -> Target:
        """The target whose runner a batch's request shares, if a client's request would share the runner of
        `target`."""
        own = self.get(target.key._replace(batch=True))
        return own.target if own is not None and own.phase in (Phase.STARTING, Phase.READY) else target

    def warm(
        self, target: Target, keep_alive: KeepAlive | None = None, batch: bool = False, owner: str | None = None
    ) -> "Lease | None":
        """A lease if the runner is ready and no other request waits for it; otherwise None. Never waits. `owner` is
        described at `Scheduler.acquire`."""
        slot = self.get(target.key)
        if slot is None:
            slot = self.get(self.standing(target).key)
        if batch and slot is not None:
            slot = self.get(self.for_batch(slot.target).key)
        if slot is None or slot.phase is not _READY or slot.leases >= slot.capacity:
            return None
        if self._queues and slot.target.key in self._queues:
            return None
        now = self._clock()
        if batch and not slot.takes_batch(now):
            return None
        return Lease(self, slot, keep_alive or target.keep_alive, now, batch, owner)

    def lease(
        self,
        slot: RunnerSlot,
        keep_alive: KeepAlive,
        owner: str | None,
        batch: bool = False,
        since: float | None = None,
    ) -> "Lease":
        """A lease of this runner. `since` is when its request began to wait, None if it did not."""
        lease = Lease(self, slot, keep_alive, self._clock(), batch, owner)
        if since is not None and slot.ready_at is not None:
            lease.waited = lease.taken - since
            lease.loaded = max(0.0, slot.ready_at - max(slot.load_began, since))
        return lease

    def lent(self, lease: "Lease") -> None:
        """Called by a lease that began for or beside a batch. Other leases save the time of this call."""
        self.batches += lease.batch
        self.standstill.look()

    def take_back(self, lease: "Lease") -> None:
        """Called by the lease at its end. Among concurrent requests the last to end decides the keep-alive."""
        slot, now = lease.slot, self._clock()
        slot.take_back(lease, now)
        if self.batches:
            self.standstill.look()
            self.batches -= lease.batch
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
    began at `taken`. `limits` bound one request of the model. `variant` says how the runner differs from the
    configuration, "" if it does not."""

    __slots__ = (
        "_slots",
        "abandoned",
        "batch",
        "keep_alive",
        "limits",
        "loaded",
        "runner",
        "slot",
        "taken",
        "variant",
        "waited",
    )

    def __init__(
        self, slots: Slots, slot: RunnerSlot, keep_alive: KeepAlive, now: float, batch: bool, owner: str | None
    ) -> None:
        self.runner = slot.runner
        self.variant = slot.variant.label
        self.limits = slot.target.limits
        self.waited = self.loaded = 0.0
        self.abandoned = False
        self.slot, self.keep_alive, self.taken, self.batch = slot, keep_alive, now, batch
        self._slots: Slots | None = slots
        slot.lend(self, owner)
        if batch or slots.batches:
            slots.lent(self)

    def release(self) -> None:
        """Gives the runner back; its keep-alive is from now on the one of this request. Safe to call again."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.take_back(self)

    def abandon(self, connection: UpstreamConnection) -> None:
        """The client has left a request that its engine may work on. The lease ends when the engine is done with it,
        and the runner may be stopped before that. Does nothing for a lease that was released."""
        if self._slots is not None and not self.abandoned:
            self._slots.abandon(self)
            self.runner.abandoned.add(connection, self.release)

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
