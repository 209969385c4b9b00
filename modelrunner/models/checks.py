"""The last result of `modelrunner check` for each model, as long as it holds."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import msgspec

from modelrunner import wire
from modelrunner.backend import Versioned
from modelrunner.errors import BackendNotFound
from modelrunner.jsonfile import JsonFile
from modelrunner.models.abilities import AbleModel
from modelrunner.models.configurations import Configurations
from modelrunner.plugins.isolation import call_backend, interface_of
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.types import Mode

_MOST = 1024
"""The most results that are kept; the oldest goes first."""


class _Kept(msgspec.Struct, frozen=True):
    """`settings` is a digest of the model's settings at that time."""

    check: wire.ModelCheck
    settings: str


class Checks:
    """Keeps the results in `file`, by the model's ID, which changes with any of its files. A result holds as long as
    the engine has the same version and the model the same settings. `wall` is the time of day in Unix seconds."""

    def __init__(
        self,
        file: Path,
        registry: BackendRegistry,
        configurations: Configurations,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._file = JsonFile(file, dict[str, _Kept], cache=True)
        self._kept = self._file.load() or {}
        self._registry = registry
        self._configurations = configurations
        self._wall = wall
        self._engines: dict[str, str] = {}
        """The name and the version of each backend's engine, by the name, as far as they were needed."""
        self._lock = asyncio.Lock()

    def forget_engines(self) -> None:
        """Asks the backends anew for the versions of their engines, because one was changed. Any thread may call
        this."""
        self._engines = {}

    async def keep(self, model_id: str, backend: str | None, outcome: wire.CheckOutcome) -> wire.ModelCheck:
        """Keeps the outcome of a check of the model with its present settings, and with the engine of the backend. A
        failing disk costs only the next start the result."""
        self._engines.pop(backend or "", None)
        engine = await self._engine(backend)
        check = wire.ModelCheck(outcome.passed, outcome.failed, int(self._wall()), engine)
        async with self._lock:
            kept = {id: each for id, each in self._kept.items() if id != model_id}
            kept[model_id] = _Kept(check, self._settings(model_id))
            while len(kept) > _MOST:
                del kept[next(iter(kept))]
            self._kept = kept
            await asyncio.to_thread(self._file.save, kept)
        return check

    async def shown(self, models: Iterable[AbleModel]) -> list[AbleModel]:
        """Returns the models, each with the check that holds for it among its abilities."""
        listed = []
        for model, able in models:
            if (
                (kept := self._kept.get(model.id)) is not None
                and kept.settings == self._settings(model.id)
                and kept.check.engine == await self._engine(able.backend)
            ):
                able = replace(able, check=kept.check)
            listed.append((model, able))
        return listed

    async def _engine(self, backend: str | None) -> str:
        if backend is None:
            return ""
        if (known := self._engines.get(backend)) is None:
            engines = self._engines  # those of before, if they are forgotten meanwhile
            try:
                versioned = interface_of(self._registry.get(backend), Versioned)
            except BackendNotFound:
                return ""
            version = await call_backend(versioned.version) if versioned else ""
            known = engines[backend] = f"{backend} {version}".strip()
        return known

    def _settings(self, model_id: str) -> str:
        """Returns a digest of the settings that answers depend on."""
        settings = self._configurations.settings.of(model_id, Mode.COMPLETION)
        ours = {"parameters": settings.parameters, "arguments": settings.template_arguments}
        content = msgspec.json.encode((settings.for_the_engine(), ours), order="deterministic")
        return blake2b(content, digest_size=16).hexdigest()
