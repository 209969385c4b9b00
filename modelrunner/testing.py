"""The suite for every backend, ours and others', as a pytest class.

A backend's test is a subclass with the file of a small model and one fixture:

    from modelrunner.testing import BackendContract

    class TestMyBackend(BackendContract):
        model = "/path/to/small.gguf"

        @pytest.fixture
        def backend(self, context):
            return MyBackend(context)

`context` gives the backend folders of its own. `model` is a GGUF file or a folder of safetensors; a subclass that wants
another mode or flags overrides the fixture `spec` and may use `spec_for`. The backend's engine is installed already.
pytest-asyncio is needed, in either mode. A subclass whose engine takes longer than two minutes to become ready sets
`load_limit`, in seconds.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from modelrunner.backend import (
    Backend,
    BackendContext,
    BackendState,
    ChecksRuns,
    Grows,
    HasDefaults,
    HasVariants,
    Ranks,
    Sleeps,
    TakesFlags,
    Tunes,
    Versioned,
)
from modelrunner.engine.connections import UpstreamPool
from modelrunner.engine.localrunner import LocalRunner, ProcessPhase
from modelrunner.engine.readiness import free_port
from modelrunner.engine.runner import check_model
from modelrunner.errors import BackendExited, BadRequest, Misdirected
from modelrunner.plugins.isolation import COROUTINES, WORK_LIMIT, IsolatedBackend
from modelrunner.processes.processtree import process_tree
from modelrunner.sandbox import Permissions
from modelrunner.store import Store
from modelrunner.types import Endpoint, Launch, Mode, ProcessOptions, RequiredMemory, RunnerKey, RunSpec

CALL_LIMIT = 5.0
"""Seconds for a call that only computes."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")
_REQUESTS: dict[Mode, tuple[str, dict[str, Any]]] = {
    Mode.COMPLETION: ("/v1/completions", {"prompt": "Hello", "max_tokens": 4}),
    Mode.EMBEDDING: ("/v1/embeddings", {"input": "Hello"}),
    Mode.RERANKING: ("/v1/rerank", {"query": "Hello", "documents": ["Good day", "Goodbye"]}),
}


@pytest.mark.asyncio
class BackendContract:
    """The tests take `backend` and `spec` alone. The module's docstring shows how to use the class."""

    model: ClassVar[str | Path]
    load_limit: ClassVar[float] = 120.0

    @pytest.fixture
    def context(self, tmp_path: Path) -> BackendContext:
        """Returns the folders that the backend may write in, without settings."""
        folders = {name: tmp_path / name for name in ("engines", "cache", "logs")}
        for folder in folders.values():
            folder.mkdir()
        return BackendContext(**folders, settings={}, state=tmp_path / "state")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Gives a subclass with a `model` the fixture `spec`. A subclass without one may use a fixture of its
        module."""
        super().__init_subclass__(**kwargs)
        if "model" in vars(cls) and "spec" not in vars(cls):
            cls.spec = pytest.fixture(_spec)  # type: ignore[attr-defined]

    async def test_name_fits_an_address(self, backend: Backend) -> None:
        assert _NAME.fullmatch(backend.name), "lowercase, at most 32 characters, safe in a URL and in a socket's path"

    async def test_says_what_it_runs(self, backend: Backend, spec: RunSpec) -> None:
        assert spec.bundle.format in backend.formats
        assert spec.mode in backend.modes

    async def test_status_is_running(self, backend: Backend) -> None:
        assert backend.status().state is BackendState.RUNNING

    async def test_disk_usage_is_a_number_of_bytes(self, backend: Backend) -> None:
        assert await backend.disk_usage() >= 0

    async def test_required_memory_is_positive_and_grows_with_the_context(
        self, backend: Backend, spec: RunSpec
    ) -> None:
        small = await backend.required_memory(spec)
        large = await backend.required_memory(replace(spec, context_size=spec.context_size * 4))
        assert small.ram + sum(small.vram) > 0
        assert small.ram + sum(small.vram) <= large.ram + sum(large.vram)

    async def test_each_call_gives_in_time_what_it_promises(self, backend: Backend, spec: RunSpec) -> None:
        """A call that raises, blocks, hangs or returns nonsense fails here with the sentence that users would get."""
        budget = RequiredMemory(1 << 50, (1 << 50,) * 8)
        isolated = IsolatedBackend(backend, answer_limit=CALL_LIMIT, work_limit=WORK_LIMIT)
        try:
            status = await asyncio.to_thread(isolated.status)
            assert status.state is not BackendState.ERROR, status.details
            bundle, mode, flags = spec.bundle, spec.mode, spec.flags
            calls: tuple[tuple[type, str, tuple[Any, ...]], ...] = (
                (Backend, "api", (spec,)),
                (Backend, "disk_usage", ()),
                (Backend, "required_memory", (spec,)),
                (Versioned, "version", ()),
                (Ranks, "priority", (bundle,)),
                (HasDefaults, "default_context_size", (bundle,)),
                (HasDefaults, "default_parallel", (bundle, mode)),
                (Tunes, "tunings", (spec,)),
                (TakesFlags, "check_flags", (flags, mode)),
                (TakesFlags, "fold_flags", (flags,)),
                (ChecksRuns, "check", (spec,)),
                (Grows, "growth", (spec,)),
                (HasVariants, "variants", (spec, budget)),
                (Sleeps, "sleep_level", (spec,)),
            )
            for kind, method, arguments in calls:
                if isinstance(backend, kind):
                    call = getattr(isolated, method)
                    await (call(*arguments) if method in COROUTINES else asyncio.to_thread(call, *arguments))
        finally:
            isolated.close(CALL_LIMIT)

    async def test_unknown_flags_are_refused(self, backend: Backend, spec: RunSpec) -> None:
        if not isinstance(backend, TakesFlags):
            return  # the daemon allows none
        for flag in ("--modelrunner-knows-no-such-flag", "positional"):
            with pytest.raises(BadRequest):
                backend.check_flags((flag,), spec.mode)

    async def test_becomes_ready_and_answers(self, backend: Backend, spec: RunSpec) -> None:
        async with running(backend, spec, self.load_limit) as (runner, _):
            path, request = _REQUESTS.get(spec.mode, ("", {}))
            if path in runner.api.endpoints:
                body = json.dumps({"model": spec.bundle.references[0], **request}).encode()
                status, answer = await runner.upstream.fetch("POST", path, body, timeout=self.load_limit)
                assert status == 200, answer
                assert isinstance(json.loads(answer), dict)
            if (probe := runner.api.probe) is not None:
                status, answer = await runner.upstream.fetch("POST", probe.path, probe.body, timeout=self.load_limit)
                assert status == 200, answer

    async def test_demands_the_key_that_it_was_given(self, backend: Backend, spec: RunSpec) -> None:
        if not backend.uses_tcp:
            return  # nobody else reaches its socket
        async with running(backend, spec, self.load_limit) as (runner, _):
            assert runner.process is not None
            if any("asks for no key" in gap for gap in runner.process.sandbox.gaps):
                return
            bare = UpstreamPool(replace(runner.endpoint, headers=()))
            status, answer = await bare.fetch("POST", next(iter(runner.api.endpoints)), b"{}", timeout=CALL_LIMIT)
            assert status in (401, 403), f"it answers a request without its key: {answer!r}"

    async def test_another_model_is_misdirected(self, backend: Backend, spec: RunSpec) -> None:
        async with running(backend, spec, self.load_limit) as (runner, _):
            check_model(runner, spec.model_id)
            with pytest.raises(Misdirected) as caught:
                check_model(runner, "sha256:" + "f" * 64)
            assert caught.value.status == 421

    async def test_memory_can_be_measured(self, backend: Backend, spec: RunSpec) -> None:
        async with running(backend, spec, self.load_limit) as (runner, _):
            measured = await runner.memory()
            assert measured is not None
            assert measured.ram > 0

    async def test_cancelled_leaves_nothing(self, backend: Backend, spec: RunSpec) -> None:
        async with running(backend, spec, self.load_limit, owner=None) as (runner, task):
            processes = tree(runner)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not alive(processes)
            assert runner.process_phase is ProcessPhase.STOPPING
            assert runner.endpoint.path is None or not runner.endpoint.path.exists()

    async def test_cancelled_while_starting_leaves_nothing(self, backend: Backend, spec: RunSpec) -> None:
        runner = make_runner(backend, spec)
        changed = asyncio.Event()
        task = asyncio.create_task(runner.run(changed.set))
        async with asyncio.timeout(self.load_limit):
            await changed.wait()
        processes = tree(runner)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not alive(processes)

    async def test_killed_engine_is_reported_and_not_restarted(self, backend: Backend, spec: RunSpec) -> None:
        async with running(backend, spec, self.load_limit) as (runner, task):
            processes = tree(runner)
            assert runner.pid is not None
            os.kill(runner.pid, signal.SIGKILL)
            async with asyncio.timeout(5):
                with pytest.raises(BackendExited) as caught:
                    await task
            assert caught.value.returncode == -signal.SIGKILL
            assert caught.value.tail, "the engine's last words"
            assert not alive(processes)
            assert runner.failure is caught.value


def _spec(self: BackendContract, tmp_path: Path) -> RunSpec:
    return spec_for(Path(self.model), tmp_path)


def spec_for(model: Path, folder: Path, *, mode: Mode | None = None, context_size: int = 512) -> RunSpec:
    """Returns a run of the model in `model`, a GGUF file or a folder of safetensors, which is copied into a store in
    `folder`. The default `mode` is the model's main one. Raises `InvalidModel` for a file that is no model."""
    store = Store(folder / "models")
    paths = {"model.gguf": model} if model.is_file() else {path.name: path for path in model.iterdir()}
    blobs = {}
    for name, path in paths.items():
        copy = store.partial / name
        shutil.copyfile(path, copy)
        blobs[name] = store.ingest(copy)
    bundle = store.bundle(store.create(blobs, "contract").id)
    if mode is None:
        mode = next((mode for mode in Mode.known() if mode in bundle.capabilities), Mode.COMPLETION)
    return RunSpec(bundle.model_id, bundle, mode, context_size, 1)


@asynccontextmanager
async def running(
    backend: Backend,
    spec: RunSpec,
    limit: float,
    owner: str | None = "",
    stop_grace: float = 10.0,
    log: Path | None = None,
) -> AsyncIterator[tuple[LocalRunner, "asyncio.Task[None]"]]:
    """Yields a ready runner and its task, loaded for `owner`. Times are in seconds. `log` is a file that outlives
    the run. Fails with the engine's error if the engine does not become ready."""
    runner = make_runner(backend, spec, stop_grace, log)
    ready = asyncio.Event()

    def changed() -> None:
        if runner.process_phase is ProcessPhase.READY:
            ready.set()

    task = asyncio.create_task(runner.run(changed, lambda: owner))
    is_ready = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait([task, is_ready], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        assert ready.is_set(), f"{backend.name} is not ready after {limit:g} seconds, but {runner.stage}"
        yield runner, task
    finally:
        is_ready.cancel()
        task.cancel()
        await asyncio.wait([task, is_ready])
        if not task.cancelled():
            task.exception()


def make_runner(backend: Backend, spec: RunSpec, stop_grace: float = 10.0, log: Path | None = None) -> LocalRunner:
    """Returns a runner on a Unix socket with a short path, or on a free port. Its engine is confined, as the daemon
    does it."""
    permissions = Permissions(reads=spec.bundle.paths + (spec.draft.paths if spec.draft else ()))
    key = RunnerKey(backend.name, spec.model_id, spec.mode)
    folder = Path(tempfile.gettempdir()) / f"modelrunner-{os.urandom(6).hex()}"
    endpoint = free_port() if backend.uses_tcp else Endpoint(path=folder / "e.sock")
    other_port = free_port if backend.uses_tcp else None
    launch = Launch(
        endpoint, ProcessOptions(log or folder / "engine.log", stop_grace=stop_grace, permissions=permissions)
    )
    return LocalRunner(backend, spec, key, launch, id="contract", folder=folder, other_port=other_port)


def tree(runner: LocalRunner) -> list[psutil.Process]:
    """Returns the processes of the runner's engine."""
    return [] if runner.pid is None else process_tree(runner.pid)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Returns the processes that are neither gone nor zombies of another parent."""
    living = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living
