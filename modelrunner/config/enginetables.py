"""The `[engines.NAME]` tables of the configuration file: an engine that is a command, or a server elsewhere.
docs/engines.md describes each key."""

import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    model_validator,
)

from modelrunner.config.locations import whole
from modelrunner.engineapi import ApiShape
from modelrunner.errors import BadRequest
from modelrunner.schema import nearest
from modelrunner.units import parse_bytes, parse_duration

PLACES = {
    "host": "the address to listen at",
    "port": "the port to listen at",
    "socket": "the path of the Unix socket to listen at, in place of host and port",
    "key": "a key that each request to the engine at host and port brings; in the environment alone",
    "model": "the file that engines open (the first shard)",
    "folder": "the folder with all files of the model",
    "projector": "the model's projector, for images and sound",
    "name": "the name of the model",
    "context": "the tokens of one sequence",
    "parallel": "how many sequences are worked on at once",
    "threads": "how many processors the daemon may use",
    "device": "the number of the device that has the engine's memory",
    "scratch": "an empty folder that the engine may write in, and that is removed after it",
}
"""The places in a command and its environment, and what they become for a run."""
_PLACE = re.compile(r"\{([a-z]+)\}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _command(words: tuple[str, ...], *more: str) -> tuple[str, ...]:
    if any("{key}" in word for word in words):
        raise ValueError("{key} stands in `environment` alone: everybody may read a program's command line")
    _check_places(words, *PLACES, *more)
    return words


def _check_places(texts: Iterable[str], *known: str) -> None:
    for name in (name for text in texts for name in _PLACE.findall(text)):
        if name not in known:
            raise ValueError(f"there is no place {{{name}}}{nearest(name, known)}; places are {', '.join(known)}")


def _variables(values: dict[str, str]) -> dict[str, str]:
    _check_places(values.values(), *PLACES)
    return values


def _hidden(values: dict[str, str]) -> dict[str, str]:
    return dict.fromkeys(values, "...")


def _model_name(name: str) -> str:
    _check_places([name], "name", "model", "folder")
    return name


def _bytes(value: Any) -> Any:
    try:
        return parse_bytes(value)
    except BadRequest as error:
        raise ValueError(error.message) from None


def _seconds(value: Any) -> Any:
    try:
        return float(value) if type(value) in (int, float) else parse_duration(str(value))
    except BadRequest as error:
        raise ValueError(error.message) from None


def _signal(name: str) -> str:
    if not hasattr(signal, f"SIG{name}"):
        raise ValueError(f"there is no signal {name!r}: write TERM, INT, QUIT or another without SIG")
    return name


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(f"{value!r} is no name: write 1 to 32 of a-z, 0-9, '.', '_' and '-', a letter or digit first")
    return value


def _variable(value: str) -> str:
    if value and not _VARIABLE.fullmatch(value):
        raise ValueError("write the name of a variable of the daemon's environment, and not the key")
    return value


def _path(value: str) -> str:
    if not value.startswith("/") or not value.isascii() or not value.isprintable():
        raise ValueError(f"{value!r} is no path of an engine: it begins with / and is printable ASCII")
    return value


_Word = Annotated[str, Field(min_length=1)]
_Command = Annotated[tuple[_Word, ...], Field(min_length=1), AfterValidator(_command)]
_StopCommand = Annotated[tuple[_Word, ...], AfterValidator(lambda words: _command(words, "id"))]
_Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=0)]
_Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0, allow_inf_nan=False)]
_Folder = Annotated[Path, AfterValidator(whole)]
_Path = Annotated[str, AfterValidator(_path)]
EngineName = Annotated[str, AfterValidator(_name)]


class _EnginePart(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=lambda name: name.replace("_", "-"), populate_by_name=False
    )


class ReadyTable(_EnginePart):
    """When the engine is ready: all that is set must hold."""

    path: _Path | None = None
    """It answers 200 there."""
    line: str = ""
    """Its log has a line with this text."""
    within: _Seconds | None = None
    """Seconds after which the start has failed."""


class StopTable(_EnginePart):
    """How the engine ends."""

    signal: Annotated[str, AfterValidator(_signal)] = "TERM"
    grace: _Seconds | None = None
    command: _StopCommand = ()


class MemoryTable(_EnginePart):
    """The memory of a run: base + factor * size of the model + token * tokens of all sequences."""

    base: _Bytes = 64 << 20
    factor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.2
    token: _Bytes = 0
    device: Annotated[int, Field(ge=0, le=63)] | None = None


class PermissionsTable(_EnginePart):
    """What the engine may do beyond reading its model, each with a reason."""

    network: str = ""
    processes: str = ""
    reads: tuple[_Folder, ...] = ()
    writes: tuple[_Folder, ...] = ()


class EngineModelTable(_EnginePart):
    """A model that the engine manages itself."""

    name: _Word
    capabilities: tuple[EngineName, ...] = ()
    size: _Bytes = 0
    context_size: Annotated[int, Field(ge=1)] | None = None


def _memory(value: Any) -> Any:
    return {"base": value, "factor": 0.0} if isinstance(value, str | int) and not isinstance(value, bool) else value


def _models(value: Any) -> Any:
    return [{"name": one} if isinstance(one, str) else one for one in value] if isinstance(value, list) else value


def _url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or not value.isascii() or not value.isprintable():
        raise ValueError(f"{value[:200]!r} is not the address of a server: write https://HOST[:PORT][/PATH]")
    if parts.username is not None or parts.query or parts.fragment or " " in value:
        raise ValueError("the address has only a host, a port and a path: the key is in the variable of `key-env`")
    if parts.port == 0:  # raises ValueError for what is no port
        raise ValueError("a port is 1 to 65535")
    return value.rstrip("/")


class ServerTable(_EnginePart):
    """An engine that is a server elsewhere."""

    url: Annotated[str, AfterValidator(_url)]
    """The address to which clients of OpenAI's would be set: with `/v1`, or what stands for it; by default `/v1`."""
    key_env: Annotated[str, AfterValidator(_variable)] = ""
    """The variable of the daemon's environment that has the key."""
    api: Literal["openai", "anthropic"] = "openai"
    """The family of the key's header, and of the endpoints."""
    endpoints: dict[_Path, ApiShape] = Field(default_factory=dict)
    """As of a command."""
    ca: _Folder | None = None
    """A file with certificates to trust besides those of this machine."""
    parallel: Annotated[int, Field(ge=1, le=1024)] = 64
    """The most requests to one of its models at once."""


class EngineTable(_EnginePart):
    """One engine that is a command."""

    command: _Command
    environment: Annotated[dict[str, str], AfterValidator(_variables), PlainSerializer(_hidden)] = Field(
        default_factory=dict, repr=False
    )
    """Variables, with places. Their values may be secrets: they are not shown."""
    working_directory: _Folder | None = None
    formats: tuple[EngineName, ...] = ()
    """Formats of models in the store; "gguf" alone where neither formats nor models are given."""
    models: Annotated[tuple[EngineModelTable, ...], BeforeValidator(_models)] = ()
    """Models that the engine manages itself."""
    modes: tuple[EngineName, ...] = ()
    """By default those of the endpoints' shapes. There is a process for each mode of a model; with one mode here, one
    process serves all endpoints."""
    endpoints: dict[_Path, ApiShape] = Field(default_factory=dict)
    """Paths of the engine with their shapes; by default OpenAI's."""
    ready: ReadyTable = ReadyTable(path="/health")
    stop: StopTable = StopTable()
    memory: Annotated[MemoryTable, BeforeValidator(_memory)] = MemoryTable()
    permissions: PermissionsTable = PermissionsTable()
    metrics: _Path | None = None
    settled: _Path | None = None
    model_name: Annotated[str, AfterValidator(_model_name)] = ""
    """The name by which the engine knows its model, with {name}, {model} or {folder}; by default it takes any name."""
    lacks: tuple[Literal["tools", "vision", "audio", "reasoning"], ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> "EngineTable":
        text = " ".join(self.command) + " ".join(self.environment.values())
        if ("{port}" in text) == ("{socket}" in text):
            raise ValueError("the command needs either {port} or {socket}: the engine must listen where it is told")
        if "{key}" in text and "{socket}" in text:
            raise ValueError("{key} is for an engine at {port}: nobody else can reach {socket}")
        if "{device}" in text and self.memory.device is None:
            raise ValueError("the command has {device}: set memory.device, the device whose memory the engine takes")
        if self.models and self.formats:
            raise ValueError("an engine has either formats of models here, or models of its own")
        return self


def _kind(value: Any) -> str:
    return _SERVER if isinstance(value, ServerTable) or (isinstance(value, dict) and "url" in value) else _COMMAND


_SERVER, _COMMAND = "[url]", "[command]"
KINDS = (_SERVER, _COMMAND)
"""What stands after an engine's name in the place of a fault that pydantic tells."""
AnyEngineTable = Annotated[
    Annotated[ServerTable, Tag(_SERVER)] | Annotated[EngineTable, Tag(_COMMAND)], Discriminator(_kind)
]
"""One engine."""


def unknown_key(kind: str, key: str) -> str:
    """Returns what there is to say of a `key` that a table of this kind (`KINDS`) does not have."""
    names = [
        {field.alias or name for name, field in table.model_fields.items()} for table in (ServerTable, EngineTable)
    ]
    mine, others = names if kind == _SERVER else reversed(names)
    if key not in others:
        return f"unknown setting {key!r}{nearest(key, mine)}"
    if kind == _SERVER:
        return (
            f"{key!r} is for an engine that is a command, and `url` names a server elsewhere: take one of the two out"
        )
    return f"{key!r} is for a server elsewhere, which `url` names, and this engine is a command: take it out"
