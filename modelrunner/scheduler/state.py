"""What a plan is made from and what it consists of: plain frozen values, so that every decision can be written down in
a test. Times are seconds of one monotonic clock, sizes are bytes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from modelrunner.types import RequiredMemory, RunnerKey


class Phase(StrEnum):
    """Of a slot. Only a ready one takes new leases; only an ended one gives its memory back. One that is being woken is
    starting, one that is falling asleep sleeping."""

    STARTING = "starting"
    READY = "ready"
    SLEEPING = "sleeping"
    DRAINING = "draining"
    STOPPING = "stopping"
    ENDED = "ended"


class Reason(StrEnum):
    """Why a runner is drained or stopped."""

    IDLE = "its keep-alive has passed"
    ROOM = "another model needs the room"
    UNLOAD = "it was unloaded"
    PAUSED = "it is paused"
    SHUTDOWN = "the daemon shuts down"


@dataclass(frozen=True, slots=True)
class Request:
    """One request in the queue, waiting since `since`. `caller` stands for who asks, "" for the many that say nothing;
    one of a `batch` lets interactive ones go first."""

    id: int
    since: float
    caller: str = ""
    batch: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """The requests that wait for one key, oldest first. `needs` has what each variant of the run needs, the preferred
    one first, and is empty while the estimate is being made. `name` is what people call the model. A runner of a
    `pinned` one will be pinned."""

    key: RunnerKey
    waiting: tuple[Request, ...]
    needs: tuple[RequiredMemory, ...]
    name: str = ""
    pinned: bool = False


class Slot(NamedTuple):
    """The one runner of its key. `memory` counts until the process is gone. `last_used` is when the last lease began or
    ended, or when loading ended, which was at `ready_at` and took `load_seconds`. It has at most `capacity` leases at
    once. `variant` is the number of the one it runs. `drain` says why it takes no new leases; `error` how it ended, if
    nobody asked it to. `other` is what counts for it once it sleeps (at most) or, while it sleeps, once it is awake;
    None for one that cannot sleep."""

    key: RunnerKey
    phase: Phase
    memory: RequiredMemory
    leases: int = 0
    last_used: float = 0.0
    keep_alive: float = 300.0
    pinned: bool = False
    load_seconds: float = 0.0
    drain: Reason | None = None
    was_ready: bool = True
    error: BaseException | None = None
    ready_at: float = -math.inf
    capacity: int = 64
    variant: int = 0
    other: RequiredMemory | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """`count` runners of the key in a row ended by themselves, the last one with `error`; no other is started before
    `until`. `waits`: who asks for it meanwhile waits rather than being refused. Where memory ran out, no variant before
    `floor` is tried again and, if `raised`, each counts for more than its estimate."""

    count: int
    until: float
    error: BaseException = field(compare=False)
    waits: bool = False
    floor: int = 0
    raised: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """`max_wait` is how long a request may wait in all; when half of it has passed, its model gets room whoever else is
    spared, and in a smaller variant if need be. `patience` is the batching window: how long a request that waits for
    room lets itself be overtaken by requests for busy runners before one of them is drained, if nobody queues for them.
    `residency` is how many times as long as its load took a busy runner is spared after it, `linger` how many times as
    long those who want an idle one's room wait, all together, after its last use. A batch request takes turns with the
    others after `ageing` seconds."""

    max_wait: float = 600.0
    patience: float = 5.0
    residency: float = 5.0
    linger: float = 90.0
    ageing: float = 60.0


@dataclass(frozen=True, slots=True)
class State:
    """Everything that a plan depends on. `closing`: no request is admitted any more. `paused` has the IDs of the models
    whose runners go and whose requests wait. `served` says of each caller (and of its batch) when it had its last turn,
    in any unit that grows."""

    groups: tuple[Group, ...]
    slots: tuple[Slot, ...]
    budget: RequiredMemory
    failures: Mapping[RunnerKey, Failure] = field(default_factory=dict)
    policy: Policy = field(default_factory=Policy)
    closing: bool = False
    paused: frozenset[str] = frozenset()
    served: Mapping[tuple[str, bool], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grant:
    """Each of `requests` gets a lease of the key's runner."""

    key: RunnerKey
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """A runner for `key` in the variant of that number, whose `memory` counts from now."""

    key: RunnerKey
    memory: RequiredMemory
    variant: int = 0


@dataclass(frozen=True, slots=True)
class Sleep:
    """The runner gives back what it can without ending. Until it sleeps, the most of both counts for it."""

    key: RunnerKey


@dataclass(frozen=True, slots=True)
class Wake:
    """It will count for `memory` again; until it is awake, the most of both does."""

    key: RunnerKey
    memory: RequiredMemory


@dataclass(frozen=True, slots=True)
class Stop:
    """The process is asked to end, whoever still uses it. `room_for` is the name of the model that needs the room."""

    key: RunnerKey
    reason: Reason
    room_for: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Drain:
    """No new leases; a later plan stops it after the last. `room_for` as in `Stop`."""

    key: RunnerKey
    reason: Reason
    room_for: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Admit:
    """A drain for room is taken back, since nobody waits for that room any more."""

    key: RunnerKey


@dataclass(frozen=True, slots=True)
class Forget:
    """The process is gone: the slot leaves the table. `failure` is to be remembered for its key."""

    key: RunnerKey
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Each of `requests` is answered with `error`."""

    key: RunnerKey
    requests: tuple[int, ...]
    error: BaseException = field(compare=False)


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Plan again at this time even if nothing happens before."""

    time: float


Action = Grant | Start | Sleep | Wake | Stop | Drain | Admit | Forget | Refuse | WakeAt
