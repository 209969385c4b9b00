"""The cards of a group over several nodes, with a Ray that gives any card that is free, and tells which one only inside
the group."""

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from modelrunner.cluster.raygroups import Groups


@dataclass
class CardsOfRay:
    """`free` has the cards of each node, of which it gives the first; others' cards are not among them."""

    free: dict[str, list[int]]
    made: list["Group"] = field(default_factory=list)

    def remote(self, **options: Any) -> Any:
        return lambda function: self

    def options(self, scheduling_strategy: "Group") -> "CardsOfRay":
        self.asked = scheduling_strategy
        return self

    def get(self, call: object, timeout: float) -> int:
        [(_, card)] = self.asked.cards
        return card

    def placement_group(self, bundles: list[dict[str, int]], bundle_label_selector: list[dict[str, str]]) -> "Group":
        group = Group(self, [s["ray.io/node-id"] for s in bundle_label_selector], bundles)
        self.made.append(group)
        return group

    def remove_placement_group(self, group: "Group") -> None:
        self.made.remove(group)
        for node, card in group.cards:
            self.free[node] = sorted([*self.free[node], card])

    def modules(self) -> dict[str, ModuleType]:
        groups, strategies, state = [ModuleType(name) for name in ("groups", "strategies", "state")]
        groups.__dict__.update(placement_group=self.placement_group, remove_placement_group=self.remove_placement_group)
        strategies.__dict__.update(PlacementGroupSchedulingStrategy=lambda group: group)
        state.__dict__.update(available_resources_per_node=dict)
        return {
            "ray.util.placement_group": groups,
            "ray.util.scheduling_strategies": strategies,
            "ray._private.state": state,
        }


class Group:
    def __init__(self, ray: CardsOfRay, nodes: list[str], bundles: list[dict[str, int]]) -> None:
        self.nodes, self.bundles, self.cards = nodes, bundles, list[tuple[str, int]]()
        wanted = [node for node, bundle in zip(nodes, bundles, strict=True) if bundle.get("GPU")]
        if all(len(ray.free[node]) >= wanted.count(node) for node in wanted):
            self.cards = [(node, ray.free[node].pop(0)) for node in wanted]
        self.granted = len(self.cards) == len(wanted)
        self.id = b"id"

    def wait(self, seconds: float) -> bool:
        return self.granted

    def remote(self) -> None: ...


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> CardsOfRay:
    made = CardsOfRay({"b": [0, 1, 2], "c": [0, 1]})
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def bundle(node: str, card: int) -> dict[str, Any]:
    return {"node": node, "memory": 5, "card": card}


def test_a_group_gets_the_cards_that_the_plan_chose(ray: CardsOfRay) -> None:
    groups = Groups(ray)
    chosen = [bundle("b", 1), bundle("b", 2), bundle("c", 1)]
    assert groups.take_together("run", chosen) == ("", b"id".hex())
    [made] = ray.made
    assert (made.nodes, made.bundles) == (["b", "b", "c"], [{"GPU": 1, "memory": 5}] * 3)
    assert sorted(made.cards) == [("b", 1), ("b", 2), ("c", 1)]
    assert groups.limits({id: {"Resources": {"memory": 10, "GPU": 1}} for id in "bc"})["b"].memory == 10
    groups.give_back("run")
    assert ray.made == []


def test_nothing_is_held_after_a_fault_of_rays(ray: CardsOfRay, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(group: Group, seconds: float) -> bool:
        if len(group.bundles) > 1:
            raise ConnectionError
        return group.granted

    monkeypatch.setattr(Group, "wait", wait)
    with pytest.raises(ConnectionError):
        Groups(ray).take_together("run", [bundle("b", 1), bundle("c", 1)])
    assert ray.made == []


def test_a_card_of_another_job_is_not_replaced_by_another_one(ray: CardsOfRay) -> None:
    ray.free["c"] = [0]
    problem, group = Groups(ray).take_together("run", [bundle("b", 0), bundle("c", 1)])
    assert "another job of the Ray cluster has some of the memory, of 2 devices that it needs on 2 nodes" in problem
    assert group == ""
    assert ray.made == []
    assert ray.free == {"b": [0, 1, 2], "c": [0]}


@pytest.mark.parametrize("breaks", [1, 2, 3])
def test_a_ray_that_breaks_off_keeps_no_card(ray: CardsOfRay, monkeypatch: pytest.MonkeyPatch, breaks: int) -> None:
    waits = iter(range(1, 9))

    def wait(group: Group, seconds: float) -> bool:
        if next(waits) == breaks:
            raise ConnectionError("the cluster is gone")
        return group.granted

    monkeypatch.setattr(Group, "wait", wait)
    with pytest.raises(ConnectionError):
        Groups(ray).take("node", "b", 0, 2)
    assert ray.made == []
    assert ray.free["b"] == [0, 1, 2]
