"""The daemon's settings: one frozen value, built once. Command line, then MODELRUNNER_* variables, then config.toml,
then defaults."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from modelrunner.errors import BadRequest
from modelrunner.locations import ConfigFile, ConfigurationError, Locations
from modelrunner.modelconfig import ModelConfiguration, nearest
from modelrunner.types import KeepAlive
from modelrunner.units import parse_bytes, parse_duration


def _by(parse: Callable[[Any], Any]) -> BeforeValidator:
    def convert(value: Any) -> Any:
        try:
            return parse(value)
        except BadRequest as error:
            raise ValueError(error.message) from None

    return BeforeValidator(convert)


def _seconds(value: Any) -> float:
    return (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else parse_duration(str(value))
    )


Bytes = Annotated[int, _by(parse_bytes)]
Seconds = Annotated[float, _by(_seconds), Field(ge=0)]
KeepAliveSetting = Annotated[KeepAlive, _by(lambda v: v if isinstance(v, KeepAlive) else KeepAlive.parse(v))]


def _model(value: Any) -> ModelConfiguration:
    """A `[models."REF"]` table: the field names of `_configure`."""
    if isinstance(value, ModelConfiguration):
        return value
    if not isinstance(value, dict):
        raise PydanticCustomError("model_table", "a table of settings is wanted")
    try:
        return ModelConfiguration.of(value)
    except BadRequest as error:
        raise PydanticCustomError("model_table", "{said}", {"said": error.message, "param": error.param}) from None


ModelTable = Annotated[ModelConfiguration, BeforeValidator(_model)]


class Settings(BaseSettings):
    """See docs/configuration.md for the meaning of each. Sizes are in bytes, times in seconds."""

    model_config = SettingsConfigDict(
        env_prefix="MODELRUNNER_", frozen=True, extra="forbid", arbitrary_types_allowed=True, env_parse_none_str="none"
    )

    data_dir: Path
    cache_dir: Path
    runtime_dir: Path
    config: Path
    listen: str = "127.0.0.1:12434"
    socket: Path | None = None
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    memory_budget: Annotated[Bytes, Field(gt=0)] | None = None
    memory_reserve: Bytes | None = None
    keep_alive: KeepAliveSetting = KeepAlive(300.0)
    max_queue: int = Field(default=512, ge=1)
    max_wait: Seconds = 600.0
    body_limit: Bytes = 32 << 20
    total_body_limit: Bytes = 512 << 20
    stop_grace: Seconds = 10.0
    stall_limit: Seconds = 300.0
    wedge_limit: Seconds = 60.0
    drain_limit: Seconds = 30.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _by(lambda v: str(v).lower())] = "info"
    llama_server: Path | None = None
    models: Mapping[str, ModelTable] = Field(default_factory=dict)
    backends: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)

    _origin: tuple[Locations, ConfigFile, Mapping[str, Any]] = PrivateAttr()

    @classmethod
    def load(cls, locations: Locations, **overrides: Any) -> "Settings":
        """`overrides` come from the command line and win. Raises `ConfigurationError` that names each bad setting and
        where it stands."""
        file = ConfigFile.read(locations.config_file)
        places = {
            "data_dir": locations.data,
            "cache_dir": locations.cache,
            "runtime_dir": locations.runtime,
            "config": locations.config_file,
        }
        given = {name: value for name, value in overrides.items() if value is not None}
        try:
            values: dict[str, Any] = {"_file": file.table, **places, **given}
            settings = cls(**values)
        except ValidationError as error:
            faults = [_explained(fault, file, locations.environ) for fault in error.errors()]
            raise ConfigurationError("; ".join(faults)) from None
        settings._origin = locations, file, overrides
        return settings

    def reread(self) -> "Settings":
        """What the same places say now. Raises `ConfigurationError`."""
        locations, _, overrides = self._origin
        return Settings.load(Locations.find(locations.environ), **overrides)

    def place(self, *key: str) -> str:
        """Where in the configuration file the key stands."""
        return self._origin[1].place(*key)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        given = init_settings()
        file = {name: value for name, value in given.pop("_file", {}).items() if name != "host"}  # the client's
        return (lambda: given, env_settings, lambda: file)  # type: ignore[return-value]


def _explained(fault: ErrorDetails, file: ConfigFile, environ: Mapping[str, str]) -> str:
    """One fault, with the line of the file or the variable that it comes from."""
    param = fault.get("ctx", {}).get("param") or ""
    key = [str(part) for part in fault["loc"]] + (param.split(".") if param else [])
    variable = f"MODELRUNNER_{key[0].upper()}"
    where = file.place(*key) if key[0] in file.table and variable not in environ else variable
    if fault["type"] == "extra_forbidden":
        return f"{where}: {'.'.join(key)!r} is no setting{nearest(key[-1], Settings.model_fields)}"
    said = fault["msg"].removeprefix("Value error, ")
    return f"{where}: {said}" if param else f"{where}: {'.'.join(key)}: {said}"
