"""The input and the output of a plan: plain frozen values, so that a test can write every decision down. Times are
seconds of one monotonic clock, sizes are bytes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from modelrunner.types import RequiredMemory, RunnerKey


class Phase(StrEnum):
    """The scheduler's word for one runner. Only a ready runner takes new leases; only an ended one has given its memory
    back. A runner that is being woken is starting, one that is falling asleep is sleeping. `RunnerSlot.become` holds
    the allowed changes. (`RunnerState` in runner.py is less: how far the engine's process itself has come.)"""

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
    """One request in the queue, waiting since `since`. `caller` names who asks, "" for all that give no name. A `batch`
    request lets interactive requests go first."""

    id: int
    since: float
    caller: str = ""
    batch: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """The requests that wait for one key, oldest first. `turn` is when one of them last got a lease, or
    their runner was evicted. `needs` holds the
    memory of each variant of the run, the preferred variant first; it is empty until the estimate is there. `name` is
    the model's name in messages. A runner of a `pinned` group will be pinned. `load_seconds` is how long the last load
    took, 0 if there was none."""

    key: RunnerKey
    waiting: tuple[Request, ...]
    needs: tuple[RequiredMemory, ...]
    name: str = ""
    pinned: bool = False
    load_seconds: float = 0.0
    turn: float = -math.inf

    @property
    def since(self) -> float:
        """Since when the group has waited for a turn. By this the group stands in line for memory, so that models take
        turns even where one of them has a long queue."""
        return max(self.waiting[0].since, self.turn)


class Slot(NamedTuple):
    """The one runner of its key. `memory` counts until the process is gone. `leases` is the number of requests that
    hold the runner, `interactive` of them not from a batch, at most `capacity`. `last_used` is when the last lease
    began or ended, or when the load ended, which took `load_seconds` and ended at `ready_at`. `variant` is the number
    of the variant that runs. `drain` says why the runner takes no new leases; `error` how it ended, if nobody asked it
    to."""

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
    interactive: int = 0


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
    """Times in seconds. `max_wait` is how long a request may wait in all. `patience`, `loads`, `linger` and `residency`
    say how long runners are spared, see `victims`. A batch whose caller got nothing for `ageing` seconds counts as
    interactive until its next turn."""

    max_wait: float = 600.0
    patience: float = 6.0
    loads: float = 8.0
    linger: float = 1.0
    residency: float = 2.0
    ageing: float = 60.0


@dataclass(frozen=True, slots=True)
class State:
    """Everything that a plan depends on. `closing`: no request is admitted any more. `paused` has the IDs of the models
    whose runners stop and whose requests wait. `served` has the time of the last turn of each caller, and of its batch.
    `asleep` has, for each runner that can sleep, the memory that counts for it in its other condition: asleep if it is
    awake, awake if it sleeps."""

    groups: tuple[Group, ...]
    slots: tuple[Slot, ...]
    budget: RequiredMemory
    failures: Mapping[RunnerKey, Failure] = field(default_factory=dict)
    policy: Policy = field(default_factory=Policy)
    closing: bool = False
    paused: frozenset[str] = frozenset()
    served: Mapping[tuple[str, bool], float] = field(default_factory=dict)
    asleep: Mapping[RunnerKey, RequiredMemory] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grant:
    """Each of `requests` gets a lease of the key's runner."""

    key: RunnerKey
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """Starts a runner for `key` in that variant. Its `memory` counts from now."""

    key: RunnerKey
    memory: RequiredMemory
    variant: int = 0


@dataclass(frozen=True, slots=True)
class Sleep:
    """The runner gives back what it can without ending. Until it sleeps, the larger of both figures counts for it."""

    key: RunnerKey


@dataclass(frozen=True, slots=True)
class Wake:
    """The runner will count for `memory` again; until it is awake, the larger of both figures counts."""

    key: RunnerKey
    memory: RequiredMemory


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the process, whoever still uses it. `room_for` is the name of the model that needs the room."""

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
class Forget:
    """Removes the slot of a process that is gone, and remembers `failure` for its key."""

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


Action = Grant | Start | Sleep | Wake | Stop | Drain | Forget | Refuse | WakeAt
