"""A request that crashes its engine each time is set aside; the others are answered, and the model stays available."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from modelrunner.engine.connections import UpstreamPool
from modelrunner.errors import EngineFailed
from modelrunner.gateway.calls import Fields, Inference, InferenceHead
from modelrunner.gateway.request.quarantine import Quarantine
from modelrunner.gateway.routes import match
from modelrunner.scheduler import Lease, Scheduler, Target
from modelrunner.types import Endpoint, Mode, RunnerKey, RunSpec
from tests.gateway import fakes
from tests.gateway.fakes import FAKE_API, OK, SSE, Call, FakeResolver, event
from tests.gateway.harness import Answer, Proxy, only, proxy, request
from tests.scheduler.fakes import Engine, FakeRunner, World, target, virtual

# A connection that is used again and breaks is tried once more, at an engine that in truth is gone.
ONCE = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
POISON = request(body={"model": "m", "prompt": "poison"})
KEY = RunnerKey("fake", "m", Mode.COMPLETION)
M = replace(target("m", parallel=64), api=FAKE_API)
SECONDS = 4.0  # of an answer


class ScriptedRunner(FakeRunner, fakes.FakeRunner):  # type: ignore[misc]
    """A runner of the scheduler's world whose engine is a scripted one."""

    def __init__(self, world: World, key: RunnerKey, spec: RunSpec, id: str, endpoint: Endpoint) -> None:
        fakes.FakeRunner.__init__(self, endpoint)
        FakeRunner.__init__(self, world, key, spec, id)
        self.upstream, self.api = UpstreamPool(endpoint), FAKE_API


class Targets(FakeResolver):
    def _target(self, backend: str | None, model: str, mode: Mode) -> Target:
        return M


class Fragile:
    """An engine that dies over a poisoned request, with everybody else's; any other is answered after `seconds`.
    `began` has the time of each request that came."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.served: Proxy
        self.scheduler: Scheduler
        self.deaths = 0
        self.began: list[float] = []
        self._open: set[Call] = set()
        self._world = World(10, {"m": Engine(1, load_seconds=0.5)})

    @asynccontextmanager
    async def serve(self, folder: Path, kind: str, **settings: Any) -> AsyncIterator[Proxy]:
        async with proxy(folder, kind, self.script, limits=only()) as served:
            self.served = served
            self._world.make_runner = self._make_runner  # type: ignore[method-assign]
            self.scheduler = served.pipeline.leases.scheduler = self._world.scheduler(**settings)
            served.pipeline.leases.resolve = Targets()
            try:
                yield served
            finally:
                await self.scheduler.close(0)

    def _make_runner(self, key: RunnerKey, spec: RunSpec) -> Any:
        return ScriptedRunner(self._world, key, spec, f"runner-{len(self._world.started)}", self.served.engine.endpoint)

    async def script(self, call: Call) -> None:
        self._open.add(call)
        self.began.append(asyncio.get_running_loop().time())
        if b"poison" in call.request.body:
            self.die()
        elif b'"stream":true' in call.request.body:
            await call.send(SSE + event("begun"))
        else:
            await asyncio.sleep(self.seconds)
            await call.send(ONCE)
            call.close()
            self._open.discard(call)

    def die(self) -> None:
        runner = next((r for r in self._world.running.values() if r.key == KEY), None)
        if runner is not None and not runner.dead:  # else the request was on its way to it
            self.deaths += 1
            runner.die()
            cast("ScriptedRunner", runner).upstream.close()
        for call in self._open:
            call.reset()
        self._open.clear()

    async def asked(self, count: int) -> None:
        await self.served.engine.until(lambda engine: len(engine.received) == count)


@virtual
async def test_one_bad_request_among_many(folder: Path, kind: str) -> None:
    engine = Fragile()
    async with engine.serve(folder, kind) as served:
        good = [asyncio.ensure_future(served.ask(numbered(n))) for n in range(8)]
        streaming = await served.connect()
        await streaming.send(request(stream=True))
        began = await streaming.head()
        await engine.asked(9)
        poisoned = asyncio.ensure_future(served.ask(POISON))
        assert statuses(await asyncio.gather(*good)) == [200] * 8
        assert_set_aside(await poisoned)
        while await streaming.more(began):
            pass
        assert (b"event: error" in began.body, began.complete) == (True, True)
        assert engine.deaths == 3
        assert_set_aside(await served.ask(POISON))
        assert engine.deaths == 3
        assert (await served.ask(numbered(9))).status == 200


@virtual
async def test_a_bad_request_alone_is_asked_twice(folder: Path, kind: str) -> None:
    engine = Fragile()
    async with engine.serve(folder, kind) as served:
        assert_set_aside(await served.ask(POISON))
        assert engine.deaths == 2


@virtual
async def test_the_same_bad_request_from_many(folder: Path, kind: str) -> None:
    engine = Fragile()
    async with engine.serve(folder, kind) as served:
        assert statuses(await asyncio.gather(*(served.ask(POISON) for _ in range(10)))) == [502] * 10
        assert engine.deaths == 3
        assert_set_aside(await served.ask(POISON))
        assert engine.deaths == 3
        assert (await served.ask(numbered(1))).status == 200


@virtual
async def test_after_one_crash_all_are_asked_again_together(folder: Path, kind: str) -> None:
    engine = Fragile()
    async with engine.serve(folder, kind) as served:
        asking = [asyncio.ensure_future(served.ask(numbered(n))) for n in range(8)]
        await engine.asked(8)
        engine.die()
        await engine.asked(16)
        again = engine.began[8:]
        assert max(again) - min(again) < SECONDS
        assert statuses(await asyncio.gather(*asking)) == [200] * 8


@pytest.mark.parametrize(("seconds", "turn"), [(SECONDS, SECONDS), (7.0, 5.0)])
@virtual
async def test_after_a_second_crash_they_are_asked_one_at_a_time_and_seen(
    folder: Path, kind: str, seconds: float, turn: float
) -> None:
    engine = Fragile(seconds)
    async with engine.serve(folder, kind) as served:
        asking = [asyncio.ensure_future(served.ask(numbered(n))) for n in range(4)]
        for count in (4, 8):
            await engine.asked(count)
            engine.die()
        await engine.asked(9)
        assert engine.scheduler.waiting() == {"m": 3}
        why = await engine.scheduler.diagnostics.why(M)
        assert (why.state, why.waiting_for) == ("ready", "slot")
        assert why.reason == (
            "m is loaded, and its engine crashed twice: of the requests that it had, 3 wait to be asked again one at a "
            "time"
        )
        other = asyncio.ensure_future(served.ask(numbered(9)))
        await engine.asked(10)
        assert engine.began[9] - engine.began[8] < SECONDS, "a new request does not wait for the suspects"
        assert statuses(await asyncio.gather(*asking, other)) == [200] * 5
        turns = [engine.began[8], *engine.began[10:]]
        assert [round(late - early) for early, late in pairwise(turns)] == [turn] * 3
        assert engine.scheduler.waiting() == {}


@virtual
async def test_the_wait_of_a_suspect_ends_with_a_sentence(folder: Path, kind: str) -> None:
    engine = Fragile()
    async with engine.serve(folder, kind, max_wait=12.0) as served:
        asking = [asyncio.ensure_future(served.ask(numbered(n))) for n in range(8)]
        for count in (8, 16):
            await engine.asked(count)
            engine.die()
        answers = await asyncio.gather(*asking)
        assert sorted(statuses(answers)) == [200] * 3 + [504] * 5
        late = next(answer for answer in answers if answer.status == 504)
        assert "its engine crashed twice" in late.error["message"]


@virtual
async def test_a_suspect_whose_client_leaves_keeps_nobody_waiting(folder: Path, kind: str) -> None:
    engine = Fragile()
    async with engine.serve(folder, kind) as served:
        leaving, staying = await served.connect(), await served.connect()
        await leaving.send(numbered(1))
        await engine.asked(1)
        await staying.send(numbered(2))
        for count in (2, 4):
            await engine.asked(count)
            engine.die()
        await engine.asked(5)  # the one that waited longer is asked again, alone
        await leaving.leave()
        await engine.asked(6)
        assert engine.began[5] - engine.began[4] < SECONDS
        assert (await staying.answer()).status == 200


async def blame(quarantine: Quarantine, runner: str, ask: Inference, *, seconds: float = 0.0) -> None:
    """The engine of `runner` died over `ask`, its only request, and was cleared away so many seconds later."""
    left = [seconds]

    async def ended(within: float) -> bool:
        left[0] -= within
        return left[0] <= 0

    dead = SimpleNamespace(key=KEY, id=runner, failure=EngineFailed("it died"))
    lease = cast("Lease", SimpleNamespace(runner=dead, engine_ended=ended, tries=2))
    assert await quarantine.blame(lease, ask, ConnectionResetError()) is dead.failure


def asking(body: bytes) -> Inference:
    route = match("/v1/completions")
    assert route is not None
    return Inference(InferenceHead(route, None, None, "", False, False, False), Fields("m"), None, body, "1", 0.0)


async def test_who_was_answered_is_not_suspected_any_more() -> None:
    quarantine, innocent = Quarantine(), asking(b"innocent")
    for runner in ("a", "b"):
        await blame(quarantine, runner, innocent)
        quarantine.check(KEY, asking(b"another"))
        if runner == "a":
            quarantine.check(KEY, innocent)
            quarantine.answered(KEY, innocent)
            assert not quarantine.alert
    quarantine.check(KEY, innocent)
    await blame(quarantine, "c", innocent)
    with pytest.raises(EngineFailed, match="not tried again"):
        quarantine.check(KEY, innocent)
    quarantine.check(RunnerKey("fake", "m", Mode.COMPLETION, revision=1), innocent)


async def test_an_engine_that_failed_is_the_reason_however_long_it_takes_to_clear_it_away() -> None:
    await blame(Quarantine(), "a", asking(b"innocent"), seconds=5.0)


async def test_what_is_remembered_is_bounded() -> None:
    quarantine = Quarantine()
    for number in range(3000):
        for runner in ("a", "b"):
            await blame(quarantine, runner, asking(b"%d" % number))
    quarantine.check(KEY, asking(b"0"))
    with pytest.raises(EngineFailed):
        quarantine.check(KEY, asking(b"2999"))


def numbered(number: int) -> bytes:
    return request(body={"model": "m", "prompt": f"number {number}"})


def statuses(answers: list[Answer]) -> list[int]:
    return [answer.status for answer in answers]


def assert_set_aside(answer: Answer) -> None:
    assert answer.status == 502
    assert answer.error["code"][:6] == "engine"


async def test_a_request_that_is_refused_when_it_is_sent_again_gets_its_answer(folder: Path, kind: str) -> None:
    """Its connection had been idle and closed; meanwhile two engines died of the same body."""
    quiet = True

    async def script(call: Call) -> None:
        if quiet:
            await call.send(OK)
            return
        [work] = served.pipeline.running
        for number in range(2):
            dead = fakes.FakeRunner(served.engine.endpoint)
            dead.id = f"dead-{number}"
            dead.die()
            lease, error = cast("Lease", fakes.FakeLease(served.scheduler, dead)), ConnectionResetError()
            await served.pipeline.in_flight.quarantine.blame(lease, work.ask, error)
            lease.release()
        call.reset()

    async with proxy(folder, kind, script) as served:
        assert (await served.ask()).status == 200
        quiet = False
        client = await served.connect()
        assert (await client.ask()).status == 502
        assert len(served.engine.received) == 2
        assert not served.pipeline.running
