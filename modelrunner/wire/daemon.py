"""The structs about the daemon: configurations, engines, health, keys, tools, recent requests and usage."""

from typing import Annotated, Any, Literal

import msgspec

from modelrunner.wire.models import PullStatus
from modelrunner.wire.runners import Memory, RunnerStatus


class ConfigureRequest(msgspec.Struct, frozen=True):
    """`POST /engines/[{backend}/]_configure`. Every further field is one of the model's configuration (modelconfig.py):
    a field that is left out keeps its value, null resets it. With `mode` (completion, embedding, reranking, or one that
    a backend brings) the change applies to that mode alone, else to all modes."""

    model: str
    mode: str | None = None
    apply: Literal["restart"] | None = None


class Configuration(msgspec.Struct, frozen=True):
    """The settings for one mode of a model, or for all modes if `mode` is None. `file` holds the settings of the
    configuration file; `effective` has the values in force, with the engine's defaults; it is None if a `problem` keeps
    the model from running. `alias` is the name that was asked, if it is an alias of the model."""

    model: str
    mode: str | None
    revision: int
    config: dict[str, Any]
    file: dict[str, Any] = {}
    effective: dict[str, Any] | None = None
    problem: str = ""
    alias: str = ""


class ReloadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /engines/reload`. With `dry_run`, only reports the changes."""

    dry_run: bool = False


class Change(msgspec.Struct, frozen=True, rename={"from_": "from"}):
    """A setting with a new value in the configuration file, as JSON, and the effect of the change."""

    what: str
    from_: str
    to: str
    effect: str


class ReloadResponse(msgspec.Struct, frozen=True):
    dry_run: bool
    changes: list[Change]


class Setting(msgspec.Struct, frozen=True):
    """`GET /engines/settings`: a setting of the daemon. `value` is a text as the file or the environment has it, ""
    for the default; `source` is "default", a variable, or a line of the file."""

    name: str
    value: str
    source: str


class SettingsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /engines/settings`: texts by the names of settings, "" for the default."""

    values: Annotated[dict[str, Annotated[str, msgspec.Meta(max_length=100)]], msgspec.Meta(max_length=100)]


class InstallRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /engines/install-backend`, `update-backend` and `uninstall-backend`. `variant` is
    what the engine computes with, "" for the backend's own choice."""

    backend: str
    build: bool = False
    variant: str = ""


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of `GET /health` and `/ready`. Only `/ready` sets `reason`: it says why no requests should be sent, or
    which models cannot be loaded while others can."""

    status: Literal["starting", "ready", "busy", "shutting_down", "error"]
    uptime_seconds: float
    active_requests: int
    version: str
    reason: str = ""


class DeviceStatus(msgspec.Struct, frozen=True):
    """A device of this machine. `total` and `free` are bytes, `others` those that other programs hold, and `budget`
    those that our runners together may hold. `engines` says what each engine calls it. `utilization` (percent) and
    `temperature` (degrees Celsius) are null where the driver does not say. A device with a `fault` is not used. Where
    the driver `hides_processes`, what a runner was measured to hold is by how much its load made `free` smaller."""

    name: str
    address: str
    total: int
    free: int
    others: int
    budget: int
    engines: dict[str, str]
    utilization: int | None
    temperature: int | None
    fault: str
    hides_processes: bool = False


class Status(msgspec.Struct, frozen=True):
    """The answer of `GET /version`: the values that `modelrunner status` shows. `sandbox` is the machine's means for
    it, "off" if the settings say so; `sandboxes` describe the sandbox of each runner, by its ID. `model_dirs` has a
    text for each folder: "", or why it cannot be used. A device's place in `devices` is its number. `cluster` says why
    the cluster cannot be used, "" if it can or there is none; `hosts` has the state of each of its hosts."""

    pid: int
    version: str
    socket: str
    listen: str
    data_dir: str
    backends: dict[str, str]
    memory: dict[str, int]
    sandbox: str = ""
    sandboxes: dict[str, str] = {}
    model_dirs: dict[str, str] = {}
    devices: list[DeviceStatus] = []
    cluster: str = ""
    hosts: dict[str, str] = {}


class RequestStatus(msgspec.Struct, frozen=True):
    """`GET /engines/requests`: a request that ended at `time`, or one under way where `status` is 0. Times are in
    seconds since it arrived, `first_byte` is null without an answer; tokens are counted by the engine. `peer` is the
    client's address, "" on the Unix socket."""

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
    key: str
    peer: str
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


class HistoryStep(msgspec.Struct, frozen=True):
    """`GET /engines/history`: the requests that ended in the ten seconds from `time` on, in Unix seconds. `failed`
    counts answers with a status of 400 or more, and those that broke off; latencies are in seconds, null where no
    request was answered."""

    time: int
    requests: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    first_byte_p50: float | None
    first_byte_p95: float | None
    duration_p50: float | None
    duration_p95: float | None


class MachineStep(msgspec.Struct, frozen=True):
    """The machine at `time`, in Unix seconds: the percentage of the processor that was busy in the ten seconds before,
    the bytes in use of the main memory and of each device, and the percentage of each device that is busy, null where
    its driver does not say."""

    time: int
    processor: float
    memory: list[int]
    busy: list[int | None]


class MachineHour(msgspec.Struct, frozen=True):
    """`GET /engines/machine`: the last hour of this machine, the oldest step first. `devices` are names; `totals` are
    bytes of the main memory and of each device."""

    devices: list[str]
    totals: list[int]
    steps: list[MachineStep]


class RecordedText(msgspec.Struct, frozen=True):
    """The start of a body of `size` bytes, which may be `whole`. `redacted` counts the removed parts: keys and
    files."""

    text: str
    size: int
    whole: bool
    redacted: int


class RecordedRequest(msgspec.Struct, frozen=True):
    """The answer of `GET /engines/requests/ID`: a request to a recorded model; `path` is that of its URL."""

    request: RequestStatus
    path: str
    body: RecordedText
    answer: RecordedText


class KeyStatus(msgspec.Struct, frozen=True):
    """`GET /keys`: an API key without its text. `models` are patterns, [] for all models; a limit is null without
    one."""

    name: str
    scopes: list[str]
    models: list[str]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrency: int | None
    max_tokens: int | None
    max_seconds: float | None
    priority: Literal["normal", "batch"]
    created: str
    expires: str | None
    expired: bool


class KeyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /keys`. `expires` is an age such as `30d`, null for never. `max_tokens` and `max_seconds` limit what one
    request may generate, and how long its engine works on it."""

    name: str
    scopes: Annotated[list[str], msgspec.Meta(min_length=1)] = msgspec.field(default_factory=lambda: ["inference"])
    models: list[Annotated[str, msgspec.Meta(min_length=1)]] = []
    requests_per_minute: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tokens_per_minute: Annotated[int, msgspec.Meta(ge=1)] | None = None
    concurrency: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None
    priority: Literal["normal", "batch"] = "normal"
    expires: str | None = None


class KeyCreated(msgspec.Struct, frozen=True):
    """The answer to `POST /keys` and `POST /keys/{name}/rotate`: no other answer has the text."""

    key: KeyStatus
    text: str


class UsageTotals(msgspec.Struct, frozen=True):
    """An entry of `GET /usage`: the sums of one day, model or caller. `engine_seconds` is the time that engines worked
    for it."""

    name: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    engine_seconds: float


class Message(msgspec.Struct, frozen=True):
    """A sentence about the result of a call."""

    message: str


class KeyRevoked(msgspec.Struct, frozen=True):
    revoked: str


class Cancelled(msgspec.Struct, frozen=True):
    """The ID of the request that was cancelled."""

    cancelled: str


class ToolStatus(msgspec.Struct, frozen=True):
    """A tool of the MCP server `server`, under its name here; `parameters` is a JSON schema."""

    name: str
    server: str
    description: str
    parameters: dict[str, Any]
    type: Literal["function"] = "function"


class ToolList(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/tools`; `errors` has a reason for each server that could not be asked."""

    data: list[ToolStatus]
    errors: dict[str, str]
    object: Literal["list"] = "list"


class ToolCallRequest(msgspec.Struct, frozen=True):
    """The body of `POST /v1/tools/execute`."""

    name: str
    arguments: dict[str, Any] = {}


class ToolAnswer(msgspec.Struct, frozen=True):
    """The result of a call: MCP's blocks, and their texts in one. `is_error` is the tool's own report."""

    name: str
    text: str
    content: list[dict[str, Any]]
    structured_content: Any
    is_error: bool
    object: Literal["tool.result"] = "tool.result"


class Now(msgspec.Struct, frozen=True):
    """The answer of `GET /engines/now`. `status` is that of `/health`; `free` is the unused budget; `waiting` counts
    the requests that wait for a runner, by model, `paused` the IDs of models; `requests` are the oldest of the
    `running` ones under way; `counted` is false where requests that ended are not kept; `pulls` are those of
    `GET /pulls`; `devices` have the order of the figures of `budget`."""

    status: str
    budget: Memory
    free: Memory
    runners: list[RunnerStatus]
    waiting: dict[str, int]
    paused: list[str]
    running: int
    requests: list[RequestStatus]
    counted: bool
    pulls: list[PullStatus] = []
    devices: list[DeviceStatus] = []
