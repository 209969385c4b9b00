"""What each model needs: the backend's estimate, until the engine was asked, and then a run of it was measured."""

import asyncio
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from modelrunner.backend import Backend
from modelrunner.durable import JsonFile
from modelrunner.types import RequiredMemory, RunSpec, Variant

_FORMAT: Final = 2
_MAX_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class Figure:
    """What is known of a run at a full context: `measured`, or told by the engine without loading the model."""

    memory: RequiredMemory
    measured: bool


class _File(msgspec.Struct, frozen=True):
    format: Literal[2]  # counts up when figures or their keys get another meaning
    figures: dict[str, Figure]


class Ledger:
    """Figures are kept in `path` (none: in memory only) per backend, its version and settings, model, mode, context,
    parallel, flags, options and draft: a figure of another combination says nothing about this one."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = JsonFile(path, _File, cache=True) if path is not None else None
        content = self._file.load() if self._file is not None else None
        self._known = content.figures if content is not None else {}
        self._estimates: dict[str, RequiredMemory] = {}
        self._asking = asyncio.Lock()

    async def required(self, backend: Backend, spec: RunSpec) -> RequiredMemory:
        """Bytes to count for a run: what was measured, else what the engine told, else the backend's estimate."""
        entry = _entry(backend, spec)
        if figure := self._known.get(entry):
            return figure.memory
        if entry not in self._estimates:
            self._estimates[entry] = await backend.required_memory(spec)
        return self._estimates[entry]

    async def variants(self, backend: Backend, spec: RunSpec, budget: RequiredMemory) -> list[Variant]:
        """The backend's ways to run it, the preferred one first, each with the bytes to count for it."""
        found = await backend.variants(spec, budget)
        for variant in found:
            self._estimates[_entry(backend, variant.spec)] = variant.memory
        return [replace(v, memory=await self.required(backend, v.spec)) for v in found]

    async def ask(self, backend: Backend, spec: RunSpec) -> None:
        """Has the engine itself say what a run needs, once, unless that is known; one engine at a time. Takes a second
        and belongs to when a model was pulled or configured: a load never waits for it."""
        entry = _entry(backend, spec)
        async with self._asking:
            if entry in self._known:
                return
            told = await backend.dry_run(spec)
        if told is not None and entry not in self._known:
            self._keep(entry, Figure(told, measured=False))

    def record(
        self, backend: Backend, spec: RunSpec, measured: RequiredMemory, *, fresh: bool = False
    ) -> RequiredMemory:
        """Takes down what a run was seen to hold and returns what counts for such a run from now on: the most that was
        ever measured. A `fresh` one has only loaded its model: what it will hold at a full context is that and the
        growth that its backend expects. Devices that could not be measured keep their figure."""
        if fresh:
            measured += backend.growth(spec)
        entry = _entry(backend, spec)
        known = self._known.get(entry)
        before = known.memory if known else self._estimates.get(entry, RequiredMemory(0))
        if known and known.measured:
            measured = before.most(measured)
        elif not measured.vram:
            measured = replace(measured, vram=before.vram)
        self._keep(entry, Figure(measured, measured=True))
        return measured

    def _keep(self, entry: str, figure: Figure) -> None:
        before = self._known.pop(entry, None)
        self._known[entry] = figure  # at the end: the newest are kept longest
        if figure != before:
            self._write()

    def _write(self) -> None:
        while len(self._known) > _MAX_ENTRIES:
            del self._known[next(iter(self._known))]
        if self._file is not None:
            self._file.save(_File(_FORMAT, self._known))


def _entry(backend: Backend, spec: RunSpec) -> str:
    parts: list[Any] = [backend.name, backend.version(), spec.model_id, spec.mode, spec.context_size, spec.parallel]
    parts += [backend.settings.model_dump_json(), spec.gpu_layers]
    parts += [spec.flags, spec.draft.model_id if spec.draft else None, sorted(spec.options.items())]
    return json.dumps(parts, default=str)
