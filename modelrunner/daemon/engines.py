"""The backends of the configuration file's `[engines.NAME]` tables."""

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from modelrunner.backend import Backend, DeclaredModel
from modelrunner.config.enginetables import EngineTable
from modelrunner.engineapi import OPENAI_ENDPOINTS, ApiShape, EndpointApi, EngineApi, ServiceCall
from modelrunner.sandbox import Permissions
from modelrunner.sdk.command import CommandBackend
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


def configured(name: str, table: EngineTable) -> type[Backend]:
    """Makes the class of the engine that the table describes."""
    shapes = {path: ApiShape(shape) for path, shape in table.endpoints.items()}
    [only] = table.modes if len(table.modes) == 1 else [None]
    modes = {path: Mode(only) if only else _mode(name, shape) for path, shape in shapes.items()}
    endpoints = {path: EndpointApi(shape) for path, shape in shapes.items()} or OPENAI_ENDPOINTS
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
        "modes": frozenset(map(Mode, table.modes)) or frozenset(modes.values()) or frozenset({Mode.COMPLETION}),
        "calls": {path: ServiceCall(modes[path], shape) for path, shape in shapes.items() if path.startswith("/v1/")},
        "uses_external_model_management": bool(table.models),
        "declared": tuple([model for _, model in models_of({name: table})]),
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
        "permissions": Permissions(
            reads=(*permissions.reads, *named),
            writes=permissions.writes,
            network=permissions.network,
            processes=permissions.processes,
        ),
        "engine_api": EngineApi(
            endpoints,
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


def models_of(tables: Mapping[str, EngineTable]) -> Iterator[tuple[str, DeclaredModel]]:
    """Yields the models that engines have themselves, each with the name of its engine."""
    for name, table in tables.items():
        for model in table.models:
            yield name, DeclaredModel(model.name, frozenset(model.capabilities), model.size, model.context_size)


def _mode(name: str, shape: ApiShape) -> Mode:
    return Mode(name if shape is ApiShape.OPAQUE else _MODES.get(shape, Mode.COMPLETION))
