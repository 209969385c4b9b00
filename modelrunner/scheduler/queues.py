"""The requests that wait for a runner."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from modelrunner.scheduler.state import Group, HostedVariant, Options, Request, first_of, options_of
from modelrunner.types import KeepAlive, RunnerKey

if TYPE_CHECKING:
    from modelrunner.scheduler.slots import Lease
from modelrunner.scheduler.target import Target


@dataclass(eq=False, slots=True)
class Ticket:
    """A request in the queue. `granted` ends with its lease or its error. `owner` is described at
    `Scheduler.acquire`, and so is `prefix`. It waits for the runner of `target`, and asks the model of `asked`, a
    preset of it."""

    request: Request
    target: "Target"
    asked: "Target"
    keep_alive: KeepAlive
    granted: "asyncio.Future[Lease]"
    owner: str | None = None
    prefix: int | None = None


@dataclass(eq=False, slots=True)
class Queue:
    """The requests that wait for one key, oldest first. `variants` are the ways to run their model, empty until the
    memory estimate is there; `is_looking` while one is made, `is_stale` if it has to be made again. `turn` is when one
    of them last got a lease, or when the key's runner was evicted."""

    target: "Target"
    tickets: dict[int, Ticket] = field(default_factory=dict)
    variants: Sequence[HostedVariant] = ()
    turn: float = float("-inf")
    is_looking: bool = False
    is_stale: bool = False
    _options: Options = field(default_factory=Options)
    _first: Options = field(default_factory=Options)

    def learn(self, variants: Sequence[HostedVariant]) -> None:
        """Notes the ways to run the model."""
        self.variants, self._options = variants, options_of(variants)
        self._first = first_of(self._options)

    def add(self, *tickets: Ticket) -> None:
        """Puts these requests in their place among the others."""
        self.tickets |= {ticket.request.id: ticket for ticket in tickets}
        in_order = sorted(self.tickets.values(), key=lambda ticket: (ticket.request.since, ticket.request.id))
        self.tickets = {ticket.request.id: ticket for ticket in in_order}

    def has(self, model_id: str) -> bool:
        """True if a request asks this model."""
        return any(ticket.asked.model_id == model_id for ticket in self.tickets.values())

    def view(self, load_seconds: float = 0.0, grown: bool = False) -> Group:
        """The queue as a plan sees it; `load_seconds` is how long the model's last load took. The model has `grown` if
        several requests wanted it at once since it was loaded."""
        waiting = tuple([ticket.request for ticket in self.tickets.values()])
        target, options = self.target, self._options
        pinned = any(ticket.asked.pinned for ticket in self.tickets.values()) or target.pinned
        group = Group(target.key, waiting, options, target.name, pinned, load_seconds, self.turn, *target.replicas)
        return replace(group, options=self._first, wider=options) if target.grows and not grown else group


class Queues(dict[RunnerKey, Queue]):
    """The queues by the key that they wait for. A queue is removed with its last ticket."""

    def owner(self, key: RunnerKey, nobody: Callable[[], str | None]) -> str | None:
        """The owner of the requests that wait for the key: None for several, and the result of `nobody` for none."""
        tickets = self[key].tickets.values() if key in self else ()
        owners = {ticket.owner for ticket in tickets if ticket.owner is not None}
        if not owners:
            return nobody()
        return owners.pop() if len(owners) == 1 else None

    def take(self, requests: Iterable[int], key: RunnerKey) -> list[Ticket]:
        """Removes these requests from the queue; returns those that were not cancelled in this turn of the loop."""
        queue = self.get(key)
        if queue is None:
            return []
        taken = [ticket for id in requests if (ticket := queue.tickets.pop(id, None)) is not None]
        if not queue.tickets:
            del self[key]
        return [ticket for ticket in taken if not ticket.granted.done()]
