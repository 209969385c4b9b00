"""What people set per model with `_configure`: kept on disk, keyed by model ID, each change with a revision.

The revision is part of a runner's key, so that a changed model never reuses an old process. It counts what an engine
is started with: another keep-alive alone never reloads anything.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from modelrunner.api import ConfigureRequest
from modelrunner.errors import BadRequest
from modelrunner.types import KeepAlive

log = logging.getLogger(__name__)

MAX_PARALLEL = 256
_WIRE_NAMES = {"context_size": "context-size", "runtime_flags": "runtime-flags"}


class ModelConfiguration(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, rename=_WIRE_NAMES
):
    """None: not set. `context_size` in tokens; `keep_alive` is a Go duration or "-1"."""

    backend: str | None = None
    context_size: int | None = None
    parallel: int | None = None
    keep_alive: str | None = None
    runtime_flags: tuple[str, ...] | None = None

    def over(self, under: "ModelConfiguration") -> "ModelConfiguration":
        """What is set here, and for the rest what is set in `under`."""
        return ModelConfiguration(
            *(mine if mine is not None else theirs for mine, theirs in zip(_values(self), _values(under), strict=True))
        )

    def as_dict(self) -> dict[str, Any]:
        """As `GET /engines/_configure` shows it: only what is set."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


NOTHING_SET = ModelConfiguration()


def _values(configuration: ModelConfiguration) -> tuple[Any, ...]:
    return msgspec.structs.astuple(configuration)


def changed(before: ModelConfiguration, request: ConfigureRequest) -> ModelConfiguration:
    """A field that is left out keeps its value; null takes it back. Raises `BadRequest` for a value out of range; what
    only a backend or a model can judge is the caller's."""

    def value(name: str) -> Any:
        given = getattr(request, name)
        return getattr(before, name) if given is msgspec.UNSET else given

    context_size, parallel = value("context_size"), value("parallel")
    keep_alive, flags = value("keep_alive"), value("runtime_flags")
    if context_size is not None and context_size < 1:
        raise BadRequest("context-size is a number of tokens, at least 1", param="context-size")
    if parallel is not None and not 1 <= parallel <= MAX_PARALLEL:
        raise BadRequest(f"parallel is a number from 1 to {MAX_PARALLEL}", param="parallel")
    return ModelConfiguration(
        backend=value("backend"),
        context_size=context_size,
        parallel=parallel,
        keep_alive=None if keep_alive is None else str(KeepAlive.parse(keep_alive)),
        runtime_flags=None if flags is None else tuple(flags),
    )


class Entry(msgspec.Struct, frozen=True):
    revision: int
    configuration: ModelConfiguration


class _File(msgspec.Struct, frozen=True):
    last_revision: int
    models: dict[str, Entry]


class Configurations:
    """Every model's configuration, in memory and in one file. `generation` moves with every change."""

    def __init__(self, path: Path) -> None:
        """Opens `path`, which need not exist. A file that cannot be read is set aside, never overwritten."""
        self._path = path
        self._lock = asyncio.Lock()
        self.generation = 0
        content = _read(path)
        self._last_revision = content.last_revision
        self._entries: Mapping[str, Entry] = content.models

    def get(self, model_id: str) -> Entry:
        return self._entries.get(model_id, Entry(0, NOTHING_SET))

    def all(self) -> Mapping[str, Entry]:
        return self._entries

    async def configure(self, model_id: str, request: ConfigureRequest) -> Entry:
        """On disk when it returns. Raises `BadRequest`."""
        async with self._lock:
            before = self.get(model_id)
            after = changed(before.configuration, request)
            if after == before.configuration:
                return before
            reloads = _values(_without_keep_alive(after)) != _values(_without_keep_alive(before.configuration))
            entry = Entry(self._last_revision + 1 if reloads else before.revision, after)
            await self._replace({**self._entries, model_id: entry}, max(self._last_revision, entry.revision))
            return entry

    async def forget(self, model_id: str) -> None:
        """For a model that was removed."""
        async with self._lock:
            if model_id in self._entries:
                rest = {key: entry for key, entry in self._entries.items() if key != model_id}
                await self._replace(rest, self._last_revision)

    async def _replace(self, entries: Mapping[str, Entry], last_revision: int) -> None:
        content = msgspec.json.encode(_File(last_revision, dict(entries)))
        await asyncio.to_thread(_write, self._path, content)
        self._entries, self._last_revision = entries, last_revision
        self.generation += 1


def _without_keep_alive(configuration: ModelConfiguration) -> ModelConfiguration:
    return msgspec.structs.replace(configuration, keep_alive=None)


def _read(path: Path) -> _File:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return _File(0, {})
    except msgspec.DecodeError as error:
        aside = path.with_name(f"{path.name}.corrupt-{time.time_ns()}")
        path.rename(aside)
        log.error("the models' configurations cannot be read (%s): set aside as %s", error, aside)
        return _File(0, {})


def _write(path: Path, content: bytes) -> None:
    """Old or new after a crash, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
