"""The backends of the configuration file's `[engines.NAME]` tables."""

import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from modelrunner.backend import Backend, DeclaredModel
from modelrunner.config.enginetables import AnyEngineTable, EngineTable, ServerTable
from modelrunner.config.locations import ConfigFile, ConfigurationError
from modelrunner.engineapi import MESSAGES_ENDPOINTS, OPENAI_ENDPOINTS, ApiShape, EndpointApi, EngineApi, ServiceCall
from modelrunner.sandbox import Permissions
from modelrunner.sdk.command import CommandBackend
from modelrunner.sdk.server import ServerBackend
from modelrunner.types import DECLARED, Mode, ModelFormat

_MODES = {
    ApiShape.EMBEDDINGS: "embedding",
    ApiShape.RERANK: "reranking",
    ApiShape.SCORE: "reranking",
    ApiShape.SPEECH: "speech",
    ApiShape.TRANSCRIPTION: "transcription",
    ApiShape.IMAGE: "image-generation",
}
"""The mode of the runner that serves an endpoint; completion for other shapes, the engine's name for an opaque one. A
mode exists once an engine has it."""
_SERVED = {path: endpoint for path, endpoint in OPENAI_ENDPOINTS.items() if path.startswith("/v1/")}
"""The endpoints of a server elsewhere whose table names none."""
_ANTHROPIC = {"x-api-key": "{key}", "anthropic-version": "2023-06-01"}
"""https://docs.anthropic.com/en/api/versioning"""


def configured(name: str, table: AnyEngineTable, file: Path | None = None) -> type[Backend]:
    """Makes the class of the engine that the table describes. `file` is the configuration file that has it."""
    return _server(name, table, file) if isinstance(table, ServerTable) else _command(name, table, file)


def _place(name: str, file: Path | None) -> str:
    """Returns the line of the table, which may have moved since the file was read."""
    with suppress(ConfigurationError):
        if file is not None and (line := ConfigFile.read(file).line("engines", name)):
            return f"{file.name}, line {line}"
    return ""


def _server(name: str, table: ServerTable, file: Path | None) -> type[Backend]:
    endpoints, modes, calls = _interface(name, table.endpoints, None)
    anthropic = table.api == "anthropic"
    if not endpoints:
        endpoints = {"/v1/chat/completions": EndpointApi(ApiShape.CHAT), **MESSAGES_ENDPOINTS} if anthropic else _SERVED
        modes = frozenset({Mode.COMPLETION}) if anthropic else frozenset(Mode)
    members = {
        "__doc__": f"The engine of the table [engines.{name}].",
        "name": name,
        "modes": modes,
        "calls": calls,
        "url": table.url,
        "key_variable": table.key_env,
        "headers": {"User-Agent": "modelrunner", **(_ANTHROPIC if anthropic else {"Authorization": "Bearer {key}"})},
        "listing": "/v1/models?limit=1000" if anthropic else "/v1/models",
        "certificates": table.ca,
        "parallel": table.parallel,
        "place": staticmethod(partial(_place, name, file)),
        "engine_api": EngineApi(endpoints, health=None, metrics=None),
    }
    return type(f"Configured_{name}", (ServerBackend,), members)


def _command(name: str, table: EngineTable, file: Path | None) -> type[Backend]:
    [only] = table.modes if len(table.modes) == 1 else [None]
    endpoints, modes, calls = _interface(name, table.endpoints, only)
    paths = (word.rpartition("=")[2] for word in table.command)
    named = {Path(path) for path in paths if path.startswith("/")}
    if table.working_directory is not None:
        named.add(table.working_directory)
    ready = table.ready
    permissions = table.permissions
    members = {
        "__doc__": f"The engine of the table [engines.{name}].",
        "name": name,
        "formats": frozenset(map(ModelFormat, table.formats or ("gguf",)))
        if not table.models
        else frozenset({DECLARED}),
        "modes": frozenset(map(Mode, table.modes)) or modes or frozenset({Mode.COMPLETION}),
        "calls": calls,
        "shared_modes": {_mode(name, *each): (Mode(only), "") for each in table.endpoints.items()} if only else {},
        "uses_external_model_management": bool(table.models),
        "declared": tuple(_declared(table)),
        "uses_tcp": not any("{socket}" in text for text in (*table.command, *table.environment.values())),
        "command": table.command,
        "environment": table.environment,
        "working_directory": table.working_directory,
        "stop_signal": getattr(signal, f"SIG{table.stop.signal}"),
        "stop_grace": table.stop.grace,
        "stop_command": table.stop.command,
        "memory_factor": table.memory.factor,
        "memory_base": table.memory.base,
        "memory_token": table.memory.token,
        "device": table.memory.device,
        "place": staticmethod(partial(_place, name, file)),
        "permissions": Permissions(
            reads=(*permissions.reads, *named),
            writes=permissions.writes,
            network=permissions.network,
            processes=permissions.processes,
            asks_for_key=any("{key}" in value for value in table.environment.values()),
        ),
        "engine_api": EngineApi(
            endpoints or OPENAI_ENDPOINTS,
            health=ready.path,
            ready_line=ready.line,
            start_limit=ready.within,
            metrics=table.metrics,
            settled=table.settled,
            listens_elsewhere=bool(table.stop.command),
            model_name=table.model_name,
            lacks=frozenset(table.lacks),
        ),
    }
    return type(f"Configured_{name}", (CommandBackend,), members)


def declared_id(tables: Mapping[str, AnyEngineTable], reference: str) -> str | None:
    """Returns the ID of the model that one of the engines manages itself under this name; None if none does."""
    for name, table in tables.items():
        if isinstance(table, ServerTable):
            models = [DeclaredModel(reference, frozenset())] if reference.startswith(f"{name}/") else []
        else:
            models = [model for model in _declared(table) if model.name == reference]
        if models:
            return models[0].bundle(name).model_id
    return None


def _declared(table: EngineTable) -> list[DeclaredModel]:
    return [
        DeclaredModel(model.name, frozenset(model.capabilities), model.size, model.context_size)
        for model in table.models
    ]


def _interface(
    name: str, shapes: Mapping[str, ApiShape], only: str | None
) -> tuple[Mapping[str, EndpointApi], frozenset[Mode], Mapping[str, ServiceCall]]:
    """Returns the endpoints of these shapes, their modes, and the calls that they add to the daemon's. `only` is the
    mode of all of them, None for those of the shapes."""
    modes = {path: Mode(only) if only else _mode(name, path, shape) for path, shape in shapes.items()}
    calls = {path: ServiceCall(modes[path], shape) for path, shape in shapes.items() if path.startswith("/v1/")}
    return {path: EndpointApi(ApiShape(shape)) for path, shape in shapes.items()}, frozenset(modes.values()), calls


def _mode(name: str, path: str, shape: ApiShape) -> Mode:
    if path.startswith("/v1/images/"):  # also for edits and variations, which are forms
        shape = ApiShape.IMAGE
    return Mode(name if shape is ApiShape.OPAQUE else _MODES.get(shape, Mode.COMPLETION))
