"""What people set per model with `_configure`: kept on disk, keyed by model ID, each change with a revision.

A change for one mode (completion, embedding, ...) lies over the one for all modes. The revision is part of a runner's
key, so that a changed model never reuses an old process. It counts what an engine is started with: another keep-alive
alone never reloads anything.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from modelrunner import durable
from modelrunner.errors import Conflict
from modelrunner.modelconfig import NOTHING_SET, ModelConfiguration
from modelrunner.types import Mode

log = logging.getLogger(__name__)


class Entry(msgspec.Struct, frozen=True):
    revision: int
    configuration: ModelConfiguration


_NONE = Entry(0, NOTHING_SET)


class _File(msgspec.Struct, frozen=True):
    """`models` by model ID, or by model ID, slash and mode."""

    last_revision: int
    models: dict[str, Entry]


class Configurations:
    """Every model's configuration, in memory and in one file. `generation` moves with every change."""

    def __init__(self, path: Path) -> None:
        """Opens `path`, a file that need not exist, in a folder that does. One that cannot be read is set aside, never
        overwritten."""
        self._path = path
        self._lock = asyncio.Lock()
        self.generation = 0
        content = _read(path)
        self._last_revision = content.last_revision
        self._entries: Mapping[str, Entry] = content.models

    def get(self, model_id: str, mode: Mode | None = None) -> Entry:
        """What is set for this mode alone; without one, for all modes."""
        return self._entries.get(_key(model_id, mode), _NONE)

    def effective(self, model_id: str, mode: Mode) -> Entry:
        """What holds in this mode. Revisions never repeat, so the later of the two stands for both."""
        own, general = self.get(model_id, mode), self.get(model_id)
        return Entry(max(own.revision, general.revision), own.configuration.over(general.configuration))

    def modes(self, model_id: str) -> list[Mode]:
        """Those that have settings of their own."""
        return [mode for id, mode, _ in self if id == model_id and mode is not None]

    def __iter__(self) -> Iterator[tuple[str, Mode | None, Entry]]:
        for key, entry in self._entries.items():
            model_id, _, mode = key.partition("/")
            yield model_id, Mode(mode) if mode else None, entry

    def draft(self, before: Entry, after: ModelConfiguration) -> Entry:
        """`after` with its revision, not kept yet: the one of `before` where the engine would be started alike."""
        if after.for_the_engine() == before.configuration.for_the_engine():
            return Entry(before.revision, after)
        self._last_revision += 1
        return Entry(self._last_revision, after)

    async def configure(self, model_id: str, patch: Mapping[str, Any], mode: Mode | None = None) -> Entry:
        """A change that needs nobody else's judgement, as a merge patch. On disk when it returns. Raises
        `BadRequest`."""
        before = self.get(model_id, mode)
        entry = self.draft(before, before.configuration.merged(patch))
        await self.keep(model_id, mode, before, entry)
        return entry

    async def keep(self, model_id: str, mode: Mode | None, before: Entry, entry: Entry) -> None:
        """Replaces `before`. On disk when it returns. Raises `Conflict` if it is not what holds any more."""
        async with self._lock:
            if self.get(model_id, mode) != before:
                raise Conflict("the model's configuration was changed by somebody else meanwhile: try again")
            if entry != before:
                await self._replace({**self._entries, _key(model_id, mode): entry})

    async def renew(self, model_ids: Collection[str]) -> None:
        """Another revision for these models, because what lies under their configuration has changed."""
        async with self._lock:
            renewed = {}
            for model_id in model_ids:
                self._last_revision += 1
                renewed[model_id] = Entry(self._last_revision, self.get(model_id).configuration)
            if renewed:
                await self._replace({**self._entries, **renewed})

    async def forget(self, model_id: str) -> None:
        """For a model that was removed."""
        async with self._lock:
            rest = {key: entry for key, entry in self._entries.items() if key.partition("/")[0] != model_id}
            if len(rest) != len(self._entries):
                await self._replace(rest)

    async def _replace(self, entries: Mapping[str, Entry]) -> None:
        content = msgspec.json.encode(_File(self._last_revision, dict(entries)))
        with durable.translated("keeping the configuration", self._path.parent):
            await asyncio.to_thread(durable.write, self._path, content)
        self._entries = entries
        self.generation += 1


def _key(model_id: str, mode: Mode | None) -> str:
    return model_id if mode is None else f"{model_id}/{mode}"


def _read(path: Path) -> _File:
    try:
        content = msgspec.json.decode(path.read_bytes(), type=_File)
        for key in content.models:
            Mode(key.partition("/")[2] or Mode.COMPLETION)
        return content
    except FileNotFoundError:
        return _File(0, {})
    except (msgspec.DecodeError, ValueError) as error:
        aside = path.with_name(f"{path.name}.corrupt-{time.time_ns()}")
        path.rename(aside)
        log.error("the models' configurations cannot be read (%s): set aside as %s", error, aside)
        return _File(0, {})
