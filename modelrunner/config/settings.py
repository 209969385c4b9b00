"""The daemon's settings: one frozen value, built once. The command line wins over MODELRUNNER_* variables, these win
over config.toml, and this over the defaults."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from modelrunner.aliases import Alias, AliasPolicy
from modelrunner.config.enginetables import KINDS, AnyEngineTable, EngineName, unknown_key
from modelrunner.config.locations import (
    SOCKET_NAME,
    ConfigFile,
    ConfigurationError,
    Locations,
    expanded,
    first_private,
    whole,
)
from modelrunner.config.modelconfig import NOTHING_SET, ModelConfiguration
from modelrunner.config.registrytables import RegistryHost, RegistryTable
from modelrunner.errors import BadRequest
from modelrunner.schema import nearest, said_of
from modelrunner.types import Hours, KeepAlive, McpServer
from modelrunner.units import parse_age, parse_bytes, parse_duration


def _by(parse: Callable[[Any], Any]) -> BeforeValidator:
    def convert(value: Any) -> Any:
        try:
            return parse(value)
        except BadRequest as error:
            raise ValueError(error.message) from None
        except OverflowError:
            raise ValueError("the number is too large") from None

    return BeforeValidator(convert)


def _number(value: Any) -> Any:
    """Reads digits alone as seconds, since a variable is always text."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value


def _seconds(value: Any) -> float:
    value = _number(value)
    return (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else parse_duration(str(value))
    )


def _age(value: Any) -> float:
    """Reads a duration as `_seconds` does, and also days and weeks."""
    return parse_age(value) if isinstance(value, str) and not value.isdecimal() else _seconds(value)


def _keep_alive(value: Any) -> KeepAlive:
    return value if isinstance(value, KeepAlive) else KeepAlive.parse(_number(value))


def _list(value: Any) -> Any:
    """Reads a list; in a variable, commas separate its words."""
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


Bytes = Annotated[int, _by(parse_bytes)]
Seconds = Annotated[float, _by(_seconds), Field(ge=0, allow_inf_nan=False)]
Age = Annotated[float, _by(_age), Field(allow_inf_nan=False)]
KeepAliveSetting = Annotated[KeepAlive, _by(_keep_alive)]
Words = Annotated[tuple[str, ...], BeforeValidator(_list)]


def _model(value: Any) -> ModelConfiguration:
    """Reads a `[models."REF"]` table: the field names of `_configure`."""
    if isinstance(value, ModelConfiguration):
        return value
    if not isinstance(value, dict):
        raise PydanticCustomError("model_table", "the value must be a table of settings")
    try:
        return ModelConfiguration.of(value)
    except BadRequest as error:
        raise PydanticCustomError("model_table", "{said}", {"said": error.message, "param": error.param}) from None


_SERVER_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
_FAMILIES = ("openai", "anthropic", "ollama", "cohere")


def _alias(value: Any) -> Alias:
    """Reads a model, a list of models, or a table."""
    if isinstance(value, Alias):
        return value
    table = value if isinstance(value, dict) else {"models": value}
    for name in table:
        if name not in ("models", "policy", "families"):
            raise ValueError(f"unknown key {name!r}: an alias has models, policy and families")
    models, policy, families = table.get("models"), table.get("policy", AliasPolicy.FIRST), table.get("families", [])
    models = [models] if isinstance(models, str) else models
    if not isinstance(models, list) or not models or not all(isinstance(one, str) and one for one in models):
        raise ValueError("an alias needs a model, or a list of models")
    if policy not in list(AliasPolicy):
        raise ValueError(f"policy must be one of {', '.join(AliasPolicy)}, not {policy!r}")
    if not isinstance(families, list) or not all(name in _FAMILIES for name in families):
        raise ValueError(f"families must be some of {', '.join(_FAMILIES)}")
    return Alias(tuple(models), AliasPolicy(policy), frozenset(families))


def _mcp_server(value: Any) -> McpServer:
    if isinstance(value, McpServer):
        return value
    if not isinstance(value, dict):
        raise ValueError("an MCP server must be a table with a command or a url")
    for name in value:
        if name not in ("command", "env", "url", "headers"):
            raise ValueError(f"unknown key {name!r}: an MCP server has command and env, or url and headers")
    command, url = value.get("command", []), value.get("url", "")
    command = [command] if isinstance(command, str) else command
    if not isinstance(command, list) or not all(isinstance(word, str) and word for word in command):
        raise ValueError("command must be a list of a program and its arguments")
    if (
        not isinstance(url, str)
        or bool(command) == bool(url)
        or not (command or url.startswith(("http://", "https://")))
    ):
        raise ValueError("an MCP server needs either a command, or a url that begins with http:// or https://")
    for name in ("env", "headers"):
        table = value.get(name, {})
        if not isinstance(table, dict) or not all(isinstance(text, str) for text in table.values()):
            raise ValueError(f"{name} must be a table of texts")
    return McpServer(tuple(command), value.get("env", {}), url, value.get("headers", {}))


def _server_names(value: Mapping[str, McpServer]) -> Mapping[str, McpServer]:
    for name in value:
        if not _SERVER_NAME.fullmatch(name) or "__" in name:
            raise ValueError(f"the name {name!r} of an MCP server may only have letters, digits, _ and -")
    return value


def _origin(value: str) -> str:
    if value not in ("*", "null", "local") and "://" not in value:
        raise ValueError(
            f"{value!r} is not an origin: write SCHEME://HOST[:PORT] such as http://localhost:*, local, null, or *"
        )
    return value


Origins = Annotated[tuple[Annotated[str, AfterValidator(_origin)], ...], BeforeValidator(_list)]
AliasTable = Annotated[Alias, BeforeValidator(_alias)]
McpTable = Annotated[McpServer, BeforeValidator(_mcp_server)]
ModelTable = Annotated[ModelConfiguration, BeforeValidator(_model)]


FilePath = Annotated[Path, AfterValidator(expanded)]
FolderPaths = Annotated[tuple[Annotated[Path, AfterValidator(whole)], ...], BeforeValidator(_list)]


def _hours(value: str) -> str:
    Hours.parse(value)
    return value


class GroupTable(BaseModel):
    """A table `[groups.NAME]`: `models` that are loaded together. The rest are settings of each model, which its own
    table overrides."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    pin: StrictBool | None = None
    preload: StrictBool | None = None
    hours: Annotated[str, _by(_hours)] | None = None


def _apart(value: Mapping[str, GroupTable]) -> Mapping[str, GroupTable]:
    seen: dict[str, str] = {}
    for name, group in value.items():
        for model in group.models:
            if seen.setdefault(model, name) != name:
                raise ValueError(f"{model} is in the groups {seen[model]} and {name}: a model can be in one")
    return value


class ClusterTable(BaseModel):
    """The table `[cluster]`; docs/cluster.md describes each key. `ray_address` is `HOST:PORT` of a Ray cluster, or
    `auto`; nodes must have the `label`, `NAME=VALUE`, "" for all nodes. With `shared` they see the models at the same
    path."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ray_address: Annotated[str, Field(pattern=r"^(auto|[A-Za-z0-9.-]+:[0-9]{1,5}|)$")] = ""
    label: Annotated[str, Field(pattern=r"^([A-Za-z0-9._/-]+=[A-Za-z0-9._-]*|)$")] = ""
    shared: bool = False


class Settings(BaseModel):
    """docs/configuration.md describes each setting. Sizes are in bytes, times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    data_dir: Path
    cache_dir: Path
    runtime_dir: Path
    config: Path
    listen: str = "127.0.0.1:12434"
    socket: Path
    tls: Literal["off", "self-signed"] = "off"
    tls_certificate: FilePath | None = None
    tls_key: FilePath | None = None
    origins: Origins = ()
    hosts: Words = ()
    memory_budget: Annotated[Bytes, Field(gt=0)] | None = None
    memory_reserve: Bytes | None = None
    model_dirs: FolderPaths = ()
    models_quota: Annotated[Bytes, Field(gt=0)] | None = None
    verify_every: Annotated[Age, Field(gt=0)] | None = None
    download_rate: Annotated[Bytes, Field(ge=1 << 16)] | None = None
    keep_alive: KeepAliveSetting = KeepAlive(300.0)
    max_queue: int = Field(default=512, ge=1)
    max_wait: Seconds = 600.0
    max_seconds: Annotated[Seconds, Field(gt=0)] | None = None
    address_requests_per_minute: int | None = Field(default=None, ge=1)
    address_tokens_per_minute: int | None = Field(default=None, ge=1)
    address_concurrency: int | None = Field(default=None, ge=1)
    body_limit: Bytes = 32 << 20
    total_body_limit: Bytes = 512 << 20
    upload_limit: Bytes = 256 << 20
    stop_grace: Seconds = 10.0
    stall_limit: Seconds = 300.0
    wedge_limit: Seconds = 60.0
    drain_limit: Seconds = 30.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _by(lambda v: str(v).lower())] = "info"
    files_limit: Annotated[Bytes, Field(gt=0)] = 16 << 30
    responses_limit: int = Field(default=1000, ge=1)
    responses_age: Seconds = 30 * 86400.0
    telemetry: bool = False
    access_log: Literal["off", "text", "json"] = "off"
    sandbox: Literal["on", "off"] = "on"
    recording_memory: Bytes = 16 << 20
    recording_limit: Bytes = 64 << 10
    response_cache: Bytes = 0
    response_cache_age: Seconds = 3600.0
    embedding_window: Seconds = 0.0
    embedding_batch: int = Field(default=32, ge=2)
    streams_memory: Bytes = 64 << 20
    streams_age: Seconds = 60.0
    llama_server: FilePath | None = None
    mcp: Annotated[Mapping[str, McpTable], AfterValidator(_server_names)] = Field(default_factory=dict)
    tools_time: Seconds = 120.0
    registries: Mapping[RegistryHost, RegistryTable] = Field(default_factory=dict)
    models: Mapping[str, ModelTable] = Field(default_factory=dict)
    groups: Annotated[Mapping[str, GroupTable], AfterValidator(_apart)] = Field(default_factory=dict)
    aliases: Mapping[str, AliasTable] = Field(default_factory=dict)
    backends: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)
    engines: Mapping[EngineName, AnyEngineTable] = Field(default_factory=dict)
    cluster: ClusterTable = ClusterTable()

    _origin: tuple[Locations, ConfigFile, Mapping[str, Any]] = PrivateAttr()

    @classmethod
    def load(cls, locations: Locations, **overrides: Any) -> "Settings":
        """Reads the file and the environment; `overrides`, from the command line, win. Raises a `ConfigurationError`
        that names each bad setting and its place."""
        file = ConfigFile.read(locations.config_file)
        places = {
            "data_dir": locations.data,
            "cache_dir": locations.cache,
            "runtime_dir": locations.runtime,
            "config": locations.config_file,
            "socket": locations.socket,
        }
        chosen = {name: value for name, value in overrides.items() if value is not None}
        table = {
            name: value for name, value in file.table.items() if name != "host"
        }  # `host` is a setting of the client
        try:
            settings = cls.model_validate({**table, **_from_environment(locations.environ), **places, **chosen})
        except ValidationError as error:
            faults = [_explained(fault, file, locations.environ) for fault in error.errors()]
            raise ConfigurationError("; ".join(faults)) from None
        settings._origin = locations, file, overrides
        return settings

    def reread(self) -> "Settings":
        """Reads the same file and environment again. Raises `ConfigurationError`."""
        locations, _, overrides = self._origin
        return Settings.load(Locations.find(locations.environ), **overrides)

    def runtime_folder(self) -> Path:
        """Returns the folder of the sockets, and makes it if it is missing. Raises `ConfigurationError`."""
        return first_private(self._origin[0].runtimes)

    def socket_path(self) -> Path:
        """Returns the path to listen at: `socket`, by default in the runtime folder, which is made. Raises
        `ConfigurationError`."""
        follows = self.socket == self._origin[0].runtime / SOCKET_NAME
        return self.runtime_folder() / SOCKET_NAME if follows else self.socket

    def model_tables(self) -> Mapping[str, ModelConfiguration]:
        """Returns the models' tables, each over what the model's group says."""
        merged: dict[str, ModelConfiguration] = {}
        for group in self.groups.values():
            table = ModelConfiguration(pin=group.pin, preload=group.preload, hours=group.hours)
            merged |= dict.fromkeys(group.models, table)
        for name, own in self.models.items():
            merged[name] = own.over(merged.pop(name, NOTHING_SET))  # a later table wins over one of another name
        return merged

    def is_given(self, name: str) -> bool:
        """Returns False for a setting that is not set and has its default value."""
        return name in self.model_fields_set

    def source(self, name: str) -> tuple[str, Any]:
        """Returns where a setting is from (a variable, a line of the file, "default"), and the value that stands
        there, None for a default."""
        locations, file, _ = self._origin
        environment = _from_environment(locations.environ)
        if name in environment:
            return _variable(name), environment[name]
        if name in file.table:
            return file.place(name), file.table[name]
        return "default", None

    def place(self, *key: str) -> str:
        """Returns the key's place in the configuration file."""
        return self._origin[1].place(*key)


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of the environment. Empty variables are ignored, except MODELRUNNER_LISTEN, where empty
    means "no TCP listener"."""
    values = {name: environ.get(_variable(name)) for name in Settings.model_fields}
    return {name: text for name, text in values.items() if text or (text is not None and name == "listen")}


def _variable(name: str) -> str:
    return f"MODELRUNNER_{name.upper()}"


def _explained(fault: ErrorDetails, file: ConfigFile, environ: Mapping[str, str]) -> str:
    """Describes one fault, with the line of the file or the variable at fault."""
    param = fault.get("ctx", {}).get("param") or ""
    key = [str(part) for part in fault["loc"] if part not in (*KINDS, "[key]")] + (param.split(".") if param else [])
    variable = _variable(key[0])
    where = variable if key[0] in _from_environment(environ) or key[0] not in file.table else file.place(*key)
    if fault["type"] == "extra_forbidden" and fault["loc"][-2:-1] and fault["loc"][-2] in KINDS:
        return f"{where}: {'.'.join(key[:-1])}: {unknown_key(str(fault['loc'][-2]), key[-1])}"
    if fault["type"] == "extra_forbidden":
        return f"{where}: unknown setting {'.'.join(key)!r}{nearest(key[-1], Settings.model_fields)}"
    said = said_of(fault)
    return f"{where}: {said}" if param else f"{where}: {'.'.join(key)}: {said}"
