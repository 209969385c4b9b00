"""Runners that sleep before they are stopped: the plan as values, then the scheduler in virtual time."""

import asyncio
from dataclasses import replace

import pytest

from modelrunner.errors import EngineFailed, Unavailable
from modelrunner.scheduler import Scheduler
from modelrunner.scheduler.state import Action, Group, Phase, Reason, Sleep, Slot, Start, Stop, WakeAt
from modelrunner.types import RequiredMemory
from tests.scheduler import states
from tests.scheduler.fakes import Engine, World, gathered, settle, target, virtual
from tests.scheduler.states import NOW, group, key, refusal, runner, slot, start, wake


def tired(idle: float, **more: object) -> Slot:
    """Ready, and asleep it would hold a little main memory."""
    return slot("a", 1, vram=(5,), idle=idle, keep_alive=60.0, **more)  # type: ignore[arg-type]


def sleeper(idle: float = 70.0, *, name: str = "a", size: int = 2, pinned: bool = False) -> Slot:
    awake = slot(name, 1, Phase.SLEEPING, vram=(5,), idle=idle, keep_alive=60.0, pinned=pinned)
    return awake._replace(memory=RequiredMemory(size, (0,)))


def everything(*parts: Group | Slot, **more: object) -> list[Action]:
    """The plan where `a` can sleep: what counts for it in its other condition."""
    others = {Phase.READY: RequiredMemory(2, (0,)), Phase.SLEEPING: RequiredMemory(1, (5,))}
    asleep = {p.id: others[p.phase] for p in parts if isinstance(p, Slot) and p.key == key("a")}
    return states.everything(*parts, asleep=asleep, **more)  # type: ignore[arg-type]


def decide(*parts: Group | Slot, **more: object) -> list[Action]:
    return [a for a in everything(*parts, **more) if not isinstance(a, WakeAt)]


# The plan


def test_one_that_can_sleep_does_so_after_its_keep_alive_and_is_looked_at_after_the_next() -> None:
    actions = everything(tired(70.0), vram=(8,))
    assert actions[0] == Sleep(runner("a"))
    assert wake(actions) == NOW + 50.0
    assert decide(tired(50.0), vram=(8,)) == []


def test_after_two_keep_alives_it_is_stopped() -> None:
    assert decide(sleeper(130.0), vram=(8,)) == [Stop(runner("a"), Reason.IDLE)]
    assert decide(sleeper(110.0), vram=(8,)) == []


def test_another_one_that_sleeps_is_woken_for_a_crowd_before_a_new_one_starts() -> None:
    crowd = replace(group("a", 1, NOW - 2.0, vram=(5,)), least=1, most=3)
    full, asleep = tired(0.0, leases=2, parallel=2), sleeper(70.0)._replace(number=1)
    woken = Start(runner("a", 1), asleep.option._replace(memory=RequiredMemory(1, (5,))))
    assert decide(crowd, full, asleep, vram=(20,)) == [woken]
    assert decide(crowd, full, asleep, vram=(8,)) == []
    early = replace(crowd, waiting=group("a", 1, NOW - 1.0).waiting)
    assert decide(early, full, asleep, vram=(20,)) == []
    assert decide(replace(early, least=2), full, asleep, vram=(20,)) == [woken]


def test_a_keep_alive_of_nothing_leaves_no_time_to_sleep() -> None:
    used = tired(0.0)._replace(keep_alive=0.0)
    assert decide(used, vram=(8,)) == [Stop(runner("a"), Reason.IDLE)]


def test_it_is_stopped_where_main_memory_cannot_take_its_weights() -> None:
    assert decide(tired(70.0), budget=1, vram=(8,)) == [Stop(runner("a"), Reason.IDLE)]


def test_a_pinned_one_stays_as_it_is() -> None:
    assert decide(tired(1e6, pinned=True), vram=(8,)) == []
    assert decide(sleeper(1e6, pinned=True), vram=(8,)) == []


def test_a_request_wakes_it_in_room_for_the_difference() -> None:
    woken = [start("a", 1, (5,))]
    assert decide(sleeper(), group("a", 1, vram=(5,)), budget=2, vram=(5,)) == woken
    assert decide(sleeper(pinned=True), group("a", 1, vram=(5,)), budget=2, vram=(5,)) == woken


def test_one_that_is_waited_for_is_woken_however_long_it_has_slept() -> None:
    woken = [start("a", 1, (5,))]
    assert decide(sleeper(130.0), group("a", 1, vram=(5,)), vram=(8,)) == woken
    leaving = slot("b", 1, Phase.STOPPING, vram=(4,))
    assert decide(sleeper(130.0), leaving, group("a", 1, vram=(5,)), vram=(8,)) == []


def test_room_for_a_waking_one_is_made_as_for_a_start_and_not_of_itself() -> None:
    other = slot("b", 1, vram=(4,))
    assert decide(sleeper(), other, group("a", 1, vram=(5,)), vram=(8,)) == [Stop(runner("b"), Reason.ROOM)]


def test_pinned_models_that_leave_no_room_to_wake_refuse_it() -> None:
    other = slot("b", 1, vram=(4,), pinned=True)
    error = refusal(decide(sleeper(), other, group("a", 1, vram=(5,)), vram=(8,)))
    assert error.status == 507


def test_a_pinned_sleeper_can_always_be_woken() -> None:
    error = refusal(decide(sleeper(pinned=True), group("b", 1, vram=(6,)), vram=(8,)))
    assert error.status == 507


def test_a_sleeping_runner_goes_before_one_that_is_awake() -> None:
    awake = slot("b", 2, idle=1e5, load=0.01, keep_alive=1e6)
    actions = decide(awake, sleeper(0.0), group("c", 8), vram=(8,))
    assert actions == [Stop(runner("a"), Reason.ROOM)]


def test_one_that_gives_none_of_the_room_that_is_missing_stays_asleep() -> None:
    awake = slot("b", 1, vram=(8,))
    actions = decide(awake, sleeper(), group("c", 1, vram=(8,)), vram=(8,))
    assert actions == [Stop(runner("b"), Reason.ROOM)]


def test_a_younger_request_takes_no_room_that_one_waits_for_to_wake_in() -> None:
    leaving = slot("b", 1, Phase.STOPPING, vram=(4,))
    waiting = group("a", 1, NOW - 1, vram=(5,)), group("c", 1, NOW, vram=(4,), first=2)
    assert decide(sleeper(), leaving, *waiting, vram=(8,)) == []
    assert start("c", 1, (4,)) in decide(leaving, waiting[1], vram=(8,))


@pytest.mark.parametrize("more", [{"paused": frozenset({"a"})}, {"closing": True}])
def test_a_pause_and_the_end_of_the_daemon_end_it(more: dict[str, object]) -> None:
    [stop] = decide(sleeper(), vram=(8,), **more)
    assert isinstance(stop, Stop)


# The scheduler


def dozy(**more: object) -> Engine:
    return Engine(6, load_seconds=2.0, sleep_level=2, **more)  # type: ignore[arg-type]


async def asleep(scheduler: Scheduler) -> None:
    """The runner of `a` is, and 50 s of its second keep-alive are left."""
    (await scheduler.acquire(target("a", keep_alive=60.0))).release()
    await asyncio.sleep(70.0)
    assert shown(scheduler) == {"a": "sleeping"}


def shown(scheduler: Scheduler) -> dict[str, str]:
    return {runner.model_name: runner.state for runner in scheduler.runners()}


def events(scheduler: Scheduler) -> list[str]:
    return [event.event for event in scheduler.events.recent()]


@virtual
async def test_an_unused_runner_sleeps_for_a_keep_alive_and_then_ends() -> None:
    world = World(10, {"a": dozy()})
    scheduler = world.scheduler()
    await asleep(scheduler)
    [runner] = scheduler.runners()
    assert runner.expires_at is not None
    assert runner.memory.measured is not None
    assert runner.memory.measured.ram == 1
    assert scheduler.memory().used.ram == 1
    assert scheduler.warm(target("a")) is None
    await asyncio.sleep(51.0)
    assert world.resident() == []
    assert events(scheduler) == ["load", "ready", "sleep", "stop"]
    await scheduler.close(0)


@virtual
async def test_weights_that_sleep_in_main_memory_count_as_planned_for_the_engine() -> None:
    world = World(100, {"a": Engine(1, vram=(60,), sleep_level=1)}, vram=(80,))
    scheduler, asked = world.scheduler(), target("a")
    large = replace(asked.spec, bundle=replace(asked.spec.bundle, size=60))
    (await scheduler.acquire(replace(asked, spec=large))).release()
    assert world.runner("a").expected.ram == 61
    await scheduler.close(0)


@virtual
async def test_one_wake_is_for_all_who_wait() -> None:
    world = World(10, {"a": dozy()})
    scheduler = world.scheduler()
    await asleep(scheduler)
    waiting = [asyncio.create_task(scheduler.acquire(target("a", parallel=4))) for _ in range(2)]
    await settle()
    assert shown(scheduler) == {"a": "starting"}
    leases = await gathered(waiting)
    assert [lease.loaded for lease in leases] == [pytest.approx(0.2)] * 2
    assert world.runner("a").orders == ["sleep", "wake"]
    assert world.started == ["a"]
    assert scheduler.memory().used.ram == 6
    for lease in leases:
        lease.release()
    await scheduler.close(0)


@virtual
async def test_who_asks_while_it_falls_asleep_has_it_woken_after_that() -> None:
    world = World(10, {"a": dozy(sleep_seconds=5.0)})
    scheduler = world.scheduler()
    (await scheduler.acquire(target("a", keep_alive=60.0))).release()
    await asyncio.sleep(61.0)
    assert scheduler.memory().used.ram == 6, "it may still hold it all"
    (await scheduler.acquire(target("a"))).release()
    assert world.runner("a").orders == ["sleep", "wake"]
    assert shown(scheduler) == {"a": "ready"}
    assert scheduler.memory().used.ram == 6
    await scheduler.close(0)


@virtual
async def test_a_sleeping_runner_shares_the_room_with_others_and_takes_it_back() -> None:
    world = World(10, {"a": dozy(), "b": Engine(8), "c": Engine(10)})
    scheduler = world.scheduler()
    await asleep(scheduler)
    (await scheduler.acquire(target("b"))).release()
    assert shown(scheduler) == {"a": "sleeping", "b": "ready"}
    (await scheduler.acquire(target("a", keep_alive=60.0))).release()
    assert world.resident() == ["a"]
    assert world.started == ["a", "b"]
    await asyncio.sleep(70.0)
    (await scheduler.acquire(target("c"))).release()
    assert world.resident() == ["c"]
    await scheduler.close(0)


@pytest.mark.parametrize("fault", ["cannot_wake", "cannot_sleep"])
def test_one_that_fails_at_it_has_crashed_and_who_waits_gets_a_new_runner(fault: str) -> None:
    @virtual
    async def test() -> None:
        world = World(10, {"a": dozy(sleep_seconds=5.0, **{fault: EngineFailed("it was stuck")})})
        scheduler = world.scheduler()
        (await scheduler.acquire(target("a", keep_alive=60.0))).release()
        await asyncio.sleep(62.0)
        with await scheduler.acquire(target("a")):
            assert world.started == ["a", "a"]
            assert shown(scheduler) == {"a": "ready"}
        [crash] = [event for event in scheduler.events.recent() if event.event == "crash"]
        assert crash.reason == "it was stuck"
        await scheduler.close(0)

    test()


@virtual
async def test_it_can_be_unloaded_while_it_sleeps() -> None:
    world = World(10, {"a": dozy()})
    scheduler = world.scheduler()
    await asleep(scheduler)
    assert (await scheduler.unload(all=True)).models == ("a",)
    assert world.resident() == []
    await scheduler.close(0)


@virtual
async def test_a_daemon_ends_while_an_engine_never_falls_asleep() -> None:
    world = World(10, {"a": dozy(sleep_seconds=1e6)})
    scheduler = world.scheduler()
    await asleep(scheduler)
    await scheduler.close(0)
    assert world.resident() == []


@virtual
async def test_why_and_the_runners_own_address_say_that_it_sleeps() -> None:
    world = World(10, {"a": dozy()})
    scheduler = world.scheduler()
    await asleep(scheduler)
    answer = await scheduler.diagnostics.why(target("a"))
    assert (answer.state, answer.reason) == ("sleeping", "a sleeps; a request wakes it")
    assert (await scheduler.diagnostics.fit(target("a"))).fits == "now"
    with pytest.raises(Unavailable, match="sleeps"):
        scheduler.lease_runner(world.runner("a").id)
    await scheduler.close(0)
