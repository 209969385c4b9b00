"""The wire models of the control plane (docs/api.md), shared by server and client. msgspec structs: they check as
they decode, and the command line, which starts in every command, loads them in a few milliseconds."""

from typing import Annotated, Any, Literal

import msgspec


class AppliedAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter. `size` in bytes."""

    name: str
    scale: float
    size: int


class Model(msgspec.Struct, frozen=True, omit_defaults=True):
    """`GET /models`. `created` is Unix seconds; `config` holds format, quantization, parameters, architecture, size
    (as text), context_size (what it was trained for), and the header's metadata under `gguf` or `safetensors`.
    `capabilities` are chat, completion, embedding, reranking, classification, tools, vision, audio, reasoning;
    `context_window` is the tokens that one request may have now; `adapters` are the LoRA adapters that are applied.
    `damage` says why the model cannot be used; its
    `config` is then empty."""

    id: str
    tags: list[str]
    created: int
    config: dict[str, Any]
    damage: str = ""
    capabilities: list[str] = []
    context_window: int | None = None
    adapters: list[AppliedAdapter] = []

    @property
    def name(self) -> str:
        """The first name of the model, or its ID if it has none."""
        return self.tags[0] if self.tags else self.id


_PULL_NAMES = {"from_": "from", "bearer_token": "bearer-token", "trust_remote_code": "trust-remote-code"}
_PULL_NAMES |= {"chat_template": "chat-template"}


class PullRequest(msgspec.Struct, frozen=True, rename=_PULL_NAMES, forbid_unknown_fields=True):
    """`POST /models/create`. `trust_remote_code` takes a model that carries code, code that its engine will run;
    `verify` reads every byte of a model that is here already. `mmproj`, `chat_template` and the LoRA adapters
    `lora` are files that are packaged with a model of this machine: `file:///path`, of an adapter `file:///path:SCALE`
    too."""

    from_: str
    bearer_token: str | None = None
    name: str | None = None
    trust_remote_code: bool = False
    verify: bool = False
    mmproj: str | None = None
    chat_template: str | None = None
    lora: list[str] = []


class PushRequest(msgspec.Struct, frozen=True, rename={"bearer_token": "bearer-token"}, forbid_unknown_fields=True):
    """`POST /models/{ref}/push`. `to` is the name at the registry, by default the model's own."""

    to: str | None = None
    bearer_token: str | None = None


class Layer(msgspec.Struct, frozen=True):
    """Bytes of one file of a pull. `id` is its digest, or its name while the digest is unknown."""

    id: str
    size: int
    current: int


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of NDJSON of a pull, an installation or another long piece of work. `total` in bytes, `rate` in bytes
    per second; the last line is of type success or error. An error carries the `error` object of every other route."""

    type: Literal["progress", "success", "warning", "error"]
    message: str
    total: int = 0
    current: int = 0
    layer: Layer | None = None
    mode: str = ""
    phase: str = ""
    rate: float = 0.0
    error: dict[str, Any] | None = None
    model: str | None = None


class PruneResponse(msgspec.Struct, frozen=True):
    """`POST /models/prune`, `/engines/prune`. Bytes."""

    freed: int


class Memory(msgspec.Struct, frozen=True):
    """Bytes."""

    ram: int
    vram: list[int] = []


class RunnerMemory(msgspec.Struct, frozen=True):
    estimated: Memory
    measured: Memory | None = None


class RunnerStatus(msgspec.Struct, frozen=True):
    """`GET /engines/ps`. `state` is starting, ready, sleeping, draining or stopping. Times are RFC 3339 in UTC;
    `variant` says how the runner differs from what was configured, "" if it does not."""

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


class Event(msgspec.Struct, frozen=True):
    """An event of `GET /engines/events`: `event` is its name there, `id` grows. `time` is RFC 3339 in UTC; `runner` an
    ID, "" without one; `reason` a sentence."""

    id: int
    event: str
    time: str
    runner: str
    model: str
    reason: str
    details: dict[str, Any] = {}


class WhyResponse(msgspec.Struct, frozen=True):
    """`GET /engines/why`. `waiting_for` is load, memory, slot, pull, install, backoff, pin, resume or None. `position`
    counts the models whose requests wait, the oldest first, None if none of this one wait; `victims` are the models
    that are evicted for it; `events` are the last ones about the model and about runners that were evicted for it."""

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


class Disk(msgspec.Struct, frozen=True):
    """Bytes; `needed` is 0 for a model that is here."""

    needed: int
    free: int


class Fit(msgspec.Struct, frozen=True):
    """`GET /models/REF/fit`. `fits` is now, after_eviction, split or never."""

    fits: str
    needed: Memory | None
    free: Memory
    budget: Memory
    would_evict: list[str]
    reason: str
    disk: Disk | None = None


class ModelName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /engines/preload`, `pin`, `unpin`, `pause`, `resume`."""

    model: str


class ModelState(msgspec.Struct, frozen=True):
    """The answer to a pin, unpin, pause or resume. `state` is that of the model's runner, "stopped" without one;
    `message` a sentence."""

    model: str
    state: str
    message: str


class UnloadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /engines/unload`."""

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


class ModelUsage(msgspec.Struct, frozen=True):
    """Bytes; `shared` is the part that other models use too."""

    id: str
    tags: list[str]
    size: int
    shared: int
    reclaimable: int


class BackendUsage(msgspec.Struct, frozen=True):
    """Sizes in bytes; `state` is the backend's saved conversations."""

    name: str
    version: str
    size: int
    state: int = 0


class DiskUsage(msgspec.Struct, frozen=True):
    """`GET /engines/df`: bytes. The totals count shared blobs once."""

    models: list[ModelUsage]
    backends: list[BackendUsage]
    models_disk_usage: int
    default_backend_disk_usage: int
    partial: int


class ConfigureRequest(msgspec.Struct, frozen=True):
    """`POST /engines/[{backend}/]_configure`. Every further field is one of the model's configuration (modelconfig.py):
    a field that is left out keeps its value, null takes it back. With `mode` the change applies to that mode alone,
    else to all."""

    model: str
    mode: Literal["completion", "embedding", "reranking", "image-generation"] | None = None
    apply: Literal["restart"] | None = None


class Configuration(msgspec.Struct, frozen=True):
    """The settings for one mode of a model or, where `mode` is None, for all modes. `file` holds the settings of the
    configuration file; `effective` is how the model is run, with the engine's defaults, None with a `problem` where it
    cannot be run so."""

    model: str
    mode: str | None
    revision: int
    config: dict[str, Any]
    file: dict[str, Any] = {}
    effective: dict[str, Any] | None = None
    problem: str = ""


class ReloadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /engines/reload`. With `dry_run`, only reports the changes."""

    dry_run: bool = False


class Change(msgspec.Struct, frozen=True, rename={"from_": "from"}):
    """A setting that has another value in the configuration file now, as JSON, and the effect of the change."""

    what: str
    from_: str
    to: str
    effect: str


class ReloadResponse(msgspec.Struct, frozen=True):
    dry_run: bool
    changes: list[Change]


class InstallRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /engines/install-backend`, `update-backend`, `uninstall-backend`."""

    backend: str
    build: bool = False


class UntaggedName(msgspec.Struct, frozen=True, rename="pascal"):
    untagged: str


class DeletedModel(msgspec.Struct, frozen=True, rename="pascal"):
    deleted: str


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """`GET /health` and `/ready`. `reason` is set by `/ready` alone: it says why no requests should be sent, or which
    models cannot be loaded while others can."""

    status: Literal["starting", "ready", "busy", "shutting_down", "error"]
    uptime_seconds: float
    active_requests: int
    version: str
    reason: str = ""


class Status(msgspec.Struct, frozen=True):
    """`GET /version`: the values that `modelrunner status` shows."""

    pid: int
    version: str
    socket: str
    listen: str
    data_dir: str
    backends: dict[str, str]
    memory: dict[str, int]


class RequestStatus(msgspec.Struct, frozen=True):
    """`GET /engines/requests`: a request that ended at `time`, or one under way where `status` is 0. Times are in
    seconds since it arrived, `first_byte` is null without an answer; tokens are counted by the engine."""

    id: int
    time: str
    request_id: str
    family: str
    route: str
    status: int
    error: str
    model: str
    model_name: str
    backend: str
    runner: str
    caller: str
    queued: float
    loading: float
    first_byte: float | None
    duration: float
    bytes_in: int
    bytes_out: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tokens_per_second: float | None


class KeyStatus(msgspec.Struct, frozen=True):
    """`GET /keys`: an API key without its text. `models` are patterns, [] for all models; a limit is null without
    one."""

    name: str
    scopes: list[str]
    models: list[str]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrency: int | None
    priority: Literal["normal", "batch"]
    created: str
    expires: str | None
    expired: bool


class KeyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /keys`. `expires` is an age such as `30d`, null for never."""

    name: str
    scopes: list[str] = msgspec.field(default_factory=lambda: ["inference"])
    models: list[str] = []
    requests_per_minute: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tokens_per_minute: Annotated[int, msgspec.Meta(ge=1)] | None = None
    concurrency: Annotated[int, msgspec.Meta(ge=1)] | None = None
    priority: Literal["normal", "batch"] = "normal"
    expires: str | None = None


class KeyCreated(msgspec.Struct, frozen=True):
    """The answer to `POST /keys` and `POST /keys/{name}/rotate`: the only one that has the text."""

    key: KeyStatus
    text: str


class UsageTotals(msgspec.Struct, frozen=True):
    """`GET /usage`: the sums of one day, model or caller. `engine_seconds` is how long engines worked for it."""

    name: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    engine_seconds: float
