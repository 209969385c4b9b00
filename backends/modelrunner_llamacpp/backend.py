"""The llama.cpp backend: one adapter over llama-server, the prebuilt wheel and llama-cpp-python."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

from modelrunner.sdk import (
    Backend,
    BackendContext,
    BackendState,
    BackendStatus,
    BackendUnavailable,
    BadRequest,
    Bundle,
    Endpoint,
    EngineApi,
    EngineDevice,
    Launch,
    Mode,
    ModelFormat,
    ModelRunnerError,
    ProgressCallback,
    QuantizeSpec,
    RequiredMemory,
    RunSpec,
    Variant,
    enginecache,
    run,
)
from modelrunner_llamacpp import (
    args,
    cards,
    engines,
    environment,
    errors,
    flags,
    install,
    memory,
    quantize,
    repack,
    requests,
    rpc,
    split,
)
from modelrunner_llamacpp.engines import Engine, EngineKind, limited_threads
from modelrunner_llamacpp.hparams import Header
from modelrunner_llamacpp.model_options import LlamaCppOptions
from modelrunner_llamacpp.settings import LlamaCppSettings
from modelrunner_llamacpp.slotfiles import SlotFiles
from modelrunner_llamacpp.slots import SlotKeeper, keeper_for

_INSTALL = "install it with `modelrunner install llama.cpp`"
# llama.cpp notices that a client has left between two batches only, and 2,048 tokens take a processor many seconds.
# Smaller ones were not measurably slower there (docs/performance.md); on a device they are.
_CPU_BATCH = 64
_TRANSCRIPTION = Mode("transcription")


class LlamaCppBackend(Backend):
    name: ClassVar[str] = "llama.cpp"
    formats: ClassVar[frozenset[ModelFormat]] = frozenset({ModelFormat.GGUF})
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.COMPLETION, Mode.EMBEDDING, Mode.RERANKING})
    shared_modes = MappingProxyType({_TRANSCRIPTION: (Mode.COMPLETION, "audio")})  # a chat about a sound
    installs_on_demand: ClassVar[bool] = True
    takes_adapters: ClassVar[bool] = True
    settings_model = LlamaCppSettings
    options_model = LlamaCppOptions
    settings: LlamaCppSettings

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._installing = enginecache.InstallState()
        self._servers = rpc.Servers(self.settings.rpc)
        self._saved = SlotFiles(context.state / "slots", self.settings.slot_cache) if context.state else None
        self._keepers: dict[Endpoint, SlotKeeper] = {}
        self._features = repack.features()
        self._listed: tuple[Engine, Sequence[EngineDevice]] | None = None  # when it was asked last
        if self._saved:
            self._saved.heal()

    async def install(
        self, progress: ProgressCallback, *, build: bool = False, variant: str = "", **options: Any
    ) -> None:
        """Installs the engine for this machine, or `variant`. With `build`, and where no wheel fits the platform, it
        compiles a llama-server."""
        if options:
            raise BadRequest(f"llama.cpp has no option {min(options)!r} for its installation")
        with self._installing.reported("llama.cpp", progress) as tell:
            await install.install(self.context, self.settings, tell, build=build, variant=variant)

    async def update(self, progress: ProgressCallback, **options: Any) -> None:
        """Installs the version of this release, or of the settings, for every installed engine, or the wheel if there
        is no engine."""
        used = engines.current(self.context)
        chosen = used.readlink() if used.is_symlink() else None
        installed = [(kind, variant) for kind, variant, _ in engines.links(self.context)]
        for kind, variant in installed or [(EngineKind.WHEEL, "")]:
            build = kind is EngineKind.NATIVE and variant != "vulkan"
            await self.install(progress, **{"build": build, "variant": variant, **options})
        if chosen is not None and not options:
            engines.choose(self.context, chosen)

    async def uninstall(self) -> None:
        """Removes all managed engines, and the leftovers of interrupted installations. It keeps entries of the cache
        that another data directory uses."""
        for _, _, link in [*engines.links(self.context)]:
            await enginecache.withdraw(link)
        engines.current(self.context).unlink(missing_ok=True)
        await enginecache.discard_leftovers(self.context.cache, self.name)

    async def run(self, spec: RunSpec, launch: Launch) -> NoReturn:
        engine, endpoint = self._engine(), launch.endpoint
        args.check(spec, engine.kind)
        options = self._options(spec, engine, self._threads())
        keeper = await asyncio.to_thread(keeper_for, self._saved, self.settings, spec, engine, options)
        if keeper is not None:
            self._keepers[endpoint] = keeper
            options = keeper.options
        folder = keeper.folder if keeper else None
        options = options | args.owned(spec, endpoint, engine, folder)
        if engine.kind is EngineKind.NATIVE and (listed := self._devices_of(engine)):
            options = args.by_name(options, listed)
        shaders = await asyncio.to_thread(environment.shader_folder, engine, self.context.cache)
        env = environment.variables(spec, shaders, environment.has_bound_threads(engine, options))
        argv = args.command(engine, options)
        permissions = environment.permissions(engine, [each for each in (folder, shaders) if each], options)
        try:
            with self._servers.used(options["--rpc"].split(",") if "--rpc" in options else ()):
                await run(argv, env=env, options=launch.process, permissions=permissions)
        finally:
            self._keepers.pop(endpoint, None)

    async def quantize(self, spec: QuantizeSpec, progress: ProgressCallback) -> None:
        await quantize.quantize(self._engine(), spec, self.settings.threads or limited_threads(), progress)

    async def after_ready(self, spec: RunSpec, endpoint: Endpoint, owner: str | None) -> None:
        if owner is not None and (keeper := self._keepers.get(endpoint)):
            await keeper.restore(endpoint, owner)

    async def before_stop(self, spec: RunSpec, endpoint: Endpoint, owner: str | None) -> None:
        """Saves the slots for `owner`. llama.cpp does not say which request used which slot, so slots that several
        owners have used are not saved."""
        if owner is not None and (keeper := self._keepers.get(endpoint)):
            await keeper.save(endpoint, owner)

    async def forget(self, model_id: str) -> None:
        if self._saved:
            await asyncio.to_thread(self._saved.forget, model_id)

    def status(self) -> BackendStatus:
        if self._installing.step:
            return BackendStatus(BackendState.INSTALLING, self._installing.step)
        try:
            engine = self._find()
        except BackendUnavailable as error:
            return BackendStatus(BackendState.ERROR, error.message)
        if engine is None:
            why = self._installing.failure or "no llama.cpp engine was found"
            return BackendStatus(BackendState.NOT_INSTALLED, why)
        lists_none = self._listed is not None and self._listed[0] == engine and not self._listed[1]
        card = cards.find() if engine.devices is False or lists_none else None
        there = ", ".join(f"{device.name} {device.description}" for device in self._devices_of(engine))
        details = f"{engine} on {there}" if there else str(engine)
        return BackendStatus(
            BackendState.RUNNING, details, card.advice(is_for_it=engine.devices is not False) if card else ""
        )

    def version(self) -> str:
        engine = self._engine_now()
        return f"{engine.version} ({engine.kind})" if engine else ""

    async def disk_usage(self) -> int:
        """Counts the managed engines. Saved prompt caches lie in `context.state`, which the daemon counts."""
        return await asyncio.to_thread(enginecache.disk_usage, self._folders())

    def api(self, spec: RunSpec) -> EngineApi:
        return requests.api(spec, in_python=self._kind() is EngineKind.PYTHON)

    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        return await asyncio.to_thread(self._required, spec, self._find(), self._threads())

    def growth(self, spec: RunSpec) -> RequiredMemory:
        return memory.growth(spec, self._options(spec, self._find(), self._threads()))

    def devices(self) -> Sequence[EngineDevice]:
        engine = self._engine_now()
        if engine is None:
            return ()
        theirs = self._servers.devices(lambda server: engines.devices_of_server(engine, server))
        devices = (*engines.devices(engine), *theirs)
        self._listed = engine, devices
        return devices

    def _devices_of(self, engine: Engine) -> Sequence[EngineDevice]:
        """Returns what the engine listed when it was asked last."""
        return self._listed[1] if self._listed is not None and self._listed[0] == engine else ()

    async def variants(self, spec: RunSpec, budget: RequiredMemory) -> Sequence[Variant]:
        """Returns the variants in the order of split.py. They use the budget's devices if the engine can."""
        engine, threads = self._find(), self._threads()
        rooms = () if engine is not None and engine.devices is False else budget.vram

        def place(smaller: RunSpec) -> list[list[split.Placement]]:
            return memory.placements(smaller, self._options(smaller, engine, threads), rooms)

        def required(smaller: RunSpec) -> RequiredMemory:
            return self._required(smaller, engine, threads)

        layers = Header(spec.bundle.header).layers
        spec = memory.placed_by_hand(spec, self._options(spec, engine, threads), rooms)
        variants = await asyncio.to_thread(split.variants, spec, place, required, layers)
        listed = self._devices_of(engine) if engine is not None else ()
        return [rpc.alone(variant, listed, rooms) for variant in variants]

    def check_flags(self, flags_: tuple[str, ...], mode: Mode) -> None:
        flags.parse(flags_)

    def fold_flags(self, flags_: tuple[str, ...]) -> tuple[Mapping[str, int | None], tuple[str, ...]]:
        return flags.fold(flags_)

    def check(self, spec: RunSpec) -> None:
        args.check(spec, self._kind())

    def default_context_size(self, bundle: Bundle) -> int:
        return memory.default_context(bundle)

    def default_parallel(self, bundle: Bundle, mode: Mode) -> int:
        return memory.default_parallel(bundle, memory.default_context(bundle))

    def tunings(self, spec: RunSpec) -> Sequence[tuple[str, ...]]:
        if (engine := self._engine_now()) is None:
            return ()
        found = args.tunings(engines.thread_counts(self._threads()) if engine.devices is False else None)
        own = flags.parse(spec.flags)
        return [words for words in found if own.keys().isdisjoint(words)]

    def explain(self, tail: str, quotes: bool) -> str | None:
        return errors.explain(tail, quotes)

    def request_error(self, status: int, message: str, fields: Mapping[str, Any]) -> ModelRunnerError | None:
        return errors.request_error(status, message, fields)

    def ran_out_of_memory(self, tail: str) -> bool:
        return errors.ran_out_of_memory(tail)

    def progress(self, line: str) -> str | None:
        return errors.stage(line)

    def _engine(self) -> Engine:
        engine = self._find()
        if engine is None:
            raise BackendUnavailable(f"there is no llama.cpp engine here: {_INSTALL}")
        return engine

    def _find(self) -> Engine | None:
        return engines.find(self.context, self.settings)

    def _engine_now(self) -> Engine | None:
        with contextlib.suppress(BackendUnavailable):
            return self._find()
        return None

    def _kind(self) -> EngineKind | None:
        """Returns the kind of the engine that `run` would start, None if there is none."""
        engine = self._engine_now()
        return engine.kind if engine else None

    def _threads(self) -> int | None:
        return self.settings.threads or limited_threads()

    def _required(self, spec: RunSpec, engine: Engine | None, threads: int | None) -> RequiredMemory:
        kind = engine.kind if engine is not None else EngineKind.WHEEL
        return memory.required(spec, kind, self._options(spec, engine, threads), self._features)

    def _options(self, spec: RunSpec, engine: Engine | None, threads: int | None) -> dict[str, str]:
        """Returns the options of a run, without those that depend on its endpoint."""
        if engine is not None and engine.kind is EngineKind.PYTHON:
            spec = replace(spec, parallel=1)  # it answers one request after the other
        batch = _CPU_BATCH if engine is not None and engine.devices is False else None
        own = LlamaCppOptions.of(spec.options).prompt_cache
        cache = own if own is not None else self.settings.prompt_cache or memory.cache_of_other_prompts(spec)
        managed = engine is not None and engine.devices is False and engine.folder is not None
        rearranged = managed and repack.most(spec.bundle.header.tensors, self._features)
        return args.effective(spec, cache_ram=cache >> 20, threads=threads, batch=batch, rearranged=rearranged)

    def _folders(self) -> list[Path]:
        """Returns the folders of the managed engines that this data directory uses."""
        return [link.resolve() for _, _, link in engines.links(self.context) if link.exists()]
