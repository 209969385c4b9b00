"""What is said about a model that waits, and whether one would fit: the plan's own decisions, asked and not carried
out."""

import asyncio
from typing import Any

import pytest

from modelrunner.errors import EngineFailed
from modelrunner.progress import LoadProgress
from modelrunner.scheduler import Explanation, Figures, RetainedSettings, Scheduler
from modelrunner.scheduler.devices import Device
from modelrunner.types import KeepAlive, Mode, RequiredMemory
from tests.scheduler.fakes import Engine, FakeHost, VirtualLoop, World, settle, target, virtual


def world(**engines: Engine) -> World:
    return World(100, {name: Engine(60) for name in "abc"} | engines)


async def loaded(scheduler: Scheduler, name: str, **settings: Any) -> None:
    (await scheduler.acquire(target(name, **settings))).release()


async def why(scheduler: Scheduler, name: str) -> Explanation:
    return await scheduler.diagnostics.why(target(name))


def in_background(scheduler: Scheduler, name: str) -> "asyncio.Task[Any]":
    return asyncio.create_task(scheduler.acquire(target(name)))


@virtual
async def test_a_model_that_nobody_asked_for() -> None:
    scheduler = world().scheduler()
    told = await why(scheduler, "a")
    assert (told.state, told.waiting_for, told.position, told.victims) == ("stopped", None, None, [])
    assert told.figures == Figures(RequiredMemory(60), RequiredMemory(100), RequiredMemory(100))
    await scheduler.close(0)


@virtual
async def test_a_load_and_what_is_left_of_it() -> None:
    scheduler = world(a=Engine(60, load_seconds=8.0)).scheduler()
    await loaded(scheduler, "a", keep_alive=0.0)
    await asyncio.sleep(1.0)
    assert (await why(scheduler, "a")).expected_seconds == 8.0
    waiting = in_background(scheduler, "a")
    await asyncio.sleep(3.0)
    told = await why(scheduler, "a")
    assert (told.state, told.waiting_for, told.position, told.expected_seconds) == ("starting", "load", 1, 5.0)
    assert scheduler.diagnostics.progress(target("a")) == LoadProgress("starting", 1, 5.0)
    (await waiting).release()
    assert (await why(scheduler, "a")).waiting_for is None
    await scheduler.close(0)


@virtual
async def test_who_must_go_first_and_who_went_lately() -> None:
    scheduler = world().scheduler()
    await loaded(scheduler, "a")
    told = await why(scheduler, "b")
    assert (told.state, told.victims, told.figures.free) == ("stopped", ["a"], RequiredMemory(40))
    assert "a is evicted" in told.reason
    await loaded(scheduler, "b")
    went = [event for event in (await why(scheduler, "b")).events if event.event == "evict"]
    assert [(event.model, event.details) for event in went] == [("a", {"code": "room", "room_for": "b"})]
    assert (await why(scheduler, "a")).events[-1].reason == "b needs the room"
    await scheduler.close(0)


@virtual
async def test_a_request_waits_for_a_busy_model() -> None:
    scheduler = world().scheduler(patience=5.0)
    lease = await scheduler.acquire(target("a"))
    waiting = [in_background(scheduler, name) for name in "bc"]
    await settle()
    told = await why(scheduler, "b")
    assert (told.state, told.waiting_for, told.position, told.victims) == ("queued", "memory", 1, ["a"])
    assert "a is drained" in told.reason
    assert (await why(scheduler, "c")).position == 2
    await asyncio.sleep(30.0)
    assert "a has answered its requests" in (await why(scheduler, "b")).reason
    assert scheduler.diagnostics.progress(target("c")).position == 2
    lease.release()
    (await waiting[0]).release()
    (await waiting[1]).release()
    await scheduler.close(0)


@virtual
async def test_a_request_waits_for_a_place_in_the_engine() -> None:
    scheduler = world().scheduler()
    leases = [await scheduler.acquire(target("a")) for _ in range(2)]  # one sequence, and one more request
    waiting = in_background(scheduler, "a")
    await settle()
    told = await why(scheduler, "a")
    assert (told.state, told.waiting_for) == ("ready", "slot")
    for lease in leases:
        lease.release()
    (await waiting).release()
    await scheduler.close(0)


@virtual
async def test_the_device_is_named() -> None:
    class Carded(FakeHost):
        def devices(self) -> tuple[Device, ...]:
            return (Device(100, 100), Device(100, 100, name="NVIDIA A30"))

    there = World(100, {"a": Engine(1, vram=(0, 60))}, vram=(100, 100))
    scheduler = there.scheduler(hosts=[Carded(there)])
    assert (await why(scheduler, "a")).reason.endswith("a request loads it on device 1 (NVIDIA A30)")
    told = await scheduler.diagnostics.fit(target("a"))
    assert told.reason == "a fits into what is free on device 1 (NVIDIA A30)"
    await scheduler.close(0)


@virtual
async def test_a_device_that_a_plan_does_without_is_named() -> None:
    class Carded(FakeHost):
        def devices(self) -> tuple[Device, ...]:
            lost = Device(0, 0, name="NVIDIA A30", fault="it does not answer")
            return (lost, Device(100, 8, name="NVIDIA A10", others=92), Device(100, 60, name="NVIDIA T4", others=40))

    there = World(100, {"a": Engine(1)}, vram=(0, 0, 50))
    scheduler = there.scheduler(hosts=[Carded(there)])
    said = "; device 0 (NVIDIA A30) is not used: it does not answer; other programs hold 92B of device 1 (NVIDIA A10)"
    for reason in ((await why(scheduler, "a")).reason, (await scheduler.diagnostics.fit(target("a"))).reason):
        assert reason.endswith(said)
    await scheduler.close(0)


@virtual
async def test_a_pin_is_named_as_what_is_in_the_way() -> None:
    scheduler = world().scheduler()
    await loaded(scheduler, "a", pinned=True)
    told = await why(scheduler, "b")
    assert (told.waiting_for, told.victims) == ("pin", [])
    assert "pinned" in told.reason
    assert (await scheduler.diagnostics.fit(target("b"))).fits == "never"
    scheduler.retain("a", Mode.COMPLETION, RetainedSettings(KeepAlive(300.0)))
    assert (await why(scheduler, "b")).victims == ["a"]
    await scheduler.close(0)


@virtual
async def test_a_failed_start_is_told_with_its_last_words() -> None:
    scheduler = world(a=Engine(60, fails=EngineFailed("no such tensor"))).scheduler()
    with pytest.raises(EngineFailed):
        await scheduler.acquire(target("a"))
    told = await why(scheduler, "a")
    assert (told.state, told.waiting_for) == ("failed", "backoff")
    assert "no such tensor" in told.reason
    await scheduler.close(0)


@virtual
async def test_a_paused_model_waits_for_its_resume() -> None:
    scheduler = world().scheduler()
    await loaded(scheduler, "a")
    await scheduler.pause("a", "a")
    assert scheduler.runners() == []
    waiting = in_background(scheduler, "a")
    await settle()
    told = await why(scheduler, "a")
    assert (told.state, told.waiting_for, scheduler.diagnostics.progress(target("a")).stage) == (
        "paused",
        "resume",
        "paused",
    )
    scheduler.resume("a")
    (await waiting).release()
    await scheduler.close(0)


@virtual
async def test_fit_names_the_way() -> None:
    scheduler = world(huge=Engine(101)).scheduler()
    diagnostics = scheduler.diagnostics
    assert (await diagnostics.fit(target("a"))).fits == "now"
    await loaded(scheduler, "a")
    assert (await diagnostics.fit(target("a"))).fits == "now"
    after = await diagnostics.fit(target("b"))
    assert (after.fits, after.would_evict, after.figures.needed) == ("after_eviction", ["a"], RequiredMemory(60))
    assert (await diagnostics.fit(target("huge"))).fits == "never"
    assert (diagnostics.fit_bytes("x", 40).fits, diagnostics.fit_bytes("x", 41).fits) == ("now", "after_eviction")
    assert diagnostics.fit_bytes("x", 101).fits == "never"
    assert [runner.model_name for runner in scheduler.runners()] == ["a"]  # nothing was done about it
    await scheduler.close(0)


@virtual
async def test_a_load_that_others_wait_for_is_not_in_the_list_of_victims() -> None:
    scheduler = world(a=Engine(60, load_seconds=9.0)).scheduler()
    waiting = in_background(scheduler, "a")
    await settle()
    told = await scheduler.diagnostics.fit(target("b"))
    assert (told.fits, told.would_evict) == ("after_eviction", [])
    (await waiting).release()
    await scheduler.close(0)


@virtual
async def test_trouble_is_what_makes_it_wrong_to_ask() -> None:
    scheduler = world(a=Engine(60, load_seconds=9.0)).scheduler()
    diagnostics = scheduler.diagnostics
    assert await diagnostics.trouble() == ""
    diagnostics.missing("m", "the engine is not installed")
    assert "m is to be loaded, and is not: the engine is not installed" in await diagnostics.trouble()
    diagnostics.missing("m", None)
    waiting = in_background(scheduler, "a")
    await settle()
    assert await diagnostics.trouble() == ""  # a load is no trouble
    (await waiting).release()
    await scheduler.close(0)
    assert "shutting down" in await diagnostics.trouble()


@virtual
async def test_a_plan_that_fails_is_trouble_until_one_succeeds() -> None:
    faults = [ValueError("a bug")]

    class Faulty(FakeHost):
        def budget(self, runners: object) -> RequiredMemory:
            if faults:
                raise faults.pop()
            return RequiredMemory(100)

    faulty = world()
    scheduler = faulty.scheduler(hosts=[Faulty(faulty)])
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["exception"]))
    scheduler.resume("a")
    await settle()
    assert [str(fault) for fault in reported] == ["a bug"]
    assert "failed at its last plan" in await scheduler.diagnostics.trouble()
    scheduler.resume("a")
    await settle()
    assert await scheduler.diagnostics.trouble() == ""
    await scheduler.close(0)


@virtual
async def test_requests_that_wait_longer_than_they_may_are_trouble() -> None:
    """As after the machine has slept, until the timers have rung."""
    slept = 0.0
    loop = asyncio.get_running_loop()
    scheduler = world(a=Engine(60, load_seconds=9.0)).scheduler(clock=lambda: loop.time() + slept, max_wait=60.0)
    waiting = in_background(scheduler, "a")
    await settle()
    slept = 100.0
    assert "requests for a wait longer than they may" in await scheduler.diagnostics.trouble()
    waiting.cancel()
    await scheduler.close(0)


@virtual
async def test_a_loop_that_is_late_is_trouble() -> None:
    scheduler = world().scheduler()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)

    def busy() -> None:
        loop.now += 4.0

    loop.call_soon(busy)
    assert "4.0 s behind" in await scheduler.diagnostics.trouble()
    assert await scheduler.diagnostics.trouble() == ""
    await scheduler.close(0)


@virtual
async def test_a_run_that_is_smaller_than_what_was_asked_for_says_so() -> None:
    scheduler = world(a=Engine(160, smaller=(80,))).scheduler()
    await loaded(scheduler, "a")
    assert "a (variant 1, since memory is short) is loaded" in (await why(scheduler, "a")).reason
    assert [runner.variant for runner in scheduler.runners()] == ["variant 1"]
    await scheduler.close(0)
