"""A request that crashes its engine each time is set aside; the others are answered, and the model stays available."""

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from modelrunner.errors import EngineFailed
from modelrunner.gateway.calls import Fields, Inference, InferenceHead
from modelrunner.gateway.request.quarantine import Quarantine
from modelrunner.gateway.routes import match
from modelrunner.scheduler import Lease
from modelrunner.types import Mode, RunnerKey
from tests.gateway.fakes import OK, SSE, Call, FakeRunner, event
from tests.gateway.harness import Answer, Proxy, only, proxy, request

# A connection that is used again and breaks is tried once more, at an engine that in truth is gone.
ONCE = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
POISON = request(body={"model": "m", "prompt": "poison"})
KEY = RunnerKey("fake", "m", Mode.COMPLETION)


class Fragile:
    """An engine that dies over a poisoned request, with everybody else's, and is there again at once as another runner.
    A healthy request is answered as soon as `calm`."""

    def __init__(self) -> None:
        self.served: Proxy
        self.deaths = 0
        self.calm = asyncio.Event()
        self._open: set[Call] = set()
        self._numbers = itertools.count(1)

    async def script(self, call: Call) -> None:
        self._open.add(call)
        if b"poison" in call.request.body:
            self._die()
        elif b'"stream":true' in call.request.body:
            await call.send(SSE + event("begun"))
        else:
            await self.calm.wait()
            await call.send(ONCE)
            call.close()
            self._open.discard(call)

    def _die(self) -> None:
        self.deaths += 1
        dead = self.served.runner
        self.served.runner = FakeRunner(dead.endpoint)
        self.served.runner.id = f"runner-{next(self._numbers)}"
        self.served.scheduler.runner = self.served.runner
        dead.die()
        dead.upstream.close()
        for call in self._open:
            call.reset()
        self._open.clear()


async def test_one_bad_request_among_many(folder: Path, kind: str) -> None:
    engine = Fragile()
    async with proxy(folder, kind, engine.script, limits=only()) as served:
        engine.served = served
        good = [asyncio.ensure_future(served.ask(numbered(n))) for n in range(8)]
        streaming = await served.connect()
        await streaming.send(request(stream=True))
        began = await streaming.head()
        await served.engine.until(lambda e: len(e.received) == 9)
        poisoned = asyncio.ensure_future(served.ask(POISON))
        engine.calm.set()
        assert statuses(await asyncio.gather(*good)) == [200] * 8
        assert_set_aside(await poisoned)
        while await streaming.more(began):
            pass
        assert (b"event: error" in began.body, began.complete) == (True, False)
        assert engine.deaths == 2
        assert_set_aside(await served.ask(POISON))
        assert engine.deaths == 2
        assert (await served.ask(numbered(9))).status == 200


async def test_the_same_bad_request_from_many(folder: Path, kind: str) -> None:
    engine = Fragile()
    async with proxy(folder, kind, engine.script) as served:
        engine.served = served
        assert statuses(await asyncio.gather(*(served.ask(POISON) for _ in range(10)))) == [502] * 10
        deaths = engine.deaths
        assert_set_aside(await served.ask(POISON))
        assert engine.deaths == deaths
        engine.calm.set()
        assert (await served.ask()).status == 200


async def test_a_suspect_whose_client_leaves_keeps_nobody_waiting(folder: Path, kind: str) -> None:
    engine = Fragile()
    async with proxy(folder, kind, engine.script) as served:
        engine.served = served
        leaving, staying = await served.connect(), await served.connect()
        await leaving.send(numbered(1))
        await served.engine.until(lambda e: len(e.received) == 1)
        await staying.send(numbered(2))
        await served.engine.until(lambda e: len(e.received) == 2)
        bad = asyncio.ensure_future(served.ask(POISON))
        await served.engine.until(lambda e: len(e.received) == 4)  # one of them is asked again, alone
        await leaving.leave()
        engine.calm.set()
        assert (await staying.answer()).status == 200
        assert_set_aside(await bad)


async def blame(quarantine: Quarantine, runner: str, ask: Inference) -> None:
    """The engine of `runner` died over `ask`."""

    async def ended(within: float) -> bool:
        return True

    dead = SimpleNamespace(key=KEY, id=runner, failure=EngineFailed("it died"))
    lease = cast("Lease", SimpleNamespace(runner=dead, engine_ended=ended))
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
