"""Any sequence of requests, cancellations, crashes and unloads on a scheduler with fake engines, in virtual time."""

import asyncio
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelrunner.errors import (
    BackingOff,
    EngineFailed,
    InsufficientMemory,
    ModelRunnerError,
    QueueFull,
    ShuttingDown,
    TimedOut,
    Unavailable,
)
from modelrunner.scheduler import Lease, Replicas, RetainedSettings
from modelrunner.scheduler.target import ONE
from modelrunner.types import KeepAlive, Mode
from tests.scheduler.fakes import Engine, VirtualLoop, World, settle, target

MAX_WAIT = 40.0
REPLICAS = {"crowd": Replicas(1, 3), "twins": Replicas(2, 2)}
GROWS = "growing"  # it begins with one sequence
names = st.sampled_from(
    ["a", "b", "c", "big", "huge", "broken", "stubborn", "pinned", "split", "hungry", "crowd", "twins", GROWS]
)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.world = World(
            10,
            {
                "a": Engine(3, load_seconds=1.0),
                "b": Engine(4, load_seconds=2.0),
                "c": Engine(3, load_seconds=0.0),
                "big": Engine(8, load_seconds=5.0),
                "huge": Engine(11),
                "broken": Engine(2, load_seconds=0.5, fails=EngineFailed("cannot start")),
                "stubborn": Engine(4, stop_seconds=12.0),
                "pinned": Engine(1),
                "split": Engine(12, smaller=(7, 4)),
                "hungry": Engine(4, smaller=(2,), holds=8),
                "crowd": Engine(2, load_seconds=1.0),
                "twins": Engine(3, load_seconds=0.5),
                GROWS: Engine(5, load_seconds=0.5, smaller=(2,)),
            },
            physical=11,
            most={GROWS: 2, **{name: replicas.most for name, replicas in REPLICAS.items()}},
        )
        self.scheduler = self.run(self.make())
        self.requests: dict[asyncio.Task[Lease], float] = {}
        self.cancelled: set[asyncio.Task[Lease]] = set()
        self.leases: list[Lease] = []
        self.forced: set[str] = set()

    async def make(self) -> Any:
        return self.world.scheduler(max_wait=MAX_WAIT, patience=4.0, max_queue=6, drain_limit=3.0)

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    @rule(
        name=names,
        count=st.integers(1, 4),
        keep_alive=st.sampled_from([0.0, 5.0, 60.0]),
        caller=st.sampled_from(["", "x", "y"]),
        batch=st.booleans(),
    )
    def requests_come(self, name: str, count: int, keep_alive: float, caller: str, batch: bool) -> None:
        async def ask() -> None:
            wanted = target(
                name, pinned=name == "pinned", parallel=2, replicas=REPLICAS.get(name, ONE), grows=name == GROWS
            )
            for prefix in range(count):
                asking = self.scheduler.acquire(wanted, KeepAlive(keep_alive), caller, batch, prefix=prefix)
                task = asyncio.create_task(asking)
                self.requests[task] = self.loop.time()

        self.run(ask())
        self.collect()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), turns=st.integers(0, 4))
    def a_client_leaves(self, data: st.DataObject, turns: int) -> None:
        """At any turn of the loop after something else has happened."""

        async def cancel() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()

        task = data.draw(st.sampled_from(list(self.requests)))
        self.cancelled.add(task)
        self.run(cancel())
        self.collect()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def a_lease_ends(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        self.run(self.call(lease.release))
        self.collect()

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def an_engine_dies(self, data: st.DataObject) -> None:
        runner = data.draw(st.sampled_from(list(self.world.running.values())))
        self.run(self.call(runner.die))
        self.collect()

    @rule(name=names, force=st.booleans())
    def somebody_unloads(self, name: str, force: bool) -> None:
        if force:
            self.forced |= {r.id for r in self.scheduler.runners() if r.model_id == name}
        answer = self.run(self.scheduler.unload(model_ids=[name], force=force))
        assert not (force and answer.kept)
        self.collect()

    @rule(name=names, resume=st.booleans())
    def somebody_pauses_or_resumes(self, name: str, resume: bool) -> None:
        self.run(self.pause(name, resume))
        self.collect()

    @rule(name=names, pinned=st.booleans())
    def somebody_pins_or_unpins(self, name: str, pinned: bool) -> None:
        settings = RetainedSettings(KeepAlive(9.0), pinned, replicas=REPLICAS.get(name, ONE))
        self.run(self.call(lambda: self.scheduler.retain(name, Mode.COMPLETION, settings)))
        self.collect()

    @rule(seconds=st.floats(0.05, 20.0))
    def time_passes(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))
        self.collect()

    async def pause(self, name: str, resume: bool) -> None:
        if resume:
            self.scheduler.resume(name)
        else:
            await self.scheduler.pause(name, name)

    async def call(self, what: Any) -> None:
        what()

    def collect(self) -> None:
        """Every request ends exactly once, as it should."""
        self.run(settle())
        for task in [t for t in self.requests if t.done()]:
            since = self.requests.pop(task)
            if task.cancelled():
                assert task in self.cancelled
            elif (error := task.exception()) is None:
                self.leases.append(task.result())
            else:
                expected = (BackingOff, EngineFailed, InsufficientMemory, QueueFull, TimedOut, Unavailable)
                assert isinstance(error, expected), error
                assert not isinstance(error, TimedOut) or self.loop.time() - since >= MAX_WAIT - 1e-6

    @invariant()
    def never_over_the_budget(self) -> None:
        memory = self.scheduler.memory()
        assert self.world.taken().ram <= memory.used.ram <= memory.budget.ram

    @invariant()
    def no_lease_is_lost_or_made_up(self) -> None:
        alive = {runner.id for runner in self.world.running.values()}
        held = sorted(lease.runner.id for lease in self.leases if lease.runner.id in alive)
        shown = sorted(r.id for r in self.scheduler.runners() for _ in range(r.leases))
        assert held == shown

    @invariant()
    def no_engine_has_more_requests_than_it_can_take(self) -> None:
        assert all(r.leases <= 3 for r in self.scheduler.runners())

    @invariant()
    def nothing_but_force_stops_a_leased_runner(self) -> None:
        stopped = {r.id for r in self.scheduler.runners() if r.leases and r.state == "stopping"}
        assert stopped <= self.forced

    @invariant()
    def nobody_waits_beyond_the_limit(self) -> None:
        assert all(self.loop.time() - since <= MAX_WAIT + 1e-6 for since in self.requests.values())

    def teardown(self) -> None:
        self.run(self.scheduler.close(2.0))
        self.run(settle())
        for task in self.requests:
            error = None if task.cancelled() else task.exception()
            assert task.cancelled() or isinstance(error, ModelRunnerError | ShuttingDown)
        assert not self.world.running
        assert self.scheduler.runners() == []
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40)
