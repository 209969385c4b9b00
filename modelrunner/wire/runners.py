"""The structs about models in memory: runners, their hosts and events, and requests to load, unload, pin and pause."""

from typing import Any

import msgspec


class Memory(msgspec.Struct, frozen=True):
    """Memory in bytes."""

    ram: int
    vram: list[int] = []


class RunnerMemory(msgspec.Struct, frozen=True):
    estimated: Memory
    measured: Memory | None = None


class SandboxStatus(msgspec.Struct, frozen=True):
    """A runner's sandbox. `state` is on, partial or off. `layers` are the means in force; each of `gaps` describes a
    missing restriction, and the reason."""

    state: str
    layers: list[str]
    gaps: list[str]


class DraftStatus(msgspec.Struct, frozen=True):
    """The tokens that speculative decoding has proposed since the runner's start, and those that the model took."""

    proposed: int
    accepted: int


class TunedText(msgspec.Struct, frozen=True):
    """Tokens per second of a kind of text, without and with a change, and the ratio of both: medians of the rounds."""

    text: str
    plain: float
    changed: float
    ratio: float


class TuningTrial(msgspec.Struct, frozen=True):
    """A change that was measured: drafts, or flags. `kept` says whether it is faster, `fault` why the engine does not
    start with it."""

    what: str
    kept: bool
    texts: list[TunedText]
    fault: str = ""


class Tuning(msgspec.Struct, frozen=True):
    """What was measured for a model on this machine with this version of its engine: n-gram drafts and the `flags` that
    are faster. `reason` is a sentence."""

    drafts: bool
    flags: list[str]
    trials: list[TuningTrial]
    reason: str


class RunnerStatus(msgspec.Struct, frozen=True):
    """An entry of `GET /engines/ps`. It was started for `model_name`; `models` are the names of all that it serves, by
    ID: presets of one model share a runner. `state` is starting, ready, sleeping, draining or stopping. Times are RFC
    3339 in UTC; `variant` says how the runner differs from its configuration, "" if it does not; `host` is the machine
    on which it runs, "" for the daemon's; one that runs over several names all ("b, c"), and its memory is that on the
    first. `drafts` is None for a runner that has drafted nothing, and in lists that are
    sent by themselves (`/engines/now`)."""

    id: str
    backend_name: str
    model_name: str
    model_id: str
    mode: str
    state: str
    stage: str
    pid: int | None
    endpoint: str
    context_size: int
    parallel: int
    memory: RunnerMemory
    leases: int
    queued: int
    started_at: str
    last_used: str | None
    expires_at: str | None
    keep_alive: str
    pinned: bool
    in_use: bool
    loading: bool
    variant: str = ""
    host: str = ""
    sandbox: SandboxStatus | None = None
    models: dict[str, str] = {}
    drafts: DraftStatus | None = None


class Event(msgspec.Struct, frozen=True):
    """An event of `GET /engines/events`: `event` is its name there; `id` increases. `time` is RFC 3339 in UTC; `runner`
    an ID, "" without one; `reason` a sentence."""

    id: int
    event: str
    time: str
    runner: str
    model: str
    reason: str
    details: dict[str, Any] = {}


class WhyResponse(msgspec.Struct, frozen=True):
    """The answer of `GET /engines/why`. `waiting_for` is load, memory, slot, pull, install, backoff, pin, resume or
    None. `position` is the place of this model among those whose requests wait, the oldest first, None if it has none;
    `victims` are the models that are evicted for it; `events` are the last ones about the model and about runners that
    were evicted for it."""

    model: str
    state: str
    position: int | None
    waiting_for: str | None
    needed: Memory | None
    free: Memory
    budget: Memory
    victims: list[str]
    expected_seconds: float | None
    reason: str
    events: list[Event] = []


class ModelName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /engines/preload`, `pin`, `unpin`, `pause` and `resume`."""

    model: str


class ModelState(msgspec.Struct, frozen=True):
    """The answer to a pin, unpin, pause or resume. `state` is that of the model's runner, "stopped" without one;
    `message` is a sentence."""

    model: str
    state: str
    message: str


class UnloadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /engines/unload`."""

    all: bool = False
    backend: str | None = None
    models: list[str] = []
    force: bool = False


class RetainedRunner(msgspec.Struct, frozen=True):
    id: str
    reason: str


class UnloadResponse(msgspec.Struct, frozen=True):
    unloaded_runners: int
    unloaded: list[str]
    kept: list[RetainedRunner]


class HostStatus(msgspec.Struct, frozen=True):
    """A host of the cluster. `state` is joining, ready, draining, silent, gone, or a sentence; `budget` are the bytes
    that our runners there together may hold, null while it does not answer."""

    name: str
    state: str
    address: str
    budget: Memory | None
    devices: list[str]
    models: int
    runners: int


class Hosts(msgspec.Struct, frozen=True):
    """The answer of `GET /hosts`. `problem` says why the cluster cannot be used, "" if it can."""

    hosts: list[HostStatus]
    problem: str


class HostPreloadRequest(msgspec.Struct, frozen=True):
    """The body of `POST /hosts/preload`: a model, and the names of the hosts that get it; none for all."""

    model: str
    hosts: list[str] = []


class HostPreloads(msgspec.Struct, frozen=True):
    """The answer of `POST /hosts/preload`. `problems` has, by host, "" or why it has not got the model."""

    model: str
    problems: dict[str, str]


class DrainRequest(msgspec.Struct, frozen=True):
    """The body of `POST /hosts/NAME/drain`; false uses the host again."""

    drain: bool = True
