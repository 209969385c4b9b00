"""What runners of a host hold in Ray, with a Ray that answers as the test says."""

import asyncio

import pytest

from modelrunner.cluster import reservations
from modelrunner.cluster.reservations import GroupBundle, Order, RayLimits, Reservations
from modelrunner.errors import HostLost, InsufficientMemory
from modelrunner.types import RequiredMemory
from tests.gateway.fakes import until

GIB = 1 << 30
MEMORY = RequiredMemory(5 * GIB, (0, 8 * GIB), shared=4 * GIB)


class FakeRay:
    """Grants whatever is not in `refused`. `held` is what was taken and not given back."""

    def __init__(self) -> None:
        self.held: dict[str, Order] = {}
        self.refused: set[str] = set()
        self.answers = True
        self.reservations = Reservations("node", 2, self._take)

    def _take(self, order: Order) -> None:
        if not order.node:
            self.held.pop(order.name, None)
        elif self.answers:
            if order.name not in self.refused:
                assert order.name not in self.held
                self.held[order.name] = order
            problem = "another job has it" if order.name in self.refused else ""
            group = "group" if order.bundles and not problem else ""
            asyncio.get_running_loop().call_soon(self.reservations.answered, order.name, problem, group)


async def test_files_and_cards_are_held_once_for_all_their_runners() -> None:
    ray = FakeRay()
    await asyncio.gather(*[ray.reservations.take(runner, "model", MEMORY) for runner in ("a", "b")])
    assert ray.held == {
        "node a": Order("node a", "node", GIB),
        "node b": Order("node b", "node", GIB),
        "node model": Order("node model", "node", 4 * GIB),
        "node 1": Order("node 1", "node", 0, 1),
    }
    ray.reservations.give_back("a")
    assert sorted(ray.held) == ["node 1", "node b", "node model"]
    ray.reservations.give_back("b")
    assert ray.held == {}


async def test_what_is_refused_leaves_nothing_behind() -> None:
    ray = FakeRay()
    ray.refused = {"node 1"}
    with pytest.raises(InsufficientMemory, match="another job has it"):
        await ray.reservations.take("a", "model", MEMORY)
    assert ray.held == {}
    ray.refused = set()
    await ray.reservations.take("a", "model", MEMORY)
    assert len(ray.held) == 3


async def test_a_run_over_two_nodes_holds_one_group_of_a_bundle_for_each_card() -> None:
    ray, other = FakeRay(), Reservations("other", 1, lambda order: None)
    parts = [(ray.reservations, RequiredMemory(5, (7, 7))), (other, RequiredMemory(4, (0, 7)))]  # not Ray's card
    ray.refused = {"node a"}
    with pytest.raises(InsufficientMemory, match="another job has it"):
        await ray.reservations.take_together("a", parts)
    assert ray.held == {}
    ray.refused = set()
    assert await ray.reservations.take_together("a", parts) == "group"
    bundles = GroupBundle("node", 3, 0), GroupBundle("node", 2, 1), GroupBundle("other", 4, -1)
    assert ray.held == {"node a": Order("node a", "node", bundles=bundles)}
    ray.reservations.give_back("a")
    assert ray.held == {}


async def test_nobody_waits_for_a_cluster_that_is_lost() -> None:
    ray = FakeRay()
    ray.answers = False
    taking = [asyncio.create_task(ray.reservations.take(runner, "model", MEMORY)) for runner in ("a", "b")]
    await until(lambda: bool(ray.reservations._answers))
    ray.reservations.end()
    for each in await asyncio.gather(*taking, return_exceptions=True):
        assert isinstance(each, HostLost), "no lack of memory, so it is asked elsewhere"


async def test_ray_has_a_limit_of_time_and_an_answer_that_comes_later_is_no_other_runners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = FakeRay()
    ray.answers = False
    with monkeypatch.context() as patch:
        patch.setattr(reservations, "_LIMIT", 0.01)
        with pytest.raises(InsufficientMemory, match="Ray did not say"):
            await ray.reservations.take("a", "model", RequiredMemory(GIB, shared=GIB))
    taking = asyncio.create_task(ray.reservations.take("b", "model", RequiredMemory(GIB, shared=GIB)))
    await until(lambda: len(ray.reservations._answers["node model"]) == 2)
    ray.reservations.answered("node model", "")  # it was given back at once
    ray.reservations.answered("node model", "another job has it")
    with pytest.raises(InsufficientMemory, match="another job has it"):
        await taking


def test_what_others_hold_is_not_in_the_budget() -> None:
    reservations = Reservations("node", 2, lambda order: None)
    budget = RequiredMemory(64 * GIB, (24 * GIB, 24 * GIB, 8 * GIB))  # Ray knows the first two cards
    assert reservations.within(budget) == budget
    reservations.limits = RayLimits(16 * GIB, (1,))
    assert reservations.within(budget) == RequiredMemory(16 * GIB, (0, 24 * GIB, 8 * GIB))


async def test_what_a_later_runner_maps_beyond_the_first_is_held_too() -> None:
    ray = FakeRay()
    await ray.reservations.take("a", "model", RequiredMemory(3 * GIB, (), shared=GIB))
    await ray.reservations.take("b", "model", RequiredMemory(9 * GIB, (), shared=8 * GIB))
    assert sum([order.memory for order in ray.held.values()]) == (2 + 1 + 8) * GIB
    for runner in ("a", "b"):
        ray.reservations.give_back(runner)
    assert ray.held == {}


async def test_files_that_are_given_back_while_another_runner_waits_are_held_anew() -> None:
    ray = FakeRay()
    await ray.reservations.take("a", "model", RequiredMemory(3 * GIB, (), shared=2 * GIB))
    taking = asyncio.create_task(ray.reservations.take("b", "model", RequiredMemory(3 * GIB, (), shared=2 * GIB)))
    await until(lambda: "node b" in ray.held)
    ray.reservations.give_back("a")
    await taking
    await ray.reservations.take("c", "model", RequiredMemory(3 * GIB, (), shared=2 * GIB))
    assert {order.name: order.memory for order in ray.held.values()} == {
        "node b": GIB,
        "node c": GIB,
        "node model": 2 * GIB,
    }
