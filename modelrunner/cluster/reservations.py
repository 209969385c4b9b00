"""What the runners of one host hold in Ray, so that no other job of the cluster counts the same memory or card: each
its own memory, the runners of one model its files, and those of one card the whole card. A run over several hosts holds
one placement group with its memory and cards on all of them, which its engine fills."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from modelrunner.errors import HostLost, InsufficientMemory
from modelrunner.types import RequiredMemory

_LOST = "the Ray cluster is lost, so nothing can be reserved on its nodes: `modelrunner hosts` shows them"
_LIMIT = 180.0  # seconds; Ray starts a process to tell a card's number, one after the other, and others may be first


class GroupBundle(msgspec.Struct, frozen=True):
    """What one worker of an engine takes on a node: bytes of `memory`, and the `card`, -1 for none."""

    node: str
    memory: int
    card: int


class Order(msgspec.Struct, frozen=True):
    """A line for `raymembers.py`: takes on a `node` so many bytes of `memory`, or the `card` if that is 0, or all the
    `bundles` as one group; without a node gives back what has that `name`."""

    name: str
    node: str = ""
    memory: int = 0
    card: int = 0
    bundles: tuple[GroupBundle, ...] = ()


class RayLimits(msgspec.Struct, frozen=True):
    """See `raygroups.NodeLimits`."""

    memory: int
    cards: tuple[int, ...]


class Reservations:
    """Those on the Ray node with the ID `node`, which has `cards` cards in Ray. `send` takes an order. `limits` are
    what Ray told last, None before it did."""

    def __init__(self, node: str, cards: int, send: Callable[[Order], None]) -> None:
        self.limits: RayLimits | None = None
        self.cards = cards
        self._node, self._send = node, send
        self._users: dict[str, set[str]] = {}
        self._sizes: dict[str, int] = {}  # bytes that the orders hold, by their names
        self._answers: dict[str, list[asyncio.Future[tuple[str, str]]]] = {}  # Ray's are in the order of the orders
        self._turn = asyncio.Lock()
        self._is_lost = False

    def within(self, budget: RequiredMemory) -> RequiredMemory:
        """Returns the part of a `budget` that Ray gives us."""
        if (limits := self.limits) is None:
            return budget
        usable = [*limits.cards, *range(self.cards, len(budget.vram))]  # Ray does not know the rest
        vram = [size if number in usable else 0 for number, size in enumerate(budget.vram)]
        return RequiredMemory(min(budget.ram, limits.memory), tuple(vram), budget.shared)

    async def take(self, runner: str, files: str, memory: RequiredMemory) -> None:
        """Takes what the runner with that ID needs of the `memory` and is not held yet; `files` is the ID of its model.
        Raises `InsufficientMemory`, also if Ray does not answer for minutes, and `HostLost` if the cluster is lost. It
        holds nothing then."""
        cards = [Order(f"{self._node} {card}", self._node, 0, card) for card in memory.devices if card < self.cards]
        async with self._taking(runner):
            name = f"{self._node} {files}"
            held = self._sizes[name] if self._users.get(name) else memory.shared
            shared = min(memory.shared, held)  # what is mapped beyond it counts as the runner's own
            needs = [Order(f"{self._node} {runner}", self._node, memory.ram - shared), Order(name, self._node, shared)]
            for order in [*[need for need in needs if need.memory], *cards]:
                await self._hold(runner, order)

    async def take_together(self, runner: str, parts: "Sequence[tuple[Reservations, RequiredMemory]]") -> str:
        """Takes what the runner needs on several nodes, first on this one, as one group: a bundle for each card, with
        its share of the memory there, or one for the memory where no card is. Returns the ID of the group. Raises as
        `take` does."""
        bundles = tuple([bundle for there, memory in parts for bundle in there.bundles(memory)])
        async with self._taking(runner):
            return await self._hold(runner, Order(f"{self._node} {runner}", self._node, bundles=bundles))

    def bundles(self, memory: RequiredMemory) -> list[GroupBundle]:
        """Returns those of this node."""
        cards = [card for card in memory.devices if card < self.cards] or [-1]
        share, rest = divmod(memory.ram, len(cards))
        return [GroupBundle(self._node, share + (rest if i == 0 else 0), card) for i, card in enumerate(cards)]

    @asynccontextmanager
    async def _taking(self, runner: str) -> AsyncIterator[None]:
        """One runner after the other takes what it needs, or gives all of it back."""
        try:
            async with asyncio.timeout(_LIMIT), self._turn:
                yield
        except BaseException as failure:
            self.give_back(runner)
            if isinstance(failure, TimeoutError):
                raise InsufficientMemory(
                    f"Ray did not say within {_LIMIT:.0f} s whether its node has the memory: try again, and look at "
                    "`ray status` if it stays so"
                ) from None
            raise

    async def _hold(self, runner: str, order: Order) -> str:
        if self._users.setdefault(order.name, set()):
            self._users[order.name].add(runner)
            return ""
        if self._is_lost:
            raise HostLost(_LOST)
        self._users[order.name].add(runner)
        self._sizes[order.name] = order.memory
        answer: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        self._answers.setdefault(order.name, []).append(answer)
        self._send(order)
        problem, group = await answer
        if self._is_lost:
            raise HostLost(_LOST)
        if problem:
            raise InsufficientMemory(problem)
        return group

    def answered(self, name: str, problem: str, group: str = "") -> None:
        """Takes Ray's answer to an order: a problem, or the ID of the `group` that was made for bundles."""
        if waits := self._answers.get(name):
            answer = waits.pop(0)
            if not waits:
                del self._answers[name]
            if not answer.done():  # else nobody waits for it any more, and what was taken is given back
                answer.set_result((problem, group))

    def give_back(self, runner: str) -> None:
        """Gives back what no other runner of the host needs."""
        for name in [name for name, users in self._users.items() if runner in users]:
            self._users[name].discard(runner)
            if not self._users[name]:
                del self._users[name]
                self._sizes.pop(name, None)
                self._send(Order(name))

    def end(self) -> None:
        """Ends the wait of those that take something, and of all that come: the cluster is lost."""
        self._is_lost = True
        for name in [name for name, waits in self._answers.items() for _ in waits]:
            self.answered(name, _LOST)
