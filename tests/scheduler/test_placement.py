"""Where a model gets its runner: decisions as values, then the backends' own variants on made-up machines."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from modelrunner.errors import BadRequest, EngineFailed, HostLost, OutOfMemory, Unavailable
from modelrunner.scheduler import Fitting
from modelrunner.scheduler.state import (
    Action,
    Failure,
    Forget,
    Group,
    HostedVariant,
    Phase,
    Reason,
    Refuse,
    RunPlace,
    Slot,
    Start,
    Stop,
    options_of,
)
from modelrunner.types import RequiredMemory, RunSpec, Variant
from modelrunner_llamacpp import args, split
from modelrunner_llamacpp import memory as llamacpp
from modelrunner_llamacpp.engines import EngineKind as LlamaCppKind
from modelrunner_llamacpp.hparams import Header
from modelrunner_vllm import memory as vllm
from modelrunner_vllm.engines import EngineKind as VllmKind
from tests.llamacpp.models import SMOLLM2, bundle
from tests.llamacpp.models import spec as llamacpp_spec
from tests.scheduler.fakes import Engine, FakeHost, World, target, virtual
from tests.scheduler.states import NOW, decide, ended, group, key, option, over, refusal, runner, slot
from tests.vllm.models import spec as vllm_spec

GIB = 1 << 30


def places(actions: Sequence[Action]) -> list[tuple[int, ...]]:
    return [action.option.place.devices for action in actions if isinstance(action, Start)]


# The rule


def test_a_free_device_is_taken_though_the_model_on_the_first_one_may_go() -> None:
    waiting = group("x", 1, NOW - 50, vram=(8,), elsewhere=((0, 8),))
    assert places(decide(waiting, slot("a", 1, vram=(8,)), vram=(8, 8))) == [(1,)]
    assert places(decide(waiting, slot("a", 1, vram=(0, 8)), vram=(8, 8))) == [(0,)]


def test_the_free_device_with_the_most_room_is_taken() -> None:
    waiting = group("x", 1, vram=(2,), elsewhere=((0, 2), (0, 0, 2)))
    assert places(decide(waiting, slot("a", 1, vram=(4, 1, 3)), vram=(8, 8, 8))) == [(1,)]


def test_where_none_is_free_the_one_goes_that_was_used_longest_ago() -> None:
    waiting = group("x", 1, vram=(8,), elsewhere=((0, 8),))
    first, second = slot("a", 1, vram=(8,), idle=10), slot("b", 1, vram=(0, 8), idle=20)
    assert decide(waiting, first, second, vram=(8, 8)) == [Stop(runner("b"), Reason.ROOM)]
    assert decide(waiting, first, second._replace(leases=1), vram=(8, 8)) == [Stop(runner("a"), Reason.ROOM)], "idle"


def test_where_none_is_free_the_one_goes_that_is_loaded_again_soonest() -> None:
    waiting = group("x", 1, vram=(8,), elsewhere=((0, 8),))
    slow, quick = slot("a", 1, vram=(8,), idle=20, load=9.0), slot("b", 1, vram=(0, 8), idle=10, load=2.0)
    assert decide(waiting, slow, quick, vram=(8, 8)) == [Stop(runner("b"), Reason.ROOM)]


def test_one_for_which_room_comes_already_evicts_nobody_else() -> None:
    waiting = group("x", 1, NOW - 50, vram=(8,), elsewhere=((0, 8),))
    assert decide(waiting, slot("a", 1, vram=(8,)), slot("b", 1, Phase.STOPPING, vram=(0, 8)), vram=(8, 8)) == []


def test_two_that_wait_get_a_device_each() -> None:
    both = [group(name, 1, NOW - i, first=i + 1, vram=(8,), elsewhere=((0, 8),)) for i, name in enumerate("xy")]
    assert sorted(places(decide(*both, vram=(8, 8)))) == [(0,), (1,)]
    full = slot("a", 1, vram=(8,), idle=20), slot("b", 1, vram=(0, 8), idle=10)
    stopped = decide(*both, *full, vram=(8, 8))
    assert stopped == [Stop(runner("a"), Reason.ROOM), Stop(runner("b"), Reason.ROOM)]


def test_it_waits_for_a_rank_and_settles_for_none() -> None:
    waiting = group("x", 1, NOW - 1, vram=(8,), elsewhere=((0, 8),), smaller=(2,))
    busy = slot("a", 1, vram=(8,), leases=1), slot("b", 1, vram=(0, 8), leases=1)
    assert decide(waiting, *busy, vram=(8, 8)) == []
    pinned = [one._replace(pinned=True) for one in busy]
    [start] = decide(waiting, *pinned, vram=(8, 8))
    assert isinstance(start, Start)
    assert start.option.rank == 1


def test_a_pinned_model_keeps_one_device_and_others_get_the_rest() -> None:
    pinned = group("p", 1, NOW, first=2, vram=(8,), elsewhere=((0, 8),), pinned=True)
    other = group("x", 1, NOW - 9, vram=(8,), elsewhere=((0, 8),))
    assert len(places(decide(other, pinned, vram=(8, 8)))) == 2


# Faults


def test_a_fault_on_one_device_leads_to_another_and_to_no_smaller_run() -> None:
    waiting = group("x", 1, vram=(8,), elsewhere=((0, 8),), smaller=(2,))
    broken = Failure(5, NOW + 30, EngineFailed("the device is lost"))
    failures = {(key("x"), RunPlace((0,))): broken}
    assert places(decide(waiting, vram=(8, 8), failures=failures)) == [(1,)]
    assert len(decide(waiting, vram=(8, 8), failures=failures | {(key("x"), RunPlace((1,))): broken})) == 1, "refused"


def test_memory_that_ran_out_on_one_device_says_nothing_about_another() -> None:
    waiting = group("x", 1, vram=(8,), elsewhere=((0, 8),), smaller=(2,))
    full = Failure(2, NOW, OutOfMemory(-9), waits=True, floor=1)
    assert places(decide(waiting, vram=(8, 8), failures={(key("x"), RunPlace((0,))): full})) == [(1,)]


def test_memory_that_ran_out_twice_is_tried_elsewhere_and_told_where_that_is_paused() -> None:
    waiting, there = group("x", 1, vram=(8,), elsewhere=((0, 8),)), RunPlace((1,))
    full = ended("x", OutOfMemory(-9))._replace(option=option(RequiredMemory(1, (8,))))
    before = {(key("x"), RunPlace((0,))): Failure(1, NOW, OutOfMemory(-9), waits=True, floor=0)}
    assert places(decide(waiting, full, vram=(12, 16), failures=before)) == [(1,)]
    paused = before | {(key("x"), there): Failure(5, NOW + 30, EngineFailed("the device is lost"))}
    refused, _ = decide(waiting, full, vram=(12, 16), failures=paused)
    assert isinstance(refused, Refuse)
    assert "memory ran out" in str(refused.error)


# Hosts

B = {"b": RequiredMemory(10)}


def on_both(name: str, *since: float, fetches: bool = False) -> Group:
    """Needs 8 of main memory, here or on b."""
    here, there = option(RequiredMemory(8)), option(RequiredMemory(8), number=1, host="b")
    return replace(group(name, 8, *since), options=(here, there._replace(fetches=fetches)))


def there(slot: Slot) -> Slot:
    return slot._replace(option=option(slot.memory, host="b"))


def hosts(actions: Sequence[Action]) -> list[str]:
    return [action.option.place.host for action in actions if isinstance(action, Start)]


def test_a_free_host_is_taken_though_the_model_here_may_go() -> None:
    assert hosts(decide(on_both("x", NOW - 50), slot("a", 8), others=B)) == ["b"]
    assert hosts(decide(on_both("x", NOW - 50), there(slot("a", 8)), others=B)) == [""]


def test_of_two_free_hosts_the_one_with_the_files_is_taken_then_the_one_with_more_room() -> None:
    larger = {"b": RequiredMemory(20)}
    assert hosts(decide(on_both("x", fetches=True), others=larger)) == [""]
    assert hosts(decide(on_both("x"), others=larger)) == ["b"]


def test_replicas_compute_apart_on_hosts_as_on_devices() -> None:
    """Also where the place of the first one has more room, and the files."""
    larger = {"b": RequiredMemory(30)}
    model = replace(on_both("x"), waiting=(), least=2, most=2)
    fetched = replace(model, options=(model.options[0]._replace(fetches=True), model.options[1]))
    for asked in (model, fetched):
        assert hosts(decide(asked, there(slot("x", 8)), others=larger)) == [""]
        assert hosts(decide(asked, there(slot("x", 8)), budget=7, others=larger)) == ["b"], "room is there alone"
        leaving = slot("x", 8, Phase.DRAINING, leases=1)._replace(number=1, least=2)
        assert decide(asked, there(slot("x", 8)), leaving, budget=18, others=larger) == []
    on_c = option(RequiredMemory(8), number=2, host="c")
    other = slot("a", 8)._replace(option=on_c)
    equal = replace(model, options=(*model.options[1:], on_c))
    three = decide(equal, there(slot("x", 8)), other, others=larger | {"c": RequiredMemory(30)})
    assert hosts(three) == ["c"], "hosts with the same room differ by it"
    devices = replace(group("x", 1, vram=(4,), elsewhere=((0, 4),)), waiting=(), least=2, most=2)
    assert places(decide(devices, slot("x", 1, vram=(4,)), vram=(20, 8))) == [(1,)]
    assert places(decide(devices, slot("x", 1, vram=(4,)), vram=(20, 3))) == [(0,)]


def test_a_model_that_grows_stays_where_its_files_are() -> None:
    more = tuple(o._replace(sequences=4, fetches=bool(o.place.host)) for o in on_both("x").options)
    full = slot("x", 8, leases=1, parallel=1)._replace(grows=True)
    grown = replace(on_both("x", NOW - 9), wider=more)
    assert hosts(decide(grown, full, budget=20, others=B)) == [""]


def test_what_runs_on_one_host_takes_no_room_of_another_and_goes_for_nobody_there() -> None:
    here, busy = slot("a", 8, idle=99), there(slot("b", 8, idle=5))
    assert decide(on_both("x", NOW - 50), here, busy, others=B) == [Stop(runner("a"), Reason.ROOM)]
    only_there = replace(group("x", 8, NOW - 50), options=(option(RequiredMemory(8), host="b"),))
    assert decide(only_there, here, busy, others=B) == [Stop(runner("b"), Reason.ROOM)]


def test_runners_of_one_model_on_two_hosts_map_its_files_twice() -> None:
    mapped = RequiredMemory(8, shared=6)
    model = replace(group("x", 8), options=(option(mapped, host="b"),))
    other = slot("x", 8)._replace(key=key("x")._replace(revision=1), memory=mapped, option=option(mapped))
    assert hosts(decide(model, there(slot("a", 4)), other, others=B)) == []
    here = replace(model, options=(option(mapped),))
    assert hosts(decide(here, slot("a", 2), other, budget=12, others=B)) == [""], "once on one host"


def test_a_fault_on_one_host_leads_to_the_other() -> None:
    broken = Failure(5, NOW + 30, EngineFailed("its disk is full"))
    assert hosts(decide(on_both("x"), others=B, failures={(key("x"), RunPlace()): broken})) == ["b"]
    assert hosts(decide(on_both("x"), others=B, failures={(key("x"), RunPlace(host="b")): broken})) == [""]


def test_a_host_that_does_not_answer_is_done_without() -> None:
    lost = there(slot("a", 8))
    assert hosts(decide(on_both("x"), lost)) == [""]
    only_there = replace(group("x", 8, NOW - 50), options=(option(RequiredMemory(8), host="b"),))
    assert "main memory of b: needed 8, free 0, budget 0 bytes" in str(refusal(decide(only_there, lost)))


def test_a_host_with_a_device_ranks_before_one_without() -> None:
    spec = llamacpp_spec(bundle(SMOLLM2))
    plain, fast = Variant(spec, RequiredMemory(8)), Variant(spec, RequiredMemory(1, (7,)))
    half = Variant(spec, RequiredMemory(4, (4,)), "half", 1)
    hosted = [HostedVariant(plain), HostedVariant(fast, "b"), HostedVariant(half, "b")]
    assert [(o.rank, o.number, str(o.place)) for o in options_of(hosted)] == [
        (0, 1, " on device 0 of b"),
        (1, 2, " on device 0 of b"),
        (2, 0, ""),
    ]
    assert [o.rank for o in options_of([HostedVariant(plain), HostedVariant(plain, "b")])] == [0, 0]


# Over several hosts

TWO = {"b": RequiredMemory(24 * GIB, (24 * GIB,)), "c": RequiredMemory(24 * GIB, (24 * GIB,))}
HALF = RequiredMemory(2 * GIB, (20 * GIB,))


def of_forty(name: str = "x", *since: float) -> Group:
    """A model of 40 GiB for hosts of 24, with the engine on either of them."""
    both = over(("b", HALF), ("c", HALF)), over(("c", HALF), ("b", HALF), number=1)
    return replace(group(name, None, *(since or (NOW - 50,))), options=both)


def small(host: str, size: int = 8 * GIB) -> Slot:
    """A runner on that host alone."""
    memory = RequiredMemory(GIB, (size,))
    return slot(f"small-{host}", 0)._replace(memory=memory, option=option(memory, host=host))


def of_both(**more: object) -> Slot:
    """The runner of the model x over both hosts."""
    way = of_forty().options[0]
    return slot("x", 0)._replace(memory=way.memory, option=way, **more)  # type: ignore[arg-type]


def test_a_model_larger_than_a_host_starts_over_two() -> None:
    [start] = decide(of_forty(), others=TWO)
    assert isinstance(start, Start)
    assert str(start.option.place) == " on device 0 of b and on device 0 of c"
    assert str(start.option.memory) == "2GiB, device 0 20GiB and on another host 2GiB, device 0 20GiB"


def test_room_for_it_is_made_on_each_of_its_hosts() -> None:
    assert decide(of_forty(), small("b"), others=TWO) == [Stop(runner("small-b"), Reason.ROOM)]
    both = decide(of_forty(), small("b"), small("c"), others=TWO)
    assert sorted(both, key=str) == [Stop(runner("small-b"), Reason.ROOM), Stop(runner("small-c"), Reason.ROOM)]
    assert "pinned models hold the rest" in str(
        refusal(decide(of_forty(), small("b")._replace(pinned=True), others=TWO))
    )


def test_nobody_else_gets_the_room_that_is_made_for_it() -> None:
    memory = RequiredMemory(GIB, (4 * GIB,))
    later = replace(group("y", None, NOW, first=9), options=(option(memory, host="c"),))
    assert decide(of_forty(), later, small("b")._replace(leases=1, interactive=1), others=TWO) == [
        Stop(runner("small-b"), Reason.ROOM)
    ]


def test_it_has_its_devices_alone_and_leaves_the_others() -> None:
    memory = RequiredMemory(GIB, (GIB,))
    beside = replace(group("y", None, NOW - 1, first=9), options=(option(memory, host="c"),))
    assert decide(beside, of_both(), others=TWO) == [Stop(runner("x"), Reason.ROOM)]
    assert "pinned models hold the rest" in str(refusal(decide(beside, of_both(pinned=True), others=TWO)))
    elsewhere = replace(beside, options=(option(RequiredMemory(GIB, (0, GIB)), host="c"),))
    more = TWO | {"c": RequiredMemory(24 * GIB, (24 * GIB, 24 * GIB))}
    assert places(decide(elsewhere, of_both(), others=more)) == [(1,)]


def test_it_is_one_runner_wherever_it_is_evicted() -> None:
    large = RequiredMemory(GIB, (24 * GIB,))
    waiting = [
        replace(group(f"y-{host}", None, NOW, first=i), options=(option(large, host=host),))
        for i, host in enumerate(TWO, 8)
    ]
    assert decide(*waiting, of_both(), others=TWO) == [Stop(runner("x"), Reason.ROOM)]
    four = option(RequiredMemory(4 * GIB), host="c")
    waiting[1] = replace(waiting[1], options=(four,))
    held = RequiredMemory(20 * GIB)
    aside = small("c")._replace(memory=held, option=option(held, host="c"))
    assert decide(*waiting, of_both(), aside, others=TWO) == [Stop(runner("x"), Reason.ROOM)]


def test_one_over_both_hosts_makes_way_for_another_and_the_rest_stays() -> None:
    aside, more = small("b")._replace(last_used=NOW - 20), RequiredMemory(24 * GIB, (24 * GIB, 24 * GIB))
    memory = RequiredMemory(GIB, (0, GIB))
    aside = aside._replace(memory=memory, option=option(memory, host="b"))
    other = of_forty("y")
    there = TWO | {"b": more}
    assert decide(other, of_both(), aside, others=there) == [Stop(runner("x"), Reason.ROOM)]
    assert decide(other, of_both(phase=Phase.STOPPING), aside, others=there) == [], "its room comes already, on both"


def test_it_needs_all_of_its_hosts() -> None:
    assert "x needs" in str(refusal(decide(of_forty(), others={"b": TWO["b"]})))
    lost = HostLost("the host c does not answer")
    [forgotten] = decide(of_both(phase=Phase.ENDED, error=lost, ready_at=-math.inf), others={"b": TWO["b"]})
    assert forgotten == Forget(runner("x"), None), "no fault of the model's"
    three = TWO | {"d": TWO["c"]}
    more = replace(of_forty(), options=(*of_forty().options, over(("b", HALF), ("d", HALF), number=2)))
    broken = {(key("x"), o.place): Failure(5, NOW + 30, EngineFailed("NCCL")) for o in of_forty().options}
    [start] = decide(more, others=three, failures=broken)
    assert isinstance(start, Start)
    assert start.option.place.hosts == ("b", "d")


def test_memory_that_ran_out_is_given_more_on_each_host() -> None:
    full = Failure(1, NOW, OutOfMemory(-9), waits=True, floor=0)
    [start] = decide(of_forty(), others=TWO, failures={(key("x"), o.place): full for o in of_forty().options})
    assert isinstance(start, Start)
    more = RequiredMemory(5 * GIB // 2, (24 * GIB,))  # a quarter, and not beyond what there is
    assert start.option.memory == replace(more, others=(more,))


def test_one_host_is_better_than_two() -> None:
    alone = option(RequiredMemory(GIB, (20 * GIB, 20 * GIB)), host="d")
    wide = replace(of_forty(), options=(alone, *[o._replace(rank=1, number=o.number + 1) for o in of_forty().options]))
    roomy = TWO | {"d": RequiredMemory(24 * GIB, (24 * GIB, 24 * GIB))}
    assert hosts(decide(wide, others=roomy)) == ["d"]
    assert hosts(decide(wide, others=TWO)) == ["b"]


# The backends' variants on made-up machines


def llamacpp_variants(run: RunSpec, *rooms: int) -> list[Variant]:
    def place(smaller: RunSpec) -> list[list[split.Placement]]:
        return llamacpp.placements(smaller, args.effective(smaller), rooms)

    def required(placed: RunSpec) -> RequiredMemory:
        return llamacpp.required(placed, LlamaCppKind.NATIVE, args.effective(placed))

    return split.variants(run, place, required, Header(run.bundle.header).layers)


def vllm_variants(run: RunSpec, devices: int) -> list[Variant]:
    return vllm.placed(run, VllmKind.CUDA, devices, [str(number) for number in range(devices)])


def engine(variants: Sequence[Variant]) -> Engine:
    return Engine(0, load_seconds=5.0, ways=tuple((variant.rank, variant.memory) for variant in variants))


async def asked_in_turn(world: World, requests: int = 60, **settings: object) -> float:
    """A request for the next model every 20 s. Returns the longest wait."""
    scheduler, longest = world.scheduler(**settings), 0.0
    for number in range(requests):
        began = asyncio.get_running_loop().time()
        lease = await scheduler.acquire(target(sorted(world.engines)[number % len(world.engines)]))
        longest = max(longest, asyncio.get_running_loop().time() - began)
        await asyncio.sleep(20.0)
        lease.release()
    await scheduler.close(0)
    return longest


@virtual
async def test_two_llama_cpp_models_on_two_equal_devices_are_loaded_once_each() -> None:
    run = llamacpp_spec(bundle(SMOLLM2), context=2048, parallel=1)
    whole = llamacpp_variants(run, 16 * GIB, 16 * GIB)[0].memory.vram[0]
    world = World(64 * GIB, {}, vram=(whole, whole))
    for name in "ab":
        world.engines[name] = engine(llamacpp_variants(run, *world.vram))
    assert await asked_in_turn(world) == 5.0
    assert world.started == ["a", "b"]


@virtual
async def test_two_vllm_models_on_two_devices_are_loaded_once_each() -> None:
    variants = vllm_variants(vllm_spec(), 2)
    assert [variant.memory.devices for variant in variants] == [(0,), (1,)]
    assert [variant.spec.environment["CUDA_VISIBLE_DEVICES"] for variant in variants] == ["0", "1"]
    size = variants[0].memory.vram[0]
    world = World(64 * GIB, {name: engine(variants) for name in "ab"}, vram=(size, size))
    assert await asked_in_turn(world) == 5.0
    assert world.started == ["a", "b"]


@virtual
async def test_two_models_on_two_hosts_are_loaded_once_each() -> None:
    engines = {name: Engine(8, load_seconds=5.0) for name in "ab"}
    here, b = World(10, engines), World(10, engines)
    assert await asked_in_turn(here, hosts=[FakeHost(here), FakeHost(b, "b")]) == 5.0
    assert (here.started, b.started) == (["a"], ["b"])
    alone = World(10, engines)
    await asked_in_turn(alone)
    assert len(alone.started) == 60


def test_vllm_takes_as_many_devices_as_it_has_workers_of_those_it_may_use() -> None:
    pair = vllm_spec(options={"tensor-parallel-size": 2, "devices": [0, 2, 3]})
    found = vllm.placed(pair, VllmKind.CUDA, 4, ["5", "1", "7", "0"])
    assert [variant.memory.devices for variant in found] == [(0, 2), (0, 3), (2, 3)]
    assert [variant.spec.environment["CUDA_VISIBLE_DEVICES"] for variant in found] == ["5,7", "5,0", "7,0"]
    assert {variant.rank for variant in found} == {0}


@pytest.mark.parametrize(
    ("options", "devices", "message"),
    [
        ({"devices": [5]}, 2, "there is no device 5: vLLM has 2 here"),
        ({"tensor-parallel-size": 4}, 2, "4 workers need a device each: vLLM has 2 here"),
    ],
)
def test_vllm_says_what_is_there(options: dict[str, object], devices: int, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        vllm.placed(vllm_spec(options=options), VllmKind.CUDA, devices, ["0", "1"])


@pytest.mark.parametrize("options", [{"devices": [5]}, {"main-device": 5}])
def test_llama_cpp_says_what_is_there(options: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match=r"there is no device 5 for llama\.cpp here, but devices 0 to 1"):
        llamacpp_variants(replace(llamacpp_spec(bundle(SMOLLM2)), options=options), GIB, GIB)


@virtual
async def test_a_run_that_cannot_start_evicts_nobody() -> None:
    world = World(64 * GIB, {"a": engine(vllm_variants(vllm_spec(), 1))}, vram=(100 * GIB,))
    scheduler = world.scheduler()
    (await scheduler.acquire(target("a"))).release()

    async def refuses(spec: RunSpec, budget: RequiredMemory) -> list[Variant]:
        return vllm.placed(vllm_spec(options={"devices": [3]}), VllmKind.CUDA, len(budget.vram), ["0"])

    world.backend.variants = refuses  # type: ignore[method-assign]
    with pytest.raises(BadRequest, match="no device 3"):
        await scheduler.acquire(target("b"))
    assert world.resident() == ["a"]
    await scheduler.close(0)


@virtual
async def test_a_run_over_hosts_is_offered_for_those_that_join() -> None:
    worlds = [World(10, {"a": Engine(8)}) for _ in range(4)]
    made = [FakeHost(world, name) for world, name in zip(worlds, ["", "b", "c", "d"], strict=True)]
    asked, scheduler = target("a"), worlds[0].scheduler(hosts=made)

    async def over_two(spec: RunSpec, budget: RequiredMemory) -> list[Variant]:
        return [Variant(spec, RequiredMemory(6), hosts=2, part=RequiredMemory(5))]

    worlds[0].backend.variants = over_two  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="a runs over several hosts, and not as many are there"):
        await scheduler.diagnostics.fit(asked)
    for host in made[1:]:
        host.is_joining = True
    forecast = await scheduler.diagnostics.fit(asked)
    assert forecast.reason == "a fits into what is free on b and on c"
    assert forecast.figures.needed == RequiredMemory(6, others=(RequiredMemory(5),))
    assert forecast.figures.budget == RequiredMemory(10, others=(RequiredMemory(10),))
    ways = [(way.host, *[other.host for other in way.others]) for way in await scheduler._reconciler.variants(asked)]
    assert sorted(ways) == [(a, b) for a in "bcd" for b in "bcd" if a != b]
    assert {first for first, _ in ways[:3]} == {"b", "c", "d"}
    (await scheduler.acquire(asked)).release()
    assert [view.host for view in scheduler.runners()] == ["b, c"]
    assert (await scheduler.unload(host="c")).models == ("a",)
    await scheduler.close(0)


async def ways_of(hosts: int, number: int, devices: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The places of each way of a run over so many of the hosts, with one device of each."""
    worlds = [World(10, {"a": Engine(8)}) for _ in range(hosts + 1)]
    made = [FakeHost(world, f"h{i}" if i else "") for i, world in enumerate(worlds)]
    scheduler = worlds[0].scheduler(hosts=made)
    each = [RequiredMemory(1, (0,) * i + (8,)) for i in range(devices)]

    async def on_any(spec: RunSpec, budget: RequiredMemory) -> list[Variant]:
        return [Variant(spec, memory, hosts=number, part=memory) for memory in each]

    worlds[0].backend.variants = on_any  # type: ignore[method-assign]
    for host in made[1:]:
        host.is_joining = True
    ways = await scheduler._reconciler.variants(target("a"))
    await scheduler.close(0)
    return [
        [(way.host, way.variant.memory.devices), *[(other.host, other.devices) for other in way.others]] for way in ways
    ]


@virtual
@pytest.mark.parametrize(("hosts", "number", "devices"), [(6, 2, 2), (8, 2, 2), (20, 2, 8), (6, 3, 1), (100, 2, 4)])
async def test_a_plan_knows_ways_on_all_hosts_and_devices(hosts: int, number: int, devices: int) -> None:
    ways = await ways_of(hosts, number, devices)
    assert len(ways) == (60 if number == 3 else 64)
    assert all(len({host for host, _ in way}) == number for way in ways)
    assert len({host for way in ways for host, _ in way}) == hosts
    alike = {chosen[0] for way in ways if len(chosen := [*{on for _, on in way}]) == 1}
    assert alike >= {(device,) for device in range(devices)}, "each is free on all hosts at times"
    if hosts == 6:
        assert len({frozenset(host for host, _ in way) for way in ways}) == math.comb(hosts, number), "every set"
    if hosts == 8:
        assert len({frozenset(way) for way in ways}) >= 56, "another order of the same hosts has other devices"


# Others who ask


@virtual
async def test_a_restart_goes_to_the_free_device_and_drains_nobody() -> None:
    one = RequiredMemory(1, (8,)), RequiredMemory(1, (0, 8))
    world = World(10, {"a": Engine(0, ways=tuple((0, memory) for memory in one))}, vram=(8, 8))
    scheduler, wanted = world.scheduler(), target("a")
    old = await scheduler.acquire(wanted)
    new = await scheduler.restart(replace(wanted, key=wanted.key._replace(revision=1)))
    assert sorted(runner.memory.estimated.devices for runner in scheduler.runners()) == [(0,), (1,)]
    old.release()
    new.release()
    await scheduler.close(0)


@virtual
async def test_fit_and_why_name_the_device() -> None:
    ways = tuple((0, memory) for memory in (RequiredMemory(1, (8,)), RequiredMemory(1, (0, 8))))
    world = World(10, {name: Engine(0, ways=ways) for name in "abc"}, vram=(8, 8))
    scheduler = world.scheduler()
    (await scheduler.acquire(target("a"))).release()
    forecast = await scheduler.diagnostics.fit(target("b"))
    assert (forecast.fits, forecast.would_evict) == (Fitting.NOW, [])
    assert forecast.reason == "b fits into what is free on device 1"
    assert forecast.figures.needed == RequiredMemory(1, (0, 8))
    assert (await scheduler.diagnostics.why(target("b"))).reason == "b is not loaded; a request loads it on device 1"
    (await scheduler.acquire(target("b"))).release()
    forecast = await scheduler.diagnostics.fit(target("c"))
    assert forecast.reason == "c fits on device 0 once a is evicted"
    await scheduler.close(0)
