"""An engine that has stopped serving is found out and ended; one that works, however long, is left alone."""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from modelrunner.engine.connections import UpstreamPool
from modelrunner.engine.localrunner import LocalRunner, ProcessPhase
from modelrunner.engine.watchdog import Sample, Silence, Watchdog, after
from modelrunner.engineapi import EngineApi
from modelrunner.errors import EngineFailed
from modelrunner.processes.processtree import Activity
from modelrunner.testing import alive, tree
from modelrunner.types import Endpoint, RunSpec
from tests.fakes import FakeBackend, FakeClock, fake_key, fake_launch, fake_spec
from tests.waiting import HUNG

LIMIT = 0.3
"""Seconds of the clock without a sign of life; a tenth of them really passes between two looks."""
SILENT = ("--first-token-after", "1000")


def look(waiting: int = 0, *, begun: bool = False, answered: bool = False, worked: bool | None = None, busy=False):
    return Sample(waiting, begun, answered, worked, busy)


@pytest.mark.parametrize(
    ("before", "seen", "then"),
    [
        (None, look(), None),
        (None, look(1, begun=True), Silence(100, 100)),
        (None, look(begun=True), Silence(100, 100)),
        (None, look(begun=True, answered=True), None),
        (None, look(begun=True, worked=False), None),
        (Silence(50, 40), look(1), Silence(50, 40)),
        (Silence(50, 40), look(), Silence(50, 40)),
        (Silence(50, 40), look(1, busy=True), Silence(100, 40)),
        (Silence(50, 40), look(1, worked=False), Silence(50, 40)),
        (Silence(50, 40), look(1, worked=True), Silence(100, 100)),
        (Silence(50, 40), look(1, answered=True), Silence(100, 100)),
        (Silence(50, 40), look(answered=True), None),
        (Silence(50, 40), look(worked=False), None),
    ],
)
def test_what_a_look_changes(before: Silence | None, seen: Sample, then: Silence | None) -> None:
    assert after(before, seen, 100) == then


def test_when_it_is_time_to_ask() -> None:
    def suspicious(quiet: float, silent: float, *, counts_work: bool) -> bool:
        return Silence(quiet, silent).suspicious(1000, 60, counts_work=counts_work)

    assert not suspicious(941, 100, counts_work=False)
    assert suspicious(940, 940, counts_work=False)
    assert not suspicious(999, 401, counts_work=True)
    assert suspicious(999, 400, counts_work=True)


class CountingClock(FakeClock):
    """Counts how often it is read: each look of a watchdog does that."""

    read = 0

    def __call__(self) -> float:
        self.read += 1
        return super().__call__()


class Kept:
    """A runner in a task. Time passes for its watchdog when the test says so."""

    def __init__(self, folder: Path, *knobs: str, limit: float = LIMIT, backend: FakeBackend | None = None) -> None:
        self.backend = backend or FakeBackend(folder)
        self.record = folder / "record"
        self.clock = CountingClock()
        spec = fake_spec(folder, *knobs, "--record", str(self.record))
        own = folder / "run"
        self._ready = asyncio.Event()
        key = fake_key(spec, self.backend)
        self.runner = LocalRunner(
            self.backend,
            spec,
            key,
            fake_launch(own, stop_grace=100 * HUNG),
            id="r1",
            folder=own,
            wedge_limit=limit,
            clock=self.clock,
        )
        self.task = asyncio.create_task(self.runner.run(self._changed))

    def _changed(self) -> None:
        if self.runner.process_phase is ProcessPhase.READY:
            self._ready.set()

    async def ready(self) -> LocalRunner:
        async with asyncio.timeout(HUNG):
            await self._ready.wait()
        return self.runner

    def ask(self, text: str = "Hello", **fields: Any) -> "asyncio.Task[tuple[int, bytes]]":
        body = json.dumps({"prompt": text, **fields}).encode()
        return asyncio.create_task(self.runner.upstream.fetch("POST", "/v1/completions", body, timeout=HUNG))

    def probes(self) -> int:
        """How often the watchdog asked."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        bodies = [json.loads(line).get("body") for line in lines]
        probe = self.backend.api(self.runner.spec).probe
        assert probe is not None
        return bodies.count(probe.body.decode())

    async def end(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError, EngineFailed):
            await self.task


@pytest.fixture
async def keep(tmp_path: Path):
    made: list[Kept] = []

    def keep(*knobs: str, **options: Any) -> Kept:
        made.append(Kept(tmp_path, *knobs, **options))
        return made[-1]

    yield keep
    for kept in made:
        await kept.end()


async def replaced(kept: Kept, request: "asyncio.Task[Any] | None") -> None:
    """The runner fails without waiting for its grace, nothing of it is left, and who waited knows."""
    processes = tree(kept.runner)
    async with asyncio.timeout(HUNG):
        while not kept.task.done():
            kept.clock.advance(LIMIT / 10)
            await asyncio.wait([kept.task], timeout=0.01)
    with pytest.raises(EngineFailed, match="stopped answering: nothing came of it for"):
        await kept.task
    assert isinstance(kept.runner.failure, EngineFailed)
    assert not alive(processes)
    if request is not None:
        with pytest.raises(ConnectionError):
            await request


@pytest.mark.parametrize("knobs", [SILENT, (*SILENT, "--ignore-term")])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_is_healthy_and_answers_nothing(keep, knobs, stream) -> None:
    kept = keep(*knobs)
    runner = await kept.ready()
    request = kept.ask(stream=stream)
    assert (await runner.upstream.fetch("GET", "/v1/models", timeout=HUNG))[0] == 200
    await replaced(kept, request)
    # More than once where this engine, in Python, took one per cent of a processor to read a probe: that is work.
    assert kept.probes() >= 1


async def test_an_engine_that_was_stopped_while_it_was_idle(keep) -> None:
    kept = keep()
    os.kill((await kept.ready()).pid, signal.SIGSTOP)
    await replaced(kept, kept.ask())


async def test_clients_with_little_patience_do_not_hide_it(keep) -> None:
    kept = keep(*SILENT)
    runner = await kept.ready()
    with pytest.raises(TimeoutError):
        await runner.upstream.fetch("POST", "/v1/completions", b"{}", timeout=0.05)
    await replaced(kept, None)


async def test_an_engine_that_answers_everything_with_an_error_of_its_own(keep) -> None:
    kept = keep("--status", "503")
    await kept.ready()
    assert (await kept.ask())[0] == 503
    await replaced(kept, None)


async def test_a_request_that_hangs_alone_costs_the_others_nothing(keep) -> None:
    kept = keep(*SILENT, "--only-for", "slow", limit=10.0)  # a probe gets as many real seconds
    await kept.ready()
    request = kept.ask("slow")
    async with asyncio.timeout(HUNG):
        while kept.probes() < 2:
            assert not kept.task.done()
            kept.clock.advance(10.0)
            await asyncio.wait([kept.task], timeout=0.05)
    assert kept.runner.process_phase is ProcessPhase.READY
    assert not request.done()
    request.cancel()


async def test_a_fault_of_a_client_s_request_is_no_fault_of_the_engine_s(keep) -> None:
    kept = keep("--status", "400")
    await kept.ready()
    looked = kept.clock.read
    while kept.clock.read < looked + 20:
        assert (await kept.ask())[0] == 400
        kept.clock.advance(LIMIT / 2)
    assert (kept.probes(), kept.task.done()) == (0, False)


class DozyBackend(FakeBackend):
    def sleep_level(self, spec: RunSpec) -> int:
        return 0

    async def sleep(self, spec: RunSpec, endpoint: Endpoint) -> None: ...

    async def wake(self, spec: RunSpec, endpoint: Endpoint) -> None: ...


async def test_a_sleeping_engine_is_left_alone(keep, tmp_path) -> None:
    """Even one that owes an answer to a client that left."""
    kept = keep(*SILENT, backend=DozyBackend(tmp_path))
    runner = await kept.ready()
    with pytest.raises(TimeoutError):
        await runner.upstream.fetch("POST", "/v1/completions", b"{}", timeout=0.05)
    await runner.sleep()
    kept.clock.advance(100 * LIMIT)
    done, _ = await asyncio.wait([kept.task], timeout=LIMIT)
    assert not done
    assert kept.probes() == 0
    await runner.wake()
    await replaced(kept, kept.ask())


async def test_it_can_be_switched_off(keep) -> None:
    kept = keep(*SILENT, limit=0.0)
    await kept.ready()
    request = kept.ask()
    kept.clock.advance(1e6)
    await asyncio.wait([request, kept.task], timeout=LIMIT, return_when=asyncio.FIRST_COMPLETED)
    assert (kept.probes(), kept.task.done(), request.done()) == (0, False, False)
    request.cancel()


class Counter:
    """Tells of an engine's work what `figures` say."""

    def __init__(self, figures: Iterable[float]) -> None:
        self.figures = iter(figures)

    async def __call__(self, endpoint: Endpoint, api: EngineApi) -> float | None:
        return next(self.figures)


async def no_counter(endpoint: Endpoint, api: EngineApi) -> None:
    return None


async def looks_until_the_end(
    keep: Callable[..., Kept],
    cpu: Callable[[int], float],
    work: Callable[[Endpoint, EngineApi], Awaitable[float | None]] = no_counter,
    limit: float = 0.2,
) -> int:
    """How often a watchdog with a limit of ten looks looks at a hung engine that uses as much of the processor."""
    kept = keep(*SILENT, limit=0.0)
    runner = await kept.ready()
    pool, looks = UpstreamPool(runner.endpoint), 0

    def activity(pid: int) -> Activity:
        nonlocal looks
        looks += 1
        kept.clock.advance(limit / 10)
        return Activity(cpu(looks), 0)

    dog = Watchdog(pool, limit=limit, clock=kept.clock, activity=activity, work=work)
    request = asyncio.create_task(pool.fetch("POST", "/v1/completions", b"{}", timeout=HUNG))
    assert runner.pid is not None
    with pytest.raises(EngineFailed):
        async with asyncio.timeout(HUNG):
            await dog.watch(runner.pid, runner.api)
    request.cancel()
    return looks


async def test_a_long_prompt_on_a_slow_processor_is_no_wedge(keep) -> None:
    """As long as it works."""
    assert await looks_until_the_end(keep, lambda looks: min(looks, 40)) > 40


async def test_a_processor_that_spins_without_any_counted_work_is_one(keep) -> None:
    """A hung device is waited for with a busy loop."""
    looks = await looks_until_the_end(keep, float, Counter(itertools.repeat(7.0)))
    assert looks > 20, "processor time counts for much longer than none"


async def test_an_engine_that_does_not_tell_about_its_work_is_asked_often_all_the_same(keep) -> None:
    """Each question waits for a part of the limit, not for seconds of its own."""
    waits: list[float] = []

    async def mute(endpoint: Endpoint, api: EngineApi) -> float | None:
        began = asyncio.get_running_loop().time()
        try:
            await asyncio.Event().wait()
        finally:
            waits.append(asyncio.get_running_loop().time() - began)
        raise AssertionError

    await looks_until_the_end(keep, lambda looks: 0.0, mute, limit=1.0)
    assert min(waits) < 1.0


async def test_what_comes_during_a_look_counts_like_the_time_of_the_look(keep) -> None:
    """With the next look: an engine that answers all the time is not asked."""
    kept, limit, calls, enough = keep(*SILENT, "--only-for", "slow", limit=0.0), 2.0, 0, asyncio.Event()
    runner = await kept.ready()
    pool = UpstreamPool(runner.endpoint)

    async def answered_meanwhile(endpoint: Endpoint, api: EngineApi) -> None:
        nonlocal calls
        status, _ = await pool.fetch("POST", "/v1/completions", b'{"prompt": "quick"}', timeout=HUNG)
        assert status == 200
        kept.clock.advance(limit)
        calls += 1
        if calls == 5:
            enough.set()

    dog = Watchdog(pool, limit=limit, clock=kept.clock, activity=lambda pid: Activity(0.0, 0), work=answered_meanwhile)
    slow = asyncio.create_task(pool.fetch("POST", "/v1/completions", b'{"prompt": "slow"}', timeout=HUNG))
    assert runner.pid is not None
    watching = asyncio.create_task(dog.watch(runner.pid, runner.api))
    try:
        async with asyncio.timeout(HUNG):
            await enough.wait()
        assert (kept.probes(), watching.done()) == (0, False)
    finally:
        for task in (watching, slow):
            task.cancel()
        await asyncio.wait([watching, slow])


async def test_counted_work_is_a_sign_of_life(keep) -> None:
    counter = Counter(itertools.chain(range(40), itertools.repeat(40)))
    assert await looks_until_the_end(keep, lambda looks: 0.0, counter) > 40
