"""Installs vLLM in an environment of its own."""

import asyncio
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from modelrunner.sdk import BackendContext, ProgressCallback, enginecache
from modelrunner.sdk.packages import Environment, Torch, find_python, interpreter
from modelrunner_vllm.engines import VERSION, Engine, EngineKind, link, usable
from modelrunner_vllm.machine import Machine

_MODULE = "vllm.entrypoints.launchers.api_server.entry"


class VllmSettings(BaseModel):
    """The table `[backends.vllm]` of the configuration. The settings are all optional.

    - `build` is "cuda" or "cpu". By default the machine's devices decide.
    - `torch_index` is the index that has the CPU build of torch: PyTorch's index of CPU builds, or a copy of it. By
      default pip's own configuration decides.
    - `python` makes the engine's environment. By default it is the interpreter that runs modelrunner.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    build: EngineKind | None = None
    torch_index: str | None = None
    python: Path | None = None


async def install(context: BackendContext, settings: VllmSettings, progress: ProgressCallback) -> None:
    """Installs vLLM. Raises `BackendUnavailable` with the machine's shortcoming or with pip's reason, and
    `InsufficientDisk`."""
    python = await asyncio.to_thread(find_python, settings.python, "vLLM")
    build = Machine.here(python.version).build(settings.build)
    options = (*python.identity, settings.torch_index or "", build.lock.read_text("utf-8"))
    entry = context.cache / enginecache.key(f"vllm-{build.kind}", VERSION, *options)
    torch = Torch(build.torch, settings.torch_index, "backends.vllm") if build.torch else None
    title, log = f"{build.package} {VERSION}", context.logs / "install-vllm.log"
    work = Environment(title, python, build.lock, _MODULE, entry, log, progress, torch)

    def works(folder: Path) -> bool:
        return usable(folder) is not None

    async def make(folder: Path) -> dict[str, Any]:
        await work.make(folder)
        return Engine(build.kind, interpreter(folder), VERSION).marker()

    await enginecache.provide(link(context), entry, make, works, progress, needed=build.needed)
