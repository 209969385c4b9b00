"""The input and the output of a plan: plain frozen values, so that a test can write every decision down. Times are
seconds of one monotonic clock, sizes are bytes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from modelrunner.types import RequiredMemory, RunnerKey, Variant

# A caller and whether its requests are a batch: each such line takes turns with the others.
Line = tuple[str, bool]
# The host of a run, or those of a run over several, first the one where its engine runs.
Site = str | tuple[str, ...]


class Phase(StrEnum):
    """A runner's phase. Only a ready runner takes new leases; only an ended one has given its memory back. A runner
    that is being woken is starting, one that is falling asleep is sleeping. `RunnerSlot.become` holds the allowed
    changes. (`ProcessPhase` in engine/localrunner.py is that of the engine's process alone.)"""

    STARTING = "starting"
    READY = "ready"
    SLEEPING = "sleeping"
    DRAINING = "draining"
    STOPPING = "stopping"
    ENDED = "ended"


SUSPECT = 2  # crashes after which a request is suspected
REJOIN = 30.0  # seconds after a host came or was lost in which more may come, and come back
SUSPECT_TURN = 5.0  # seconds until the next suspect is asked, if the engine has not begun to answer the last one
LEAVING = (Phase.DRAINING, Phase.STOPPING)  # a runner that takes no more requests, and will give its memory back


class Reason(StrEnum):
    """The reason why a runner is drained or stopped, as a sentence. Programs read its `code`."""

    IDLE = "its keep-alive has passed"
    ROOM = "another model needs the room"
    MEMORY = "other programs took memory"
    UNLOAD = "it was unloaded"
    PAUSED = "it is paused"
    REPLACED = "another configuration takes its place"
    GROWN = "another engine that answers more requests at once takes its place"
    SHUTDOWN = "the daemon shuts down"

    @property
    def code(self) -> str:
        return self.name.lower()


class RunnerId(NamedTuple):
    """One runner of its key. The plan that starts it chooses the number: the least that no runner of the key has."""

    key: RunnerKey
    number: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One request in the queue, waiting since `since`; of one that is asked again, the time of its earlier waits is
    before that. `caller` is "" for all clients that give no name. A `batch` request lets interactive requests go first.
    The engine crashed `crashes` times while it had this request. `prefers` is the number of the runner that has the
    beginning of its conversation in its cache, None if none is known."""

    id: int
    since: float
    caller: str = ""
    batch: bool = False
    crashes: int = 0
    prefers: int | None = None

    @property
    def suspect(self) -> bool:
        """True if the request is asked apart from the other suspects, so that the next crash shows which it was."""
        return self.crashes >= SUSPECT


class RunPlace(NamedTuple):
    """Where a runner computes. A figure or a fault of one place says nothing about another."""

    devices: tuple[int, ...] = ()
    """The numbers of its devices; none for the processors alone."""
    host: str = ""
    """The name of its host, "" for the machine of the daemon. The engine itself runs there."""
    others: tuple["RunPlace", ...] = ()
    """Where else it computes, if it runs over several hosts."""

    @property
    def site(self) -> "Site":
        return (self.host, *[other.host for other in self.others]) if self.others else self.host

    @property
    def each(self) -> tuple["RunPlace", ...]:
        """The place on each of its hosts."""
        return (RunPlace(self.devices, self.host), *self.others) if self.others else (self,)

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host, *[other.host for other in self.others])

    def __str__(self) -> str:
        """ " on device 1 of b", " on b", " on b and on c", or "" for the processors of this machine."""
        return " and".join([place.text({}) for place in self.each])

    def text(self, names: Mapping[int, str]) -> str:
        """Its own host with the `names` of devices: " on device 1 (NVIDIA A30) of b"."""
        devices = [f"{number} ({names[number]})" if names.get(number) else str(number) for number in self.devices]
        where = f" on device{'s'[: len(devices) > 1]} {', '.join(devices)}" if devices else ""
        return where + (f" {'of' if where else 'on'} {self.host}" if self.host else "")


class RunOption(NamedTuple):
    """One way to give a model a runner."""

    memory: RequiredMemory
    """What counts for the runner from the decision to start it."""
    rank: int = 0
    """Options of one rank are the same run in other places; a higher rank is a smaller run."""
    place: RunPlace = RunPlace()
    number: int = 0
    """Of the variant that runs then."""
    fetches: bool = False
    """True if the host lacks the files of the model."""
    sequences: int = 1
    """How many requests it works on at once."""

    def __str__(self) -> str:
        return f"{self.memory}, rank {self.rank}, variant {self.number}"


class HostedVariant(NamedTuple):
    """A variant on one host."""

    variant: Variant
    host: str = ""
    fetches: bool = False
    """True if the host lacks the files of the model."""
    others: tuple[RunPlace, ...] = ()
    """Where else it computes: `RunPlace.others`."""


Offer = tuple[Site, Sequence[RunOption]]
"""A host, or several together, and the options that they have."""
Kind = Sequence[Offer]
"""Hosts with the same options but for their places and numbers, in the same order."""


class Options(tuple[RunOption, ...]):
    """Options that many plans see: they are sorted out once."""

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        hosts: dict[Site, list[RunOption]] = {}
        for option in self:
            hosts.setdefault(option.place.site, []).append(option)
        offers: dict[object, list[Offer]] = {}
        for host, there in hosts.items():
            same = tuple([(o.memory, o.rank, o.place.devices, o.fetches, o.sequences) for o in there])
            offers.setdefault(same, []).append((host, there))
        return tuple(offers.values())


def kinds_of(options: Sequence[RunOption]) -> tuple[Kind, ...]:
    return (options if isinstance(options, Options) else Options(options)).kinds


def options_of(hosted: Sequence[HostedVariant]) -> Options:
    """The options that variants are to a plan, those of the best rank first. A host without a device ranks behind all
    those that compute on one: its best run is not the same as theirs."""
    with_device = {each.host for each in hosted if each.variant.memory.devices}
    last = max([each.variant.rank for each in hosted], default=0)
    options = [
        RunOption(
            v.memory,
            v.rank + (1 + last if with_device and host not in with_device else 0),
            RunPlace(v.memory.devices, host, others),
            number,
            fetches,
            v.spec.parallel,
        )
        for number, (v, host, fetches, others) in enumerate(hosted)
    ]
    return Options(sorted(options, key=lambda option: option.rank))


def first_of(options: Options) -> Options:
    """The options with which a model begins that may grow: those with one sequence, all if there is none."""
    return Options([option for option in options if option.sequences == 1]) or options


@dataclass(frozen=True, slots=True)
class Group:
    """The requests that wait for one key, oldest first. `options` are the ways to give them a runner, those of the best
    rank first; it is empty until the estimate is there. `name` is the model's name in messages. A runner
    of a `pinned` group will be pinned. `load_seconds` is how long the last load took, 0 if there was none. `turn` is
    when one of the requests last got a lease, or when their runner was evicted. The key may have `most` runners at once
    and has `least` where there is room; `number` is that of the runner that would start next, or wake. A model that
    begins with one sequence may grow to the options in `wider`."""

    key: RunnerKey
    waiting: tuple[Request, ...]
    options: tuple[RunOption, ...]
    name: str = ""
    pinned: bool = False
    load_seconds: float = 0.0
    turn: float = -math.inf
    least: int = 1
    most: int = 1
    number: int = 0
    wider: tuple[RunOption, ...] = ()

    @property
    def runner(self) -> RunnerId:
        """The runner that would start next, or wake."""
        return RunnerId(self.key, self.number)

    @property
    def since(self) -> float:
        """The time since which the group has waited for a turn. Groups stand in line for memory by this time, so that
        models take turns even if one of them has a long queue."""
        return max(self.waiting[0].since, self.turn)


class Slot(NamedTuple):
    """A runner: that of its key with that `number`. `memory` counts until the process is gone. `leases` requests hold a
    lease of the runner, `interactive` of them not from a batch. `abandoned` are requests whose clients have left while
    the engine works on: they are no leases, and each takes a sequence. `parallel` is the number of the engine's
    sequences, each of which takes one request. No suspect is asked before `suspects_from`: another has its turn.
    `last_used` is when the last lease began or ended, or when the load ended; the load took `load_seconds` and ended at
    `ready_at` (minus infinity before). `option` is the one that runs. `drain` says why the runner takes no new leases,
    `error` how it ended by itself. The first `least` runners of a key stay as long as one of them is used, and a pin
    keeps them. One that `grows` goes once another one of its key answers more requests at once."""

    key: RunnerKey
    phase: Phase
    memory: RequiredMemory
    leases: int = 0
    last_used: float = 0.0
    keep_alive: float = 300.0
    pinned: bool = False
    load_seconds: float = 0.0
    drain: Reason | None = None
    error: BaseException | None = None
    ready_at: float = -math.inf
    option: RunOption = RunOption(RequiredMemory(0))
    interactive: int = 0
    abandoned: int = 0
    parallel: int = 64
    suspects_from: float = -math.inf
    number: int = 0
    least: int = 1
    grows: bool = False

    @property
    def id(self) -> RunnerId:
        return RunnerId(self.key, self.number)

    @property
    def was_ready(self) -> bool:
        return self.ready_at > -math.inf

    @property
    def host(self) -> str:
        """The name of the host that the runner is on."""
        return self.option.place.host

    def on(self, host: str) -> "Slot":
        """The part of the runner on that host, as if it were a runner of its own."""
        place = self.option.place
        if not place.others:
            return self
        number = place.hosts.index(host)
        memory = self.memory.each[number]
        return self._replace(memory=memory, option=self.option._replace(memory=memory, place=place.each[number]))

    @property
    def free(self) -> int:
        """How many more requests the engine can take."""
        return max(0, self.parallel - self.abandoned - self.leases)


@dataclass(frozen=True, slots=True)
class Failure:
    """`count` runners of the key in a row ended by themselves in one place, the last one with `error`. No other is
    started there before `until`; meanwhile requests wait (`waits`) or are refused, if there is no other place. Where
    memory ran out, no rank before `floor` is tried again there, and each counts for more than its estimate."""

    count: int
    until: float
    error: BaseException = field(compare=False)
    waits: bool = False
    floor: int | None = None


Failures = Mapping[tuple[RunnerKey, RunPlace], Failure]


@dataclass(frozen=True, slots=True)
class Policy:
    """`max_wait` is how many seconds a request may wait in all. `patience` in seconds, `loads` and `spare` in multiples
    of load times say when runners go, see `eviction`. A batch whose caller got nothing for `ageing` seconds counts as
    interactive until its next turn."""

    max_wait: float = 600.0
    patience: float = 6.5
    loads: float = 8.0
    spare: float = 1.0
    ageing: float = 60.0
    grow: float = 2.0
    """A model with replicas gets another runner, and one that began with one sequence more of them, once a request has
    waited so many seconds for a place."""


def waits_for_hosts(moved: float, waiting: Sequence[Request], policy: Policy) -> float:
    """See `State.waits_for_hosts`; minus infinity if nobody is `waiting`."""
    oldest = min([request.since for request in waiting], default=-math.inf)
    return min(moved + REJOIN, oldest + policy.max_wait / 2)


@dataclass(frozen=True, slots=True)
class State:
    """Everything that a plan depends on; `slots` are oldest first. `hosts` has the budget of each host that answers: a
    host that is not there gets no runner, and what its runners held counts nowhere. `closing` is true when the daemon
    ends. `paused` has the files (`RunnerKey.files`) whose runners stop and whose requests wait. `served` has the time
    of each line's last turn. `asleep` has, for each runner that can sleep, the memory that counts for it in its other
    condition: asleep if it is awake, awake if it sleeps. `shrunk` are the hosts with a smaller budget than when a
    runner was last started there: other programs have taken memory. A host last came or was lost at `moved`."""

    groups: tuple[Group, ...]
    slots: tuple[Slot, ...]
    hosts: Mapping[str, RequiredMemory]
    failures: Failures = field(default_factory=dict)
    policy: Policy = field(default_factory=Policy)
    closing: bool = False
    paused: frozenset[str] = frozenset()
    served: Mapping[Line, float] = field(default_factory=dict)
    asleep: Mapping[RunnerId, RequiredMemory] = field(default_factory=dict)
    shrunk: frozenset[str] = frozenset()
    moved: float = -math.inf

    def waits_for_hosts(self, group: Group) -> float:
        """The time until which requests that fit on no host wait for others: soon after one came or was lost, and for
        half of the longest wait at most, since in a large cluster some host may come or go all the time."""
        return waits_for_hosts(self.moved, group.waiting, self.policy)


@dataclass(frozen=True, slots=True)
class Grant:
    """Each of `requests` gets a lease of the runner."""

    runner: RunnerId
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """Starts the runner as that `option`, or wakes it if it sleeps. Its memory counts from now; until a
    sleeping one is awake, the larger figure does."""

    runner: RunnerId
    option: RunOption


@dataclass(frozen=True, slots=True)
class Sleep:
    """The runner gives back the memory that it can give without ending. Until it sleeps, the larger figure counts."""

    runner: RunnerId


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the process, at once if no request holds a lease; otherwise the runner takes no new leases, and a later plan
    ends it after the last. `room_for` is the name of the model that needs the memory."""

    runner: RunnerId
    reason: Reason
    room_for: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Forget:
    """Removes the slot of a process that is gone, and remembers `failure` for its key and place."""

    runner: RunnerId
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """Each of `requests` is answered with `error`."""

    key: RunnerKey
    requests: tuple[int, ...]
    error: BaseException = field(compare=False)


@dataclass(frozen=True, slots=True)
class WakeAt:
    """A plan is due at this time even if nothing happens before."""

    time: float


Action = Grant | Start | Sleep | Stop | Forget | Refuse | WakeAt
