"""The daemon's settings: one frozen value, built once. Command line, then MODELRUNNER_* variables, then config.toml,
then defaults."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from modelrunner.errors import BadRequest
from modelrunner.locations import ConfigurationError, Locations, read_config_file
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


class ModelSettings(BaseModel):
    """A `[models."REF"]` table: the field names of `_configure`."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    backend: str | None = None
    context_size: int | None = Field(default=None, ge=1, alias="context-size")
    parallel: int | None = Field(default=None, ge=1, le=256)
    keep_alive: KeepAliveSetting | None = None
    runtime_flags: tuple[str, ...] = Field(default=(), alias="runtime-flags")


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
    memory_budget: Bytes | None = None
    memory_reserve: Bytes | None = None
    keep_alive: KeepAliveSetting = KeepAlive(300.0)
    max_queue: int = Field(default=512, ge=1)
    max_wait: Seconds = 600.0
    body_limit: Bytes = 32 << 20
    total_body_limit: Bytes = 512 << 20
    stop_grace: Seconds = 10.0
    stall_limit: Seconds = 300.0
    drain_limit: Seconds = 30.0
    log_level: str = "info"
    llama_server: Path | None = None
    models: Mapping[str, ModelSettings] = Field(default_factory=dict)
    backends: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict)

    @classmethod
    def load(cls, locations: Locations, **overrides: Any) -> "Settings":
        """`overrides` come from the command line and win. Raises `ConfigurationError` that names each bad setting."""
        file = {k: v for k, v in read_config_file(locations.config_file).items() if k != "host"}
        places = {
            "data_dir": locations.data,
            "cache_dir": locations.cache,
            "runtime_dir": locations.runtime,
            "config": locations.config_file,
        }
        try:
            values: dict[str, Any] = {"_file": file, **places, **{k: v for k, v in overrides.items() if v is not None}}
            return cls(**values)
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ConfigurationError(
                f"settings are wrong ({locations.config_file} or MODELRUNNER_*): {faults}"
            ) from None

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
        file = given.pop("_file", {})
        return (lambda: given, env_settings, lambda: file)  # type: ignore[return-value]
