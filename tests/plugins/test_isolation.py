"""A backend that misbehaves hurts nobody but those who asked for its models."""

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from modelrunner.backend import BackendState, InstallProgress
from modelrunner.errors import BackendExited, BackendFaulty, BadRequest
from modelrunner.plugins.isolation import IsolatedBackend, call_backend
from modelrunner.processes import process
from modelrunner.sandbox import Sandbox
from modelrunner.types import Endpoint, Launch, Mode, ProcessOptions, RequiredMemory, RunSpec, Variant
from tests.fakes import FakeBackend, fake_spec
from tests.waiting import HUNG

ENDPOINT = Endpoint(path=Path("/nowhere/engine.sock"))


class Broken(FakeBackend):
    """Each method that is named in `does` calls what stands there instead."""

    def __init__(self, folder: Path, **does: Callable[..., Any]) -> None:
        super().__init__(folder)
        for method, function in does.items():
            setattr(self, method, function)


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return fake_spec(tmp_path)


@pytest.fixture
def isolated(tmp_path: Path) -> Iterator[Callable[..., IsolatedBackend]]:
    made: list[IsolatedBackend] = []

    def make(limit: float = HUNG, **does: Callable[..., Any]) -> IsolatedBackend:
        made.append(IsolatedBackend(Broken(tmp_path, **does), answer_limit=limit))
        return made[-1]

    yield make
    for backend in made:
        backend.close(patience=HUNG)


def returns(value: Any) -> Callable[..., Any]:
    return lambda *args: value


def raises(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any) -> NoReturn:
        raise error

    return fail


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("nobody may look")


async def test_a_system_without_threads_costs_only_the_calls_of_that_moment(isolated: Any, spec: RunSpec) -> None:
    backend = isolated(required_memory=returns(RequiredMemory(7)))
    before = threading.stack_size(1 << 47)  # more than a process can have
    try:
        with pytest.raises(BackendFaulty, match="can't start new thread"):
            await backend.required_memory(spec)
    finally:
        threading.stack_size(before)
    assert await backend.required_memory(spec) == RequiredMemory(7)


async def test_results_come_back_from_another_thread(isolated: Any, spec: RunSpec) -> None:
    seen: list[int] = []

    def required_memory(spec: RunSpec) -> RequiredMemory:
        seen.append(threading.get_ident())
        return RequiredMemory(7)

    backend = isolated(required_memory=required_memory)
    assert await backend.required_memory(spec) == RequiredMemory(7)
    assert seen != [threading.get_ident()]


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("required_memory", None),
        ("required_memory", 5_000_000_000),
        ("required_memory", RequiredMemory(-5_000_000_000)),
        ("required_memory", RequiredMemory(1.5)),  # type: ignore[arg-type]
        ("required_memory", RequiredMemory(True)),
        ("required_memory", RequiredMemory(1, (2, "3"))),  # type: ignore[arg-type]
        ("required_memory", RequiredMemory(1, [2])),  # type: ignore[arg-type]
        ("required_memory", RequiredMemory(1 << 80)),
        ("required_memory", RequiredMemory(1, others=(RequiredMemory(1),))),
        ("required_memory", Unprintable()),
        ("growth", RequiredMemory(1, shared=-1)),
        ("api", {"/v1/chat/completions": "chat"}),
        ("sleep_level", 3),
    ],
)
async def test_nonsense_is_a_fault_that_names_the_backend_and_the_call(
    isolated: Any, spec: RunSpec, method: str, value: Any
) -> None:
    backend = isolated(**{method: returns(value)})
    call = getattr(backend, method)
    with pytest.raises(BackendFaulty, match=f"backend fake .*`{method}` returned"):
        await (call(spec) if inspect.iscoroutinefunction(call) else call_backend(call, spec))


@pytest.mark.parametrize("value", [[], None, [1], [Variant(None, RequiredMemory(1))]])  # type: ignore[arg-type]
async def test_variants_are_checked(isolated: Any, spec: RunSpec, value: Any) -> None:
    with pytest.raises(BackendFaulty):
        await isolated(variants=returns(value)).variants(spec, RequiredMemory(1 << 30))


@pytest.mark.parametrize("part", [RequiredMemory(0), RequiredMemory(1), RequiredMemory(1, (2, 2)), None])
async def test_a_variant_over_several_hosts_says_what_each_of_them_gives(
    isolated: Any, spec: RunSpec, part: Any
) -> None:
    wrong = [Variant(spec, RequiredMemory(1, (2,)), hosts=2, part=part)]
    with pytest.raises(BackendFaulty):
        await isolated(variants=returns(wrong)).variants(spec, RequiredMemory(1 << 30))


@pytest.mark.parametrize("value", [math.inf, math.nan, None, "high", True])
async def test_a_priority_is_a_number(isolated: Any, spec: RunSpec, value: Any) -> None:
    with pytest.raises(BackendFaulty):
        await call_backend(isolated(priority=returns(value)).priority, spec.bundle)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
async def test_defaults_are_whole_and_positive(isolated: Any, spec: RunSpec, value: Any) -> None:
    backend = isolated(default_context_size=returns(value), default_parallel=returns(value))
    with pytest.raises(BackendFaulty):
        await call_backend(backend.default_context_size, spec.bundle)
    with pytest.raises(BackendFaulty):
        await call_backend(backend.default_parallel, spec.bundle, Mode.COMPLETION)


@pytest.mark.parametrize("value", [None, ({"threads": 1}, ()), ({"parallel": "many"}, ()), ({}, (1,))])
async def test_folded_flags_are_checked(isolated: Any, value: Any) -> None:
    with pytest.raises(BackendFaulty):
        await call_backend(isolated(fold_flags=returns(value)).fold_flags, ("--x",))


@pytest.mark.parametrize(
    "error", [ValueError("oh"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), TimeoutError()]
)
async def test_whatever_it_raises_is_its_fault_and_its_thread_lives(
    isolated: Any, spec: RunSpec, error: BaseException
) -> None:
    backend = isolated(required_memory=raises(error))
    with pytest.raises(BackendFaulty, match="backend fake"):
        await backend.required_memory(spec)
    assert (await call_backend(backend.status)).state is BackendState.RUNNING


async def test_an_error_of_the_contract_is_passed_on(isolated: Any) -> None:
    with pytest.raises(BadRequest, match="no such flag"):
        await call_backend(
            isolated(check_flags=raises(BadRequest("no such flag"))).check_flags, ("--x",), Mode.COMPLETION
        )


async def test_a_status_is_always_had(isolated: Any) -> None:
    for fault in (raises(ValueError("oh")), returns("Running")):
        status = await call_backend(isolated(status=fault).status)
        assert status.state is BackendState.ERROR
        assert "backend fake" in status.details


async def test_one_that_blocks_is_late_and_the_loop_goes_on(isolated: Any) -> None:
    released = threading.Event()
    backend = isolated(limit=0.2, status=lambda: released.wait(HUNG))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    try:
        assert "did not return within 0.2 s" in (await call_backend(backend.status)).details
        assert turns > 10
        assert "stuck in an earlier call" in (await call_backend(backend.status)).details
    finally:
        counting.cancel()
        released.set()


async def test_one_that_was_stuck_is_asked_again_once_it_is_free(isolated: Any) -> None:
    released = threading.Event()
    backend = isolated(limit=0.2, version=lambda: "1.0" if released.wait(HUNG) else "")
    assert await call_backend(backend.version) == ""
    released.set()
    async with asyncio.timeout(HUNG):
        while "stuck" in (await call_backend(backend.status)).details:
            await asyncio.to_thread(time.sleep, 0)
    assert await call_backend(backend.version) == "1.0"


async def test_one_that_hangs_is_cancelled_at_its_limit(isolated: Any) -> None:
    cancelled = threading.Event()

    async def hang(*args: Any) -> NoReturn:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    backend = isolated(limit=0.1, sleep_level=hang, version=returns("1.0"))
    with pytest.raises(BackendFaulty, match="within"):
        await call_backend(backend.sleep_level, None)
    assert await asyncio.to_thread(cancelled.wait, HUNG)
    async with asyncio.timeout(HUNG):  # a busy machine may take longer than the limit for an answer
        while await call_backend(backend.version) != "1.0":
            await asyncio.to_thread(time.sleep, 0)


async def test_a_caller_that_is_cancelled_cancels_the_call(isolated: Any, spec: RunSpec) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def hang(spec: RunSpec) -> NoReturn:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    call = asyncio.create_task(isolated(required_memory=hang).required_memory(spec))
    assert await asyncio.to_thread(begun.wait, 30)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(cancelled.wait, HUNG)


async def test_progress_of_an_installation_arrives_on_the_callers_loop(isolated: Any) -> None:
    async def install(progress: Callable[[InstallProgress], None], **options: Any) -> None:
        progress(InstallProgress("half", 1, 2))

    told: list[tuple[InstallProgress, int]] = []
    await isolated(install=install).install(lambda step: told.append((step, threading.get_ident())))
    await asyncio.sleep(0)
    assert told == [(InstallProgress("half", 1, 2), threading.get_ident())]


async def test_explanations_that_fail_are_left_out(isolated: Any) -> None:
    backend = isolated(explain=raises(ValueError()), ran_out_of_memory=returns("perhaps"))
    assert await call_backend(backend.explain, "tail", True) is None
    assert await call_backend(backend.ran_out_of_memory, "tail") is False


class Watcher:
    def __init__(self) -> None:
        self.pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.lines: list[str] = []

    def started(self, pid: int, sandbox: Sandbox) -> None:
        self.pid.set_result(pid)

    def output(self, line: str) -> None:
        self.lines.append(line)


def launch(folder: Path, watcher: Watcher | None = None, grace: float = 10.0) -> Launch:
    return Launch(ENDPOINT, ProcessOptions(folder / "engine.log", watcher, grace))


async def shell(launch: Launch, script: str) -> NoReturn:
    await process.run(["/bin/sh", "-c", script], env={}, options=launch.process)


async def test_a_run_tells_its_observer_and_announces_stages(isolated: Any, spec: RunSpec, tmp_path: Path) -> None:
    backend = isolated(
        run=lambda spec, launch: shell(launch, "echo loading; echo ready; exit 3"),
        progress=lambda line: {"loading": "loading weights"}.get(line) or raises(ValueError())(),
    )
    watcher = Watcher()
    with pytest.raises(BackendExited) as caught:
        await backend.run(spec, launch(tmp_path, watcher))
    assert caught.value.returncode == 3
    assert watcher.pid.result() > 0
    assert watcher.lines == ["loading", "ready"]
    assert [backend.progress(line) for line in watcher.lines] == ["loading weights", None]


async def test_a_stopped_run_leaves_no_process(isolated: Any, spec: RunSpec, tmp_path: Path) -> None:
    watcher = Watcher()
    backend = isolated(run=lambda spec, launch: shell(launch, "sleep 600"))
    running = asyncio.create_task(backend.run(spec, launch(tmp_path, watcher)))
    pid = await watcher.pid
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not psutil.pid_exists(pid)


async def test_a_run_that_returns_is_a_fault(isolated: Any, spec: RunSpec, tmp_path: Path) -> None:
    with pytest.raises(BackendFaulty, match="returned instead of keeping its engine"):
        await isolated(run=returns(None)).run(spec, launch(tmp_path))


async def test_an_engine_whose_backend_is_stuck_is_killed(
    isolated: Any, spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelrunner.plugins.isolation.KILL_AFTER", 0.2)
    released = threading.Event()
    backend = isolated(
        limit=0.1, run=lambda spec, launch: shell(launch, "sleep 600"), status=lambda: released.wait(HUNG)
    )
    watcher = Watcher()
    running = asyncio.create_task(backend.run(spec, launch(tmp_path, watcher, grace=0.1)))
    engine = psutil.Process(await watcher.pid)
    try:
        await call_backend(backend.status)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.to_thread(psutil.wait_procs, [engine], HUNG)
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    finally:
        released.set()


async def test_a_backend_that_is_not_isolated_is_asked_at_once(tmp_path: Path) -> None:
    backend = Broken(tmp_path, version=lambda: str(threading.get_ident()))
    assert await call_backend(backend.version) == str(threading.get_ident())


async def test_a_call_after_the_end_is_refused_and_starts_no_thread(isolated: Any) -> None:
    backend = isolated()
    backend.close()
    with pytest.raises(BackendFaulty, match="closed"):
        await backend.disk_usage()
    assert "backend fake" not in [thread.name for thread in threading.enumerate()]


def test_the_thread_ends_when_it_is_closed(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    backend = IsolatedBackend(FakeBackend(tmp_path))
    backend.status()
    (thread,) = set(threading.enumerate()) - before
    backend.close()
    thread.join(HUNG)
    assert not thread.is_alive()
