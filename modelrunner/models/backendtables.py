"""The tables that only backends understand: `[backends."NAME"]` of the configuration file, and a model's own table for
one backend."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from modelrunner.backend import Backend
from modelrunner.config.locations import ConfigurationError
from modelrunner.config.modelconfig import ModelConfiguration, table_name
from modelrunner.errors import BadRequest
from modelrunner.schema import nearest, said_of

Kind = TypeVar("Kind", bound=BaseModel)


def backend_options(backend: Backend, settings: ModelConfiguration) -> dict[str, Any]:
    """Returns the model's table for the backend, read by the backend's `options_model`. Raises `BadRequest`, which
    names the wrong key."""
    table = table_name(backend.name)
    return _read(backend.options_model, settings.options.get(table, {}), backend.name, (table,)).model_dump()


def check_settings(backend: Backend | type[Backend], table: Mapping[str, Any], place: Callable[..., str]) -> None:
    """Raises `ConfigurationError` with the place of the first key that the backend does not take."""
    try:
        _read(backend.settings_model, table, backend.name)
    except BadRequest as error:
        where = place("backends", backend.name, *(error.param or "").split("."))
        raise ConfigurationError(f"{where}: {error.message}") from None


def _read(kind: type[Kind], table: Mapping[str, Any], backend: str, under: tuple[str, ...] = ()) -> Kind:
    """Reads a table; `under` is its path for messages."""
    try:
        return kind.model_validate(dict(table))
    except ValidationError as error:
        fault = error.errors()[0]
        path = ".".join([*under, *map(str, fault["loc"])])
        if fault["type"] != "extra_forbidden":
            raise BadRequest(f"{path}: {said_of(fault)}", param=path) from None
        top = [field.alias or name for name, field in kind.model_fields.items()] if len(fault["loc"]) == 1 else []
        raise BadRequest(
            f"unknown setting {path!r} for {backend}{nearest(str(fault['loc'][-1]), top)}", param=path
        ) from None
