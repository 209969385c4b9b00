"""The vLLM backend: safetensors models on a GPU, or on the CPU where there is none."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from modelrunner.sdk import (
    MESSAGES_ENDPOINTS,
    OPENAI_ENDPOINTS,
    ApiShape,
    Backend,
    BackendContext,
    BackendState,
    BackendStatus,
    BackendUnavailable,
    BadRequest,
    Bundle,
    Endpoint,
    EndpointApi,
    EngineApi,
    EngineDevice,
    Launch,
    Mode,
    ModelFormat,
    ModelRunnerError,
    ProgressCallback,
    RequiredMemory,
    RunSpec,
    Variant,
    calls,
    check_context,
    default_context_size,
    enginecache,
    run,
)
from modelrunner_vllm import args, engines, environment, errors, flags, install, memory
from modelrunner_vllm.engines import VERSION, Engine, EngineKind
from modelrunner_vllm.environment import Scratch, check_reachable
from modelrunner_vllm.install import VllmSettings
from modelrunner_vllm.machine import Machine, has_cuda
from modelrunner_vllm.model import sentence_limit
from modelrunner_vllm.model_options import VllmOptions

_PARALLEL = 16
_COMPILED = f"vllm-compiled-{VERSION}"
_WAKE_LIMIT = 120.0  # seconds
_ENDPOINTS = {**OPENAI_ENDPOINTS, **MESSAGES_ENDPOINTS, "/score": EndpointApi(ApiShape.SCORE)}
# The number of batches that gave an answer something, and the share of the cache in use, 0 to 1. While a long prompt is
# computed in pieces, only the share moves before the last piece. The API server answers while another process computes,
# so a stuck engine reports the same figures again.
_WORK = ("vllm:iteration_tokens_total_count", "vllm:kv_cache_usage_perc")


class VllmBackend(Backend):
    name: ClassVar[str] = "vllm"
    formats: ClassVar[frozenset[ModelFormat]] = frozenset({ModelFormat.SAFETENSORS})
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.COMPLETION, Mode.EMBEDDING, Mode.RERANKING})
    settings_model = VllmSettings
    settings: VllmSettings
    options_model = VllmOptions
    takes_adapters: ClassVar[bool] = True

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._installing = enginecache.InstallState()
        self._scratch = Scratch(context.engines)
        self._scratch.sweep()

    async def install(self, progress: ProgressCallback, **options: Any) -> None:
        if options:
            raise BadRequest(f"vllm has no option {min(options)!r} for its installation")
        with self._installing.reported("vLLM", progress) as tell:
            await install.install(self.context, self.settings, tell)

    async def uninstall(self) -> None:
        """Removes the environment, unless another data directory uses it, and the leftovers of interrupted
        installations."""
        await enginecache.withdraw(engines.link(self.context))
        await enginecache.discard_leftovers(self.context.cache, self.name)

    async def run(self, spec: RunSpec, launch: Launch) -> NoReturn:
        engine = self._engine()
        args.check(spec, engine.kind)
        if ray_address := VllmOptions.of(spec.options).ray_address:
            await check_reachable(ray_address)
        cache = memory.kv_cache(spec, engine.kind)
        share = memory.share(spec, engine.kind, await asyncio.to_thread(self._totals))
        with self._scratch.run() as scratch:
            folder = scratch.folder
            argv = args.command(spec, launch.endpoint, engine, kv_cache=cache, share=share, scratch=folder)
            env = environment.variables(spec, engine, self._compiled(), scratch)
            permissions = environment.permissions(spec, engine, self._compiled(), scratch)
            await run(argv, env=env, options=launch.process, cwd=folder, permissions=permissions)

    def priority(self, bundle: Bundle) -> float:
        """Raises `BackendUnavailable` if there is no vLLM for the machine."""
        if engines.find(self.context) is None:
            Machine.here().build(self.settings.build)
        return 0.0

    def status(self) -> BackendStatus:
        if self._installing.step:
            return BackendStatus(BackendState.INSTALLING, self._installing.step)
        if (engine := engines.find(self.context)) is not None:
            return BackendStatus(BackendState.RUNNING, str(engine))
        return BackendStatus(BackendState.NOT_INSTALLED, self._installing.failure or "vLLM was not installed yet")

    def version(self) -> str:
        engine = engines.find(self.context)
        return f"{engine.version} ({engine.kind})" if engine else ""

    async def disk_usage(self) -> int:
        """Counts the environment, and the code that was compiled for models."""
        link = engines.link(self.context)
        folders = [folder for folder in (link.resolve(), self._compiled()) if folder.exists()]
        return await asyncio.to_thread(enginecache.disk_usage, folders)

    def api(self, spec: RunSpec) -> EngineApi:
        """The guard inside the API server (inside/modelrunner_guard.py) answers at the paths of
        `settled` and `fields`; it reads the fields from vLLM's own models of a request. It hears nothing, because the
        packages that read sound are not installed: they take 250 MB, and no model here needs them."""
        return replace(
            EngineApi.openai(spec.mode, spec.bundle.name),
            endpoints=_ENDPOINTS,
            work=_WORK,
            settled="/modelrunner/settled",
            fields="/modelrunner/fields",
            checks_model=True,
            lacks=frozenset({"audio"}),
        )

    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        return await asyncio.to_thread(lambda: memory.required(spec, self._kind()))

    def devices(self) -> Sequence[EngineDevice] | None:
        if (engine := engines.find(self.context)) is None:
            return () if self._kind() is EngineKind.CPU else None
        return engines.devices(engine)

    async def variants(self, spec: RunSpec, budget: RequiredMemory) -> Sequence[Variant]:
        """Returns a variant for each set of devices. A budget that has some is of the CUDA build, also where the host
        with it has them and this machine has none."""
        kind = EngineKind.CUDA if budget.vram else self._kind()
        names = os.environ.get(memory.VISIBLE, "").split(",")
        visible = names if len(names) >= len(budget.vram) else [str(number) for number in range(len(budget.vram))]

        def place() -> list[Variant]:
            return memory.placed(spec, kind, len(budget.vram), visible, self._totals())

        return await asyncio.to_thread(place)

    def check_flags(self, flags_: tuple[str, ...], mode: Mode) -> None:
        flags.parse(flags_)

    def fold_flags(self, flags_: tuple[str, ...]) -> tuple[dict[str, int | None], tuple[str, ...]]:
        return flags.fold(flags_)

    def check(self, spec: RunSpec) -> None:
        check_context(spec)
        if spec.draft is not None and spec.draft.format not in self.formats:
            raise BadRequest(f"vllm takes no draft model in the {spec.draft.format} format", param="speculative")
        args.check(spec, self._kind())

    def default_context_size(self, bundle: Bundle) -> int:
        return min(default_context_size(bundle), sentence_limit(bundle) or sys.maxsize)

    def default_parallel(self, bundle: Bundle, mode: Mode) -> int:
        return _PARALLEL

    def explain(self, tail: str, quotes: bool) -> str | None:
        return errors.explain(tail, quotes)

    def request_error(self, status: int, message: str, fields: Mapping[str, Any]) -> ModelRunnerError | None:
        return errors.request_error(status, message, fields)

    def ran_out_of_memory(self, tail: str) -> bool:
        return errors.ran_out_of_memory(tail)

    def progress(self, line: str) -> str | None:
        return errors.stage(line)

    def sleep_level(self, spec: RunSpec) -> int:
        return (VllmOptions.of(spec.options).sleep or 0) if self._kind() is EngineKind.CUDA else 0

    async def sleep(self, spec: RunSpec, endpoint: Endpoint) -> None:
        await self._ask(endpoint, f"/sleep?level={self.sleep_level(spec)}&mode=wait")

    async def wake(self, spec: RunSpec, endpoint: Endpoint) -> None:
        if self.sleep_level(spec) == 1:
            await self._ask(endpoint, "/wake_up")
            return
        await self._ask(endpoint, "/wake_up?tags=weights")
        await self._ask(endpoint, "/collective_rpc", {"method": "reload_weights"})  # sleep of level 2 dropped them
        await self._ask(endpoint, "/wake_up?tags=kv_cache")

    async def _ask(self, endpoint: Endpoint, path: str, body: object = None) -> None:
        status, answer = await calls.ask(endpoint, "POST", path, body, timeout=_WAKE_LIMIT)
        if status != 200:
            raise BackendUnavailable(f"vLLM refused {path} with {status}: {answer}")

    def _totals(self) -> list[int]:
        """Returns the bytes of each of the engine's devices; none where it does not say."""
        try:
            return [device.total for device in self.devices() or ()]
        except OSError:  # the daemon says it, since it asks for the devices itself
            return []

    def _engine(self) -> Engine:
        engine = engines.find(self.context)
        if engine is None:
            raise BackendUnavailable("vLLM is not installed here: install it with `modelrunner install vllm`")
        return engine

    def _kind(self) -> EngineKind:
        """Returns the kind of the installed engine, or of the one that an installation would make."""
        if (engine := engines.find(self.context)) is not None:
            return engine.kind
        return self.settings.build or (EngineKind.CUDA if has_cuda() else EngineKind.CPU)

    def _compiled(self) -> Path:
        return self.context.cache / _COMPILED
