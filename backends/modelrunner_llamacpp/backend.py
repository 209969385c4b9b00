"""The llama.cpp backend: one adapter over llama-server, the prebuilt wheel and llama-cpp-python."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from modelrunner import (
    Backend,
    BackendContext,
    BackendState,
    BackendStatus,
    BackendUnavailable,
    BadRequest,
    Bundle,
    Endpoint,
    InstallProgress,
    Mode,
    ModelFormat,
    ProgressCallback,
    RequiredMemory,
    RunSpec,
    enginecache,
)
from modelrunner.process import run, scrubbed_environment
from modelrunner_llamacpp import args, engines, errors, flags, memory
from modelrunner_llamacpp.build import install_build
from modelrunner_llamacpp.cpus import limited_threads
from modelrunner_llamacpp.engines import Engine, Kind
from modelrunner_llamacpp.install import NoWheel, compiler, install_wheel
from modelrunner_llamacpp.model_options import LlamaCppOptions
from modelrunner_llamacpp.settings import LlamaCppSettings

_INSTALL = "install it with `modelrunner install llama.cpp`"
_MANAGED = (Kind.NATIVE, Kind.WHEEL)
# llama.cpp notices that a client has left between two batches only, and 2,048 tokens take a processor many seconds.
# Smaller ones were not measurably slower there (docs/performance.md); on a device they are.
_CPU_BATCH = 64
_KEPT_VARIABLES = ("GGML_*", "LLAMA_CPP_LIB_PATH")  # never LLAMA_ARG_*, which would be flags past the allow-list


class LlamaCppBackend(Backend):
    name: ClassVar[str] = "llama.cpp"
    formats: ClassVar[frozenset[ModelFormat]] = frozenset({ModelFormat.GGUF})
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.COMPLETION, Mode.EMBEDDING, Mode.RERANKING})
    settings_model = LlamaCppSettings
    options_model = LlamaCppOptions
    settings: LlamaCppSettings

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._installing = ""
        self._failure = ""

    async def install(self, progress: ProgressCallback, *, build: bool = False, **options: Any) -> None:
        """The prebuilt wheel; with `build` a llama-server compiled here, and also where no wheel fits the platform."""
        if options:
            raise BadRequest(f"llama.cpp has no option {min(options)!r} for its installation")
        with self._installation(progress) as tell:
            if build:
                await install_build(self.context, tell)
            else:
                await self._install_wheel(tell)

    async def update(self, progress: ProgressCallback, **options: Any) -> None:
        """What is installed, in the version of this release; the wheel if nothing is."""
        installed = [kind for kind in _MANAGED if engines.link(self.context, kind).is_symlink()]
        for kind in installed or [Kind.WHEEL]:
            await self.install(progress, **{"build": kind is Kind.NATIVE, **options})

    async def uninstall(self) -> None:
        """Both managed engines; the cache keeps what another data directory uses."""
        for kind in _MANAGED:
            await enginecache.withdraw(engines.link(self.context, kind))

    async def run(self, spec: RunSpec, endpoint: Endpoint) -> NoReturn:
        engine = self._engine()
        options = self._options(spec) | args.owned(spec, endpoint, engine)
        env = scrubbed_environment(keep=_KEPT_VARIABLES) | dict(spec.environment)
        await run(args.command(engine, options), env=env, options=spec.process)

    def status(self) -> BackendStatus:
        if self._installing:
            return BackendStatus(BackendState.INSTALLING, self._installing)
        try:
            engine = engines.find(self.context, self.settings)
        except BackendUnavailable as error:
            return BackendStatus(BackendState.ERROR, error.message)
        if engine is None:
            return BackendStatus(BackendState.NOT_INSTALLED, self._failure or "no llama.cpp engine was found")
        return BackendStatus(BackendState.RUNNING, str(engine))

    def version(self) -> str:
        with contextlib.suppress(BackendUnavailable):
            engine = engines.find(self.context, self.settings)
            return f"{engine.version} ({engine.kind})" if engine else ""
        return ""

    async def disk_usage(self) -> int:
        return await asyncio.to_thread(enginecache.disk_usage, self._folders())

    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        return memory.required(spec.bundle, spec.draft, self._options(spec))

    def check_flags(self, flags_: tuple[str, ...], mode: Mode) -> None:
        flags.parse(flags_)

    def default_parallel(self, bundle: Bundle, mode: Mode) -> int:
        return 4

    def explain(self, tail: str) -> str | None:
        return errors.explain(tail)

    def ran_out_of_memory(self, tail: str) -> bool:
        return errors.ran_out_of_memory(tail)

    def progress(self, line: str) -> str | None:
        return errors.stage(line)

    def _engine(self) -> Engine:
        engine = engines.find(self.context, self.settings)
        if engine is None:
            raise BackendUnavailable(f"there is no llama.cpp engine here: {_INSTALL}")
        return engine

    def _options(self, spec: RunSpec) -> dict[str, str]:
        """Without what depends on the endpoint and the engine."""
        threads = self.settings.threads or limited_threads()
        engine = engines.find(self.context, self.settings)
        batch = _CPU_BATCH if engine is not None and engine.devices is False else None
        return args.effective(spec, cache_ram=self.settings.prompt_cache >> 20, threads=threads, batch=batch)

    def _folders(self) -> list[Path]:
        """Where the managed engines that this data directory uses lie."""
        links = (engines.link(self.context, kind) for kind in _MANAGED)
        return [link.resolve() for link in links if link.exists()]

    async def _install_wheel(self, progress: ProgressCallback) -> None:
        try:
            await install_wheel(self.context, self.settings, progress)
        except NoWheel as error:
            if compiler() is None:
                raise BackendUnavailable(
                    f"{error.message}, and there is no C++ compiler to build it: install one (g++ or clang++), "
                    "then `modelrunner install --build llama.cpp`"
                ) from None
            progress(InstallProgress(f"{error.message}: building it"))
            await install_build(self.context, progress)

    @contextlib.contextmanager
    def _installation(self, progress: ProgressCallback) -> Iterator[ProgressCallback]:
        """Keeps what `status` shows up to date."""

        def tell(step: InstallProgress) -> None:
            self._installing = f"{step.message} ({step.current}/{step.total})" if step.total else step.message
            progress(step)

        self._installing, self._failure = "llama.cpp", ""
        try:
            yield tell
        except BackendUnavailable as error:
            self._failure = error.message
            raise
        finally:
            self._installing = ""
