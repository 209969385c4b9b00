"""What our runners hold in Ray: placement groups, each pinned to its node, or with bundles pinned to several. Part of
the program `raymembers`.

Ray does not refuse a group, it lets it wait, so a short wait decides. Ray chooses the card of a group and tells it to a
task in the group alone, so every card is a group of its own, and cards that were not wanted are given back.

Ray: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html."""

import math
import threading
from collections.abc import Collection
from importlib import import_module
from typing import Any, NamedTuple

_GRANT = 2.0  # seconds in which Ray grants what fits: it needs milliseconds, and 0.2 s after something was given back
_TOLD = 30.0  # seconds in which Ray tells the card of a group; it may have to start a process for that


class NodeLimits(NamedTuple):
    """What all our runners on a node may hold in Ray: bytes of main memory, and the numbers of the cards of which no
    other job has a part."""

    memory: int
    cards: tuple[int, ...]


class _Reserved(NamedTuple):
    group: Any
    node: str
    memory: int
    """Bytes; 0 for a card."""
    card: int = -1


class Groups:
    """The groups of this process, each by the name that it was given. Ray removes them when the process ends. Several
    threads may call it."""

    def __init__(self, ray: Any) -> None:
        groups = import_module("ray.util.placement_group")
        self._make, self._remove, self._ray = groups.placement_group, groups.remove_placement_group, ray
        self._inside = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        self._free = import_module("ray._private.state").available_resources_per_node
        self._card_of_task = ray.remote(num_cpus=0, num_gpus=1)(_card_of_task)
        self._held: dict[str, list[_Reserved]] = {}
        self._others: dict[str, tuple[int, int]] = {}  # by node: bytes and cards that other jobs had at the last look
        self._cards: dict[str, tuple[int, tuple[int, ...]]] = {}  # by node: how many others had, and which they had not
        self._lock = threading.Lock()

    def take(self, name: str, node: str, memory: int, card: int) -> str:
        """Takes the memory, in bytes, or the card if that is 0. Returns "", or a sentence why Ray does not give it."""
        with self._lock:
            group = self._granted(node, memory) if memory else self._card(node, card)
            if group is not None:
                self._held[name] = [group]
                return ""
            self._cards.pop(node, None)
        what = "the memory that it needs" if memory else f"device {card}"
        return f"another job of the Ray cluster has {what} there: try again, this is known for the next start"

    def take_together(self, name: str, bundles: list[dict[str, Any]]) -> tuple[str, str]:
        """Takes these bundles (`reservations.GroupBundle`) as one group. Returns "" and its ID, or a sentence why Ray
        does not give it. While it is made, the cards of its nodes that it does not want are held, so that Ray can give
        no other ones."""
        wanted = {(bundle["node"], bundle["card"]) for bundle in bundles if bundle["card"] >= 0}
        nodes = [bundle["node"] for bundle in bundles]
        with self._lock:
            held, given = dict[tuple[str, int], _Reserved](), None
            try:
                for node in {node for node, _ in wanted}:
                    while (group := self._any_card(node)) is not None:
                        held[node, group.card] = group
                if not wanted <= held.keys():
                    return self._refused(nodes, wanted)
                for card in wanted:
                    self._remove(held.pop(card).group)
                needs = [{"GPU": 1} if bundle["card"] >= 0 else {} for bundle in bundles]
                needs = [
                    n | ({"memory": b["memory"]} if b["memory"] else {}) for n, b in zip(needs, bundles, strict=True)
                ]
                given = self._make(needs, bundle_label_selector=[{"ray.io/node-id": node} for node in nodes])
                if not given.wait(_GRANT):
                    return self._refused(nodes, wanted)
                made, given = given, None
                taken = [_Reserved(made, bundle["node"], bundle["memory"]) for bundle in bundles if bundle["memory"]]
                self._held[name] = [*taken, *[_Reserved(made, node, 0, card) for node, card in wanted]]
                return "", made.id.hex()
            finally:
                for group in [*[each.group for each in held.values()], *([given] if given is not None else [])]:
                    self._remove(group)

    def _refused(self, nodes: Collection[str], wanted: Collection[tuple[str, int]]) -> tuple[str, str]:
        for node in nodes:
            self._cards.pop(node, None)
        cards = f", of {len(wanted)} devices" if wanted else ""
        return (
            f"another job of the Ray cluster has some of the memory{cards} that it needs on {len({*nodes})} nodes: try "
            "again, this is known for the next start"
        ), ""

    def give_back(self, name: str) -> None:
        with self._lock:
            if groups := self._held.pop(name, None):
                self._remove(groups[0].group)

    def limits(self, nodes: dict[str, dict[str, Any]]) -> dict[str, NodeLimits]:
        """Returns the limits of each of these nodes of `ray.nodes`. Ray learns up to a second late of what was given
        back, so others have no more than at each of the last two looks."""
        with self._lock:
            free, limits = self._free(), dict[str, NodeLimits]()
            for id, node in nodes.items():
                there = [group for groups in self._held.values() for group in groups if group.node == id]
                memory, cards = [node["Resources"].get(what, 0) for what in ("memory", "GPU")]
                left = free.get(id, {})
                bytes = memory - left.get("memory", 0) - sum([group.memory for group in there])
                parts = cards - left.get("GPU", 0) - sum([not group.memory for group in there])
                now = max(0, int(bytes)), max(0, math.ceil(parts))
                before, self._others[id] = self._others.get(id, now), now
                others = min(now[1], before[1])
                if not others:
                    self._cards.pop(id, None)
                elif id not in self._cards or (now[1] == before[1] != self._cards[id][0]):
                    self._cards[id] = others, self._look_for_cards(id, there)
                usable = self._cards[id][1] if others else tuple(range(int(cards)))
                limits[id] = NodeLimits(int(memory) - min(now[0], before[0]), usable)
            return limits

    def _look_for_cards(self, node: str, held: list[_Reserved]) -> tuple[int, ...]:
        """Returns ours, and those that Ray gives when it is asked for one after the other."""
        cards: list[_Reserved] = []
        try:
            while (group := self._any_card(node)) is not None:
                cards.append(group)
        finally:
            for group in cards:
                self._remove(group.group)
        return tuple(sorted([group.card for group in (*held, *cards) if not group.memory]))

    def _card(self, node: str, card: int) -> _Reserved | None:
        others: list[_Reserved] = []
        try:
            while (group := self._any_card(node)) is not None and group.card != card:
                others.append(group)
            return group
        finally:
            for other in others:
                self._remove(other.group)

    def _any_card(self, node: str) -> _Reserved | None:
        if (reserved := self._granted(node, 0)) is None:
            return None
        inside = self._inside(reserved.group)
        try:
            card = self._ray.get(self._card_of_task.options(scheduling_strategy=inside).remote(), timeout=_TOLD)
            return reserved._replace(card=card)
        except Exception:  # Ray's: the node is gone, or has no room for a process
            self._remove(reserved.group)
            return None

    def _granted(self, node: str, memory: int) -> _Reserved | None:
        group = self._make(
            [{"memory": memory} if memory else {"GPU": 1}], bundle_label_selector=[{"ray.io/node-id": node}]
        )
        is_granted = False
        try:
            is_granted = group.wait(_GRANT)
        finally:
            if not is_granted:
                self._remove(group)
        return _Reserved(group, node, memory) if is_granted else None


def _card_of_task() -> int:
    """Returns the number of the card that Ray gave to the task."""
    return int(import_module("ray").get_gpu_ids()[0])
