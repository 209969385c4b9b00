"""What each model needs: the backend's estimate, until a run of it was measured."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelrunner.backend import Backend
from modelrunner.types import RequiredMemory, RunSpec, Variant

_FORMAT = 1
_MAX_ENTRIES = 4096
log = logging.getLogger(__name__)


class Ledger:
    """Measured figures are kept in `path` (none: in memory only) per backend and its version, model, mode, context,
    parallel, flags, options and draft: a figure of another combination says nothing about this one."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._measured = _read(path) if path is not None else {}
        self._estimates: dict[str, RequiredMemory] = {}

    async def required(self, backend: Backend, spec: RunSpec) -> RequiredMemory:
        """Bytes to count for a run: the most that was measured of such a run, else the backend's estimate."""
        entry = _entry(backend, spec)
        known = self._measured.get(entry) or self._estimates.get(entry)
        if known is None:
            known = self._estimates[entry] = await backend.required_memory(spec)
        return known

    async def variants(self, backend: Backend, spec: RunSpec, budget: RequiredMemory) -> list[Variant]:
        """The backend's ways to run it, the preferred one first, each with the bytes to count for it."""
        found = await backend.variants(spec, budget)
        for variant in found:
            self._estimates[_entry(backend, variant.spec)] = variant.memory
        return [replace(v, memory=await self.required(backend, v.spec)) for v in found]

    def record(self, backend: Backend, spec: RunSpec, measured: RequiredMemory) -> RequiredMemory:
        """Remembers what a run was seen to hold; of several figures the largest counts, since engines touch their
        buffers only as prompts grow. Returns that figure. Devices that could not be measured keep their estimate."""
        entry = _entry(backend, spec)
        estimate = self._estimates.get(entry, RequiredMemory(0))
        best = self._measured.pop(entry, RequiredMemory(0, estimate.vram))
        vram = tuple(map(max, best.vram, measured.vram)) if measured.vram else best.vram
        now = RequiredMemory(max(best.ram, measured.ram), vram or measured.vram)
        self._measured[entry] = now  # at the end: the newest are kept longest
        if now != best:
            self._write()
        return now

    def _write(self) -> None:
        while len(self._measured) > _MAX_ENTRIES:
            del self._measured[next(iter(self._measured))]
        if self._path is None:
            return
        measured = {entry: {"ram": m.ram, "vram": m.vram} for entry, m in self._measured.items()}
        temporary = self._path.with_suffix(".tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"format": _FORMAT, "measured": measured}, indent=1), "utf-8")
            os.replace(temporary, self._path)  # without fsync: after a power cut the figures are measured again
        except OSError as error:
            log.warning("the memory ledger %s cannot be written: %s", self._path, error)


def _entry(backend: Backend, spec: RunSpec) -> str:
    parts: list[Any] = [backend.name, backend.version(), spec.model_id, spec.mode, spec.context_size, spec.parallel]
    parts += [spec.gpu_layers]
    parts += [spec.flags, spec.draft.model_id if spec.draft else None, sorted(spec.options.items())]
    return json.dumps(parts, default=str)


def _read(path: Path) -> dict[str, RequiredMemory]:
    """Nothing, with a warning, if the file is damaged or of another format: the figures come again."""
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        return {
            str(entry): RequiredMemory(int(m["ram"]), tuple(map(int, m["vram"])))
            for entry, m in content["measured"].items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("the memory ledger %s cannot be read (%s); models are measured again", path, error)
        return {}
