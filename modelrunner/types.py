"""The values that pass between the parts: frozen, with no behaviour but their own text form."""

import math
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self
from urllib.parse import urlsplit

from modelrunner.defaults import ModelDefaults
from modelrunner.errors import BadRequest
from modelrunner.sandbox import Permissions, Sandbox
from modelrunner.units import format_bytes, format_duration, parse_duration

if TYPE_CHECKING:
    import ssl

_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


class OpenNames(StrEnum):
    """Names to which a backend may add its own: `Mode("speech")` makes a member, and returns it ever after. Iteration
    yields those of modelrunner."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str) or _NAME.fullmatch(value) is None:
            return None
        member = str.__new__(cls, value)
        member._name_ = member._value_ = value
        return cls._value2member_map_.setdefault(value, member)  # type: ignore[return-value]

    @classmethod
    def known(cls) -> list[Self]:
        """Returns modelrunner's, and those that were added."""
        return list(cls._value2member_map_.values())  # type: ignore[arg-type]


class ModelFormat(OpenNames):
    GGUF = "gguf"
    SAFETENSORS = "safetensors"


DECLARED = ModelFormat("declared")
"""That of a model without files here, which its engine manages itself."""


class Mode(OpenNames):
    """The purpose of a runner. An engine started in one mode does not serve another."""

    COMPLETION = "completion"
    EMBEDDING = "embedding"
    RERANKING = "reranking"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the mode. Raises `BadRequest`, which names the modes, for any other text."""
        if text not in cls.known():
            raise BadRequest(f"there is no mode {text!r}: {', '.join(cls.known())}", param="mode")
        return cls(text)


_HOURS = re.compile(r"([01]\d|2[0-4]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)", re.ASCII)
_DAY = 24 * 60


@dataclass(frozen=True, slots=True)
class Hours:
    """A part of every day, from `begin` until before `end`, in minutes after midnight; over midnight where `end` is
    not the later one. Text: `22:00-07:00`."""

    begin: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `BadRequest`."""
        match = _HOURS.fullmatch(text)
        begin, end = (int(match[i]) * 60 + int(match[i + 1]) for i in (1, 3)) if match else (0, 0)
        if begin == end or max(begin, end) > _DAY:
            raise BadRequest(f"{text!r} are no hours: write HH:MM-HH:MM, such as 07:00-22:30", param="hours")
        return cls(begin, end)

    def hold(self, minute: int) -> bool:
        """Returns True if `minute`, of 0 to 1439, is in these hours."""
        return (minute - self.begin) % _DAY < (self.end - self.begin) % _DAY or abs(self.end - self.begin) == _DAY


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a runner: a Unix socket `path`, or `host` and `port`; and how it is asked there. Raises
    `ValueError` for anything else, and for a header that is no line of HTTP."""

    path: Path | None = None
    host: str | None = None
    port: int | None = None
    tls: "ssl.SSLContext | None" = None
    """Checks the certificate of a runner that is asked over TLS; None for plain HTTP."""
    name: str = "localhost"
    """The Host header of each request; without a port, it is the name in the certificate."""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Further headers of each request, such as `Authorization` with the key of the runner."""
    base: str = "/v1"
    """What stands for `/v1` at the beginning of each path."""
    refuses: "Callable[[str], str] | None" = field(default=None, repr=False)
    """Returns why the address to which a connection has led may not be asked, "" if it may. None: any may."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.host is None) or (self.host is None) != (self.port is None):
            raise ValueError("an endpoint is a path, or a host and a port")
        if not all(text.isascii() and text.isprintable() for pair in (("", self.name), *self.headers) for text in pair):
            raise ValueError("a header of an endpoint has other characters than printable ASCII")

    def __str__(self) -> str:
        scheme = "http" if self.tls is None else "https"
        return f"unix://{self.path}" if self.path else f"{scheme}://{self.host}:{self.port}"

    @property
    def key(self) -> str:
        """The key in `headers`, "" without one."""
        return dict(self.headers).get("Authorization", "").removeprefix("Bearer ")

    @property
    def tls_name(self) -> str | None:
        """The name in the certificate; None without TLS."""
        return urlsplit(f"//{self.name}").hostname if self.tls is not None else None

    @property
    def preamble(self) -> str:
        """The header lines that each request to the runner begins with."""
        return "".join([f"{name}: {value}\r\n" for name, value in (("Host", self.name), *self.headers)])


_CENTURY = 100 * 365 * 86400.0  # seconds: later moments cannot be shown as a date


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """The time that an unleased runner stays, in seconds; `math.inf` keeps it for as long as there is room, 0 unloads
    it after the request. Text: a Go duration; `-1` (any negative) means never, as for Ollama and
    docker/model-runner."""

    seconds: float

    @classmethod
    def parse(cls, value: str | int | float) -> Self:
        """Parses a Go duration, or a number of seconds (a JSON number); a century or more means never. Raises
        `BadRequest`."""
        match value:
            case bool():
                raise BadRequest(
                    "keep_alive must be a duration or a number of seconds, not a boolean", param="keep_alive"
                )
            case int() | float():
                seconds = float(max(min(value, _CENTURY), -1))  # a float cannot hold every number
            case str() if value.strip().startswith("-") and value.strip()[1:].isdecimal():
                seconds = -1.0
            case str():
                seconds = _duration(value)
            case _:
                raise BadRequest("keep_alive must be a duration or a number of seconds", param="keep_alive")
        if math.isnan(seconds):
            raise BadRequest("keep_alive is not a number", param="keep_alive")
        return cls(seconds if 0 <= seconds < _CENTURY else math.inf)

    def __str__(self) -> str:
        return "-1" if math.isinf(self.seconds) else format_duration(self.seconds)


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except BadRequest:
        raise BadRequest(
            f'{text!r} is not a keep-alive: write a duration such as "90s", "5m" or "1h30m", 0 for not at all, or -1 '
            "for as long as there is room",
            param="keep_alive",
        ) from None


class RequestLimits(NamedTuple):
    """The limits of one request: `seconds` of its engine's work, `tokens` that the engine generates; None for no
    limit."""

    seconds: float | None = None
    tokens: int | None = None

    @classmethod
    def of(cls, seconds: float | None, tokens: int | None) -> "RequestLimits":
        """Returns the limits; without limits it is `NO_LIMITS` itself."""
        return NO_LIMITS if seconds is None and tokens is None else cls(seconds, tokens)

    def least(self, other: "RequestLimits") -> "RequestLimits":
        """Returns the smaller of each."""
        if self is NO_LIMITS or other is NO_LIMITS:
            return other if self is NO_LIMITS else self
        seconds = [one for one in (self.seconds, other.seconds) if one is not None]
        tokens = [one for one in (self.tokens, other.tokens) if one is not None]
        return RequestLimits(min(seconds, default=None), min(tokens, default=None))


NO_LIMITS = RequestLimits()


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server of tools: a `command` that communicates over its stdin and stdout, with variables added to a scrubbed
    environment, or a `url` that is asked with `headers`."""

    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequiredMemory:
    """Bytes that a runner needs: main memory, and each device's memory in the engine's order. `shared` is the part of
    `ram` that is mapped model files, which all runners of one model share. `others` is what it needs on each further
    host, if it runs over several."""

    ram: int
    vram: tuple[int, ...] = ()
    shared: int = 0
    others: tuple["RequiredMemory", ...] = ()

    @property
    def devices(self) -> tuple[int, ...]:
        """The numbers of the devices on which there is something, in order."""
        return tuple([number for number, size in enumerate(self.vram) if size])

    @property
    def total(self) -> int:
        """The bytes of main memory and of all devices together, on all hosts."""
        return self.ram + sum(self.vram) + sum([other.total for other in self.others])

    @property
    def each(self) -> tuple["RequiredMemory", ...]:
        """The bytes on each host, first on the one where the engine runs."""
        return (replace(self, others=()), *self.others) if self.others else (self,)

    def __add__(self, other: "RequiredMemory") -> "RequiredMemory":
        vram = tuple([a + b for a, b in zip_longest(self.vram, other.vram, fillvalue=0)])
        others = self.others or other.others
        if self.others and other.others:
            others = tuple([a + b for a, b in zip(self.others, other.others, strict=True)])
        return RequiredMemory(self.ram + other.ram, vram, self.shared + other.shared, others)

    def most(self, other: "RequiredMemory") -> "RequiredMemory":
        """Returns the larger value of each figure."""
        vram = tuple(map(max, zip_longest(self.vram, other.vram, fillvalue=0)))
        others = self.others or other.others
        if self.others and other.others:
            others = tuple([a.most(b) for a, b in zip(self.others, other.others, strict=True)])
        return RequiredMemory(max(self.ram, other.ram), vram, max(self.shared, other.shared), others)

    def fits(self, free: "RequiredMemory") -> bool:
        """Returns True if no figure exceeds that of `free`; a device that `free` does not list has no memory."""
        return self.ram <= free.ram and all(
            need <= (free.vram[i] if i < len(free.vram) else 0) for i, need in enumerate(self.vram)
        )

    def __str__(self) -> str:
        own = ", ".join([format_bytes(self.ram), *(f"device {i} {format_bytes(v)}" for i, v in enumerate(self.vram))])
        return " and on another host ".join([own, *map(str, self.others)])


@dataclass(frozen=True, slots=True)
class EngineDevice:
    """A device as an engine lists it."""

    #: The engine's own name: CUDA0, Vulkan1.
    name: str
    #: The name of the product.
    description: str
    #: Bytes.
    total: int
    #: Bytes.
    free: int
    #: The PCI address or UUID of the card, "" if the engine does not say.
    address: str = ""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a model file's tensor table. `size` in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int


@dataclass(frozen=True, slots=True)
class ModelHeader:
    """The metadata of a model file. `metadata` holds scalars and short arrays (at most 4,096 entries); a longer array
    appears as its length under the key `NAME.length`. `tensors` are those of all files of the model together."""

    metadata: Mapping[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


CAPABILITIES = (
    "chat",
    "completion",
    "embedding",
    "reranking",
    "classification",
    "tools",
    "vision",
    "audio",
    "reasoning",
)
"""The capabilities of a model that modelrunner knows, in the order in which they are shown; a format of a backend may
have others. A generative model has "completion", with
a chat template "chat" too; "tools" and "reasoning" come from its template; "vision" and "audio" are its inputs."""


@lru_cache(maxsize=256)
def in_order(capabilities: frozenset[str]) -> tuple[str, ...]:
    """Returns the capabilities in the order in which they are shown."""
    return (*filter(capabilities.__contains__, CAPABILITIES), *sorted(capabilities.difference(CAPABILITIES)))


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: a GGUF file, or a folder as PEFT writes it. Its weights count `scale` times; `size` in bytes."""

    name: str
    path: Path
    scale: float
    size: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """A model laid out for an engine to open. `files` maps a name inside the bundle (`model.gguf`, `mmproj.gguf`,
    `config.json`) to its path; `directory` holds them all, except a `chat_template.jinja` from the configuration.
    `size` is bytes on disk; `context_length` is the number of tokens that the model was trained for, None if unknown.
    `capabilities` are some of `CAPABILITIES`, empty for a model that says nothing about itself. `brings_code` is True
    if an engine would have to run code of the model's own (`*.py`, `auto_map`). Such a model is in the store only if
    its owner trusted its code. `adapters` are those that were packaged with the model, or that its configuration names
    instead. `defaults` are for requests that leave them out."""

    model_id: str
    references: tuple[str, ...]
    format: ModelFormat
    directory: Path
    files: Mapping[str, Path]
    header: ModelHeader
    size: int
    context_length: int | None
    capabilities: frozenset[str]
    brings_code: bool = False
    adapters: tuple[Adapter, ...] = ()
    defaults: ModelDefaults | None = None
    digest: str = ""
    """Stands for the names and the contents of the files: models with equal ones, and another configuration, are
    presets of each other. "" for files that are not in the store."""

    @property
    def files_id(self) -> str:
        """What presets of each other have in common; the model's ID if there is no digest."""
        return self.digest or self.model_id

    @property
    def name(self) -> str:
        """The name to show: the model's first reference, else its ID."""
        return self.references[0] if self.references else self.model_id

    @property
    def model_file(self) -> Path:
        """The file (or first shard) that an engine for single-file formats opens."""
        return next(iter(self.files.values()))

    @property
    def paths(self) -> tuple[Path, ...]:
        """Everything that an engine opens, links and their targets: folders with everything below, and files."""
        if self.format is DECLARED:
            return ()
        named = (self.directory, *self.files.values(), *(adapter.path for adapter in self.adapters))
        return tuple(dict.fromkeys((*named, *(path.resolve() for path in named))))


class ProcessObserver(Protocol):
    """Receives the events of an engine's process, in the event loop's thread."""

    def started(self, pid: int, sandbox: Sandbox) -> None: ...

    def output(self, line: str) -> None:
        """Receives one line of the log, without the newline but with control characters."""


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Options of a child process. A runner passes them through the backend, unchanged, to
    `modelrunner.processes.process.run`. `stop_grace` is the seconds between `stop_signal` and KILL. `permissions` are
    those that its host gives the run (its model, its endpoint); None: the process is not confined."""

    log_path: Path
    observer: ProcessObserver | None = None
    stop_grace: float = 10.0
    stop_signal: int = signal.SIGTERM
    log_limit: int = 8 << 20
    permissions: Permissions | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """What a host adds to a run to start its process. It holds on that host alone."""

    endpoint: Endpoint
    """Where the engine has to listen."""
    process: ProcessOptions
    """The log, the observer, the permissions and the grace of the child process."""


@dataclass(frozen=True, slots=True)
class QuantizeSpec:
    """One quantization: the weights of `bundle`, in the `type` (Q4_K_M), become the file `target`. That file is not
    there yet, and nothing else writes into its folder. `process` is as of a run."""

    bundle: Bundle
    target: Path
    type: str
    process: ProcessOptions


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run: which model, and how. The values mean the same on every host, and a bundle is what one host has of a
    model (`RunSpecs.opened`). What a start needs besides is in its `Launch`.

    `context_size` is the tokens that one sequence may use, prompt and answer together; `parallel` sequences are worked
    on at once, and what one may use never depends on the others. `flags` were checked by `TakesFlags.check_flags`.
    `options` are the model's backend-specific settings, already validated. `environment` is added to the scrubbed
    environment that the backend gives its engine. `gpu_layers` is how many layers go to devices, None for as many as
    fit. `min_context_size`, if set, allows less context than was asked for where memory is short, down to this many
    tokens. With `draft`, a small model of the same vocabulary, up to `draft_tokens` tokens are proposed at once, each
    with at least the probability `draft_acceptance` (0 to 1); with `ngram`, so many that followed the same tokens
    before; with `mtp`, those of the model's own heads that predict further tokens. None for the engine's own figures.
    """

    model_id: str
    bundle: Bundle
    mode: Mode
    context_size: int
    parallel: int
    flags: tuple[str, ...] = ()
    draft: Bundle | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    gpu_layers: int | None = None
    min_context_size: int | None = None
    ngram: bool = False
    mtp: bool = False
    draft_tokens: int | None = None
    draft_acceptance: float | None = None
    template: str | None = None
    """The chat template of the configuration, in place of the model's own."""
    lora: tuple[str, ...] | None = None
    """The adapters of the configuration (`PATH[:SCALE]`), in place of the model's own."""
    grows: bool = False
    """True if nobody chose `parallel`: an engine with variants of one sequence and of more begins with one, and gets
    more when requests wait for it."""


RAY_GROUP = "MODELRUNNER_RAY_GROUP"
"""The variable, in the environment of a run over several hosts, with the ID of Ray's placement group for its workers: a
bundle for each device, of those on the engine's own host first."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a model in one place, which is the set of devices that its memory names."""

    spec: RunSpec
    """The run, with the flags and the environment that put it there."""
    memory: RequiredMemory
    """The bytes that it needs, on each device and in main memory."""
    label: str = ""
    """How it differs from the configured way in a few words ("20 of 32 layers on the GPU", "2 of 4 sequences", "context
    4096 of 8192"), "" where it does not."""
    rank: int = 0
    """Variants of one rank are the same run in other places. A higher rank is a smaller run. The first is 0."""
    hosts: int = 1
    """How many hosts share the run. With more than one, `memory` is what it needs where the engine itself runs."""
    part: RequiredMemory = RequiredMemory(0)
    """What the run needs on this host if the engine runs on another of the `hosts`: on as many devices."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """The runner of a request, as its record names it: the name of its `model`, the `backend`, and the `runner`'s ID;
    "" without one. Each runner has one object."""

    model: str = ""
    backend: str = ""
    runner: str = ""


class RunnerKey(NamedTuple):
    """The identity of a runner: requests with equal keys share one. `files` is `Bundle.files_id`, and `revision` stands
    for all else that the engine is started with (context, flags, draft). What is applied to each request is no part of
    it, so presets of one model share a runner. A tuple, because every request looks its runner up by it, and a tuple's
    hash costs a tenth of a dataclass's."""

    backend: str
    files: str
    mode: Mode
    revision: int = 0

    def __str__(self) -> str:
        return f"{self.backend}/{self.files[:19]}/{self.mode}#{self.revision:x}"
