"""The configuration of each model: the tables of the configuration file, and above them the settings that were posted
to the daemon.

Posted settings are kept on disk, keyed by model ID. A change for one mode (completion, embedding, ...) lies over the
one for all modes. The revision counts changes of the values that an engine is started with: a new keep-alive alone
reloads no model.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from modelrunner.config.modelconfig import NOTHING_SET, ModelConfiguration
from modelrunner.durable import translated
from modelrunner.errors import Conflict
from modelrunner.jsonfile import JsonFile
from modelrunner.store import Reference
from modelrunner.types import Mode

# The `[models."REFERENCE"]` tables of the configuration file.
Tables = Mapping[str, ModelConfiguration]


class PostedConfiguration(msgspec.Struct, frozen=True):
    """The posted settings of one model, for one mode or for all. Revision 0 means no settings."""

    revision: int
    configuration: ModelConfiguration


_NONE = PostedConfiguration(0, NOTHING_SET)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The settings of every model at one moment. `posted` is by model ID, or by model ID, slash and mode; `model_id`
    returns the ID of a reference's model, None if there is none."""

    posted: Mapping[str, PostedConfiguration]
    tables: Tables = field(default_factory=dict)
    model_id: Callable[[str], str | None] = lambda reference: None

    def posted_for(self, model_id: str, mode: Mode | None = None) -> PostedConfiguration:
        """Returns the posted settings for this mode alone; without a mode, those for all modes."""
        return self.posted.get(_key(model_id, mode), _NONE)

    def effective(self, model_id: str, mode: Mode | None = None) -> PostedConfiguration:
        """Returns the posted settings that apply in this mode, or, without one, in modes without settings of their
        own."""
        general = self.posted_for(model_id)
        if mode is None:
            return general
        own = self.posted_for(model_id, mode)
        # Revisions never repeat, so the later of the two stands for both.
        return PostedConfiguration(max(own.revision, general.revision), own.configuration.over(general.configuration))

    def from_file(self, model_id: str) -> ModelConfiguration:
        """Returns the settings of the configuration file; a later table wins over an earlier one."""
        merged = NOTHING_SET
        for reference, table in self.tables.items():
            if self.model_id(reference) == model_id:
                merged = table.over(merged)
        return merged

    def of(self, model_id: str, mode: Mode | None = None) -> ModelConfiguration:
        """Returns the model's settings: the posted ones, and below them those of the configuration file."""
        return self.effective(model_id, mode).configuration.over(self.from_file(model_id))

    def references(self) -> set[str]:
        """Returns the names of models in the settings: those of tables, and of draft models."""
        of_drafts = (*self.tables.values(), *(each.configuration for each in self.posted.values()))
        drafts = (each.drafting.draft_model for each in of_drafts if each.drafting)
        return {*self.tables, *filter(None, drafts)}

    def modes(self, model_id: str) -> list[Mode]:
        """Returns the modes with posted settings of their own."""
        return [mode for id, mode, _ in self if id == model_id and mode is not None]

    def __iter__(self) -> Iterator[tuple[str, Mode | None, PostedConfiguration]]:
        """Yields (model ID, mode or None for all, posted settings)."""
        for key, posted in self.posted.items():
            model_id, _, mode = key.partition("/")
            yield model_id, Mode(mode) if mode else None, posted

    def with_posted(self, model_id: str, mode: Mode | None, posted: PostedConfiguration) -> "ModelSettings":
        return replace(self, posted={**self.posted, _key(model_id, mode): posted})

    def for_absent(self, reference: Reference, model_id: str) -> "ModelSettings":
        """Returns the settings that the absent model `reference` would have with the ID `model_id`."""

        def named(table: str) -> str | None:
            return model_id if Reference.parse(table) == reference else None

        return ModelSettings({}, self.tables, named)

    def with_tables(self, tables: Tables) -> "ModelSettings":
        return replace(self, tables=tables)


class _ConfigurationsFile(msgspec.Struct, frozen=True):
    """`models` is `ModelSettings.posted`."""

    last_revision: int
    models: dict[str, PostedConfiguration]


class Configurations:
    """Owns the posted settings, in memory and in one file. `settings` are the current ones; after every change of them
    each of `watchers` is called."""

    def __init__(
        self,
        path: Path,
        *,
        tables: Tables | None = None,
        model_id: Callable[[str], str | None] = lambda reference: None,
    ) -> None:
        """Opens `path`, a file that need not exist, in a folder that does. A damaged file is set aside. The
        other arguments are those of `ModelSettings`."""
        self._file = JsonFile(path, _ConfigurationsFile, check=_check)
        self._lock = asyncio.Lock()
        self._numbering = threading.Lock()
        self.watchers: list[Callable[[], None]] = []
        content = self._file.load() or _ConfigurationsFile(0, {})
        self._last_revision = content.last_revision
        self.settings = ModelSettings(content.models, tables or {}, model_id)

    def take_revision(self) -> int:
        """Returns a number that this daemon never returns again, and that is not on disk. Any thread may call this."""
        with self._numbering:
            self._last_revision += 1
            return self._last_revision

    def set_tables(self, tables: Tables) -> None:
        """Replaces the tables of the configuration file."""
        self._hold(self.settings.with_tables(tables))

    async def keep(
        self, model_id: str, mode: Mode | None, before: PostedConfiguration, after: PostedConfiguration
    ) -> None:
        """Replaces `before`, on disk when it returns. Raises `Conflict` if `before` is not the present value any more,
        `InsufficientDisk`, `StorageFailed`; then nothing is changed."""
        async with self._lock:
            if self.settings.posted_for(model_id, mode) != before:
                raise Conflict("another request changed the model's configuration meanwhile: try again")
            if after != before:
                await self._write({**self.settings.posted, _key(model_id, mode): after})

    async def renew(self, model_ids: list[str]) -> None:
        """Gives these models another revision, because the settings below their posted ones changed. Raises as
        `keep`."""
        async with self._lock:
            renewed = {
                model_id: PostedConfiguration(self.take_revision(), self.settings.posted_for(model_id).configuration)
                for model_id in model_ids
            }
            if renewed:
                await self._write({**self.settings.posted, **renewed})

    async def forget(self, model_id: str) -> None:
        """Forgets the settings of a removed model. Raises as `keep`."""
        async with self._lock:
            posted = self.settings.posted
            rest = {key: each for key, each in posted.items() if key.partition("/")[0] != model_id}
            if len(rest) != len(posted):
                await self._write(rest)

    async def _write(self, posted: dict[str, PostedConfiguration]) -> None:
        with translated("keeping the configuration", self._file.path.parent):
            await asyncio.to_thread(self._file.save, _ConfigurationsFile(self._last_revision, posted))
        self._hold(replace(self.settings, posted=posted))  # the tables may have been replaced meanwhile

    def _hold(self, settings: ModelSettings) -> None:
        self.settings = settings
        for tell in self.watchers:
            tell()


def _key(model_id: str, mode: Mode | None) -> str:
    return model_id if mode is None else f"{model_id}/{mode}"


def _check(content: _ConfigurationsFile) -> None:
    for key in content.models:
        Mode(key.partition("/")[2] or Mode.COMPLETION)
