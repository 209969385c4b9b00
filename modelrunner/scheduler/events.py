"""The events of runners and models, in order."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from modelrunner.concurrency.feed import Feed

Kind = Literal[
    "load",
    "ready",
    "sleep",
    "wake",
    "evict",
    "stop",
    "crash",
    "refuse",
    "pull",
    "push",
    "configure",
    "install",
    "damage",
    "remove",
    "tag",
    "move",
    "check",
    "tune",
]
_KEPT = 1000
_LONGEST = 4000  # characters of a name and of a reason: clients may have written them


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One event. `id` grows; `time` is in Unix seconds; `runner` is an ID, "" without one; `reason` is a
    sentence; `details` has values that JSON can hold."""

    id: int
    event: Kind
    time: float
    runner: str
    model: str
    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)


class Events(Feed[EventRecord]):
    """The last events. IDs begin with the time of day in microseconds, so that they go on growing when the daemon
    starts anew. `wall` is the time of day in Unix seconds."""

    def __init__(self, wall: Callable[[], float] = time.time, kept: int = _KEPT) -> None:
        super().__init__(int(wall() * 1e6) + 1, kept)
        self._wall = wall

    def emit(self, kind: Kind, *, model: str = "", runner: str = "", reason: str = "", **details: Any) -> None:
        """Notes an event; returns at once. `model` is the model's name, `runner` an ID, `reason` a sentence,
        `details` values that JSON can hold. Only the start of a very long text is kept."""
        now = self._wall()
        self.add(EventRecord(self.last + 1, kind, now, runner, model[:_LONGEST], reason[:_LONGEST], details))

    def recent(self, model: str | None = None) -> list[EventRecord]:
        """The events that are kept, oldest first; those about `model` if one is given."""
        return [event for event in self if model in (None, event.model)]
