"""The engines of vLLM: their versions in this release, and the installed one."""

import functools
import json
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from modelrunner.sdk import BackendContext, EngineDevice, enginecache, output_of

# scripts/lock writes the locks, which pin all other packages.
VERSION = "0.32.0"
# The CPU build of torch is on an index of PyTorch's own, whose files the locks cannot name: the version is pinned and
# the index is trusted.
TORCH_CPU = "2.13.0+cpu"
LOCKS = Path(__file__).with_name("locks")


class EngineKind(StrEnum):
    """The kinds of vLLM's engines: its build for NVIDIA GPUs, and that for processors."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Engine:
    """`program` is the interpreter of the engine's environment."""

    kind: EngineKind
    program: Path
    version: str

    def __str__(self) -> str:
        return f"vLLM {self.version} ({self.kind})"

    def marker(self) -> dict[str, Any]:
        return {"kind": self.kind, "version": self.version}


def link(context: BackendContext) -> Path:
    """Returns the link by which this data directory uses an engine."""
    return context.engines / "vllm"


def find(context: BackendContext) -> Engine | None:
    """Returns the engine here, None if there is none."""
    return usable(link(context))


def usable(folder: Path) -> Engine | None:
    """Returns the finished engine in `folder`, None for any other content, or if the interpreter that the engine needs
    is gone."""
    folder = folder.resolve()  # an update may change the link before the program starts
    marker, program = enginecache.read_marker(folder), folder / "bin/python"
    if marker is None or marker.get("kind") not in list(EngineKind) or not os.access(program, os.X_OK):
        return None
    return Engine(EngineKind(marker["kind"]), program, str(marker.get("version")))


_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
_LIST = """import json, torch
found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
fields = [[f"cuda:{n}", d.name, d.total_memory, d.total_memory, str(d.uuid)] for n, d in enumerate(found)]
print(json.dumps(fields))"""
_PATIENCE = 50.0  # seconds; torch takes some to be imported


def devices(engine: Engine) -> tuple[EngineDevice, ...]:
    """Returns the devices that the engine's torch has, without asking the CPU build. Raises `OSError` as `output_of`
    does."""
    if engine.kind is EngineKind.CPU:
        return ()
    return _listed(engine.program, os.stat(engine.program).st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _listed(program: Path, _stamp: int) -> tuple[EngineDevice, ...]:
    said = output_of([program, "-I", "-c", _LIST], env=dict(os.environ) | _ORDER, timeout=_PATIENCE)
    try:
        return tuple([EngineDevice(*fields) for fields in json.loads(said.splitlines()[-1])])
    except (ValueError, TypeError, IndexError) as error:
        raise OSError(f"torch lists devices that nobody understands: {error}") from None
