"""A runner with the fake engine as a real process: readiness, failure, stopping."""

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from modelrunner.engine.excess import Excess
from modelrunner.engine.lastwords import last_words
from modelrunner.engine.localrunner import LocalRunner, ProcessPhase
from modelrunner.engine.readiness import free_port, pause
from modelrunner.engine.runner import check_model
from modelrunner.errors import (
    BackendExited,
    BackendUnavailable,
    EngineFailed,
    EngineProtocolError,
    Misdirected,
    OutOfMemory,
    TimedOut,
)
from modelrunner.processes import process
from modelrunner.processes.processtree import activity_of, private_memory, process_tree
from modelrunner.types import Endpoint, ProcessOptions, RequiredMemory, RunSpec
from tests.fakes import FakeBackend, FakeClock, FakeTcpBackend, Observer, fake_key, fake_launch, fake_spec, of_code
from tests.ports import reserved_port
from tests.waiting import HUNG

GRACE = 100 * HUNG
"""Seconds that an engine would get: what ends within `HUNG` did not wait for them."""


class Watched:
    """A runner in a task, and what it reported."""

    def __init__(self, backend, spec, folder, launch, **options) -> None:
        self.launch = launch
        self.runner = LocalRunner(backend, spec, fake_key(spec, backend), launch, id="r1", folder=folder, **options)
        self.seen: list[tuple[ProcessPhase, str]] = []
        self._changed = asyncio.Event()
        self.loaded_for: str | None = ""
        self.task = asyncio.create_task(self.runner.run(self._note, lambda: self.loaded_for))

    def _note(self) -> None:
        self.seen.append((self.runner.process_phase, self.runner.stage))
        self._changed.set()

    async def until(self, condition) -> LocalRunner:
        """`condition(runner)`, which may only become true with a reported change."""
        async with asyncio.timeout(HUNG):
            while not condition(self.runner):
                self._changed.clear()
                waiting = asyncio.create_task(self._changed.wait())
                await asyncio.wait([waiting, self.task], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if self.task.done():
                    await self.task
        return self.runner

    async def ready(self) -> LocalRunner:
        return await self.until(lambda runner: runner.process_phase is ProcessPhase.READY)

    async def stop(self) -> None:
        self.task.cancel()
        async with asyncio.timeout(HUNG):
            with pytest.raises(asyncio.CancelledError):
                await self.task


@pytest.fixture
def watch(tmp_path):
    def watch(*knobs: str, backend=None, endpoint=None, stop_grace=2.0, **options) -> Watched:
        folder, spec = tmp_path / "run", fake_spec(tmp_path, *knobs)
        launch = fake_launch(folder, endpoint, stop_grace)
        return Watched(backend or FakeBackend(tmp_path), spec, folder, launch, **options)

    return watch


@pytest.fixture
def port():
    with reserved_port() as port:
        yield port


async def test_states_and_stages_are_reported(watch, tmp_path):
    watched = watch("--gate", str(tmp_path / "gate"))
    runner = await watched.until(lambda runner: runner.stage == "loading model")
    assert runner.pid is not None
    assert runner.ready_at is None
    (tmp_path / "gate").touch()
    await watched.ready()
    assert runner.ready_at >= runner.started
    await watched.stop()
    states = [state for state, _ in watched.seen]
    assert states == sorted(states, key=list(ProcessPhase).index)
    assert states[-2:] == [ProcessPhase.READY, ProcessPhase.STOPPING]
    assert (runner.pid, runner.failure) == (None, None)


async def test_devices_are_looked_at_before_the_engine_begins_and_when_it_is_gone(watch):
    told = []

    class Devices:
        def begin(self):
            told.append(("begin", watched.runner.pid))

        def held(self, pid, planned):
            told.append(("held", pid))
            return planned

        def end(self):
            told.append(("end", watched.runner.pid))

    watched = watch(on_devices=Devices())
    watched.runner.expect(RequiredMemory(1 << 30, (0, 5)))
    runner = await watched.ready()
    pid, measured = runner.pid, await runner.memory()
    assert measured.vram == (0, 5)
    await watched.stop()
    assert told == [("begin", None), ("held", pid), ("end", None)]


@pytest.mark.parametrize("early", [True, False])
async def test_ready_once_the_engine_is(watch, tmp_path, early):
    """It answers 503 before that, or does not listen at all."""
    watched = watch("--gate", str(tmp_path / "gate"), *([] if early else ["--gate-before-listening"]))
    await watched.until(lambda runner: runner.stage == "loading model")
    opened = time.monotonic()
    (tmp_path / "gate").touch()
    runner = await watched.ready()
    assert runner.ready_at > opened
    await watched.stop()


def test_an_engine_is_asked_again_soon_however_long_it_takes():
    assert pause(0.0, 0.0) == 0.01
    assert pause(10.0, 10.0) == pytest.approx(0.1)
    assert pause(600.0, 0.5) == pytest.approx(0.05), "it has just logged something"
    assert pause(600.0, 600.0) == 0.25


async def test_crash_at_start_is_told_in_the_engine_s_words(watch):
    watched = watch("--crash", "error: the\x1b[31m model is\x07 broken")
    with pytest.raises(BackendExited) as caught:
        await watched.task
    assert (
        caught.value.message == "the engine fake exited with 1 while it was starting: error: the [31m model is broken"
    )
    assert caught.value.returncode == 1
    assert watched.runner.failure is caught.value
    assert watched.runner.process_phase is ProcessPhase.STOPPING


@of_code("it explains the engine's words")
async def test_crash_while_serving_is_explained_by_the_backend(watch):
    watched = watch("--die", "before-headers")
    runner = await watched.ready()
    with pytest.raises(OSError, match=r".*"):
        await runner.upstream.fetch("POST", "/v1/completions", b"{}", timeout=HUNG)
    with pytest.raises(BackendExited, match=r"^the engine fake was ended by signal 9: the fake engine threw up$"):
        await watched.task
    assert not runner.endpoint.path.exists()


@pytest.mark.parametrize(
    ("kills", "said", "kind"),
    [([3, 4], "memory ran out", OutOfMemory), ([3, 3], "ended by signal 9", BackendExited)],
)
async def test_killed_for_memory_is_told_apart(watch, kills, said, kind):
    watched = watch(oom_kills=iter(kills).__next__)
    runner = await watched.ready()
    os.kill(runner.pid, signal.SIGKILL)
    with pytest.raises(BackendExited, match=said) as caught:
        await watched.task
    assert type(caught.value) is kind


async def test_an_engine_that_was_refused_memory_is_told_apart(watch, tmp_path):
    class Starved(FakeBackend):
        def ran_out_of_memory(self, tail):
            return "unable to allocate" in tail

    with pytest.raises(OutOfMemory):
        await watch("--crash", "fake::error: unable to allocate 9 GiB", backend=Starved(tmp_path)).task
    with pytest.raises(BackendExited) as caught:
        await watch("--crash", "fake::error: unknown architecture", backend=Starved(tmp_path)).task
    assert not isinstance(caught.value, OutOfMemory)


async def test_missing_engine(watch, tmp_path):
    backend = FakeBackend(tmp_path)
    backend.executable = ("/nonexistent/engine",)
    with pytest.raises(BackendUnavailable, match="/nonexistent/engine"):
        await watch(backend=backend).task


@pytest.mark.parametrize(
    "knobs", [["--never-ready"], ["--never-ready", "--access-log"], ["--gate-before-listening", "--never-ready"]]
)
async def test_engine_that_never_gets_ready(watch, knobs):
    """The echo of our own health checks in its log is no progress."""
    clock = FakeClock()
    watched = watch(*knobs, stall_limit=30.0, clock=clock)
    await watched.until(lambda runner: runner.stage == "loading model")
    await pass_time(clock, watched.task)
    with pytest.raises(
        TimedOut, match=r"no progress for 30 seconds while it was loading model: .*loading model"
    ) as caught:
        await watched.task
    assert watched.runner.failure is caught.value


async def pass_time(clock: FakeClock, task: asyncio.Task) -> None:
    """A second of the runner's time for each look that it takes, from what was waited for until it has ended."""
    began = clock.now
    while not task.done():
        clock.advance(1.0)
        assert clock.now < began + 600, "it should have been given up long ago"
        await asyncio.wait([task], timeout=0.01)


async def test_a_start_that_only_goes_on_logging_is_given_up(watch):
    clock = FakeClock()
    watched = watch("--never-ready", "--log-every", "0.01", stall_limit=30.0, clock=clock)
    await watched.until(lambda runner: runner.stage == "loading weights")
    await pass_time(clock, watched.task)
    with pytest.raises(TimedOut, match=r"not ready after 3\d\d seconds while it was loading weights"):
        await watched.task


def lines_logged(pid: int, log: Path) -> float:
    return log.read_text().count("loading weights")


def processor_time(pid: int, log: Path) -> float:
    return activity_of(pid).cpu


@pytest.mark.parametrize(
    ("noise", "progress", "least"), [(["--log-every", "0.01"], lines_logged, 1), (["--spin"], processor_time, 0.5)]
)
async def test_a_slow_start_that_makes_progress_is_no_stall(watch, tmp_path, noise, progress, least):
    """The clock goes on by less than the stall limit, each time after so much progress, for three limits in all."""
    clock, limit = FakeClock(), 2.0
    watched = watch("--gate", str(tmp_path / "gate"), *noise, stall_limit=limit, clock=clock)
    runner = await watched.until(lambda runner: runner.stage.startswith("loading"))
    log = watched.launch.process.log_path
    for _ in range(6):
        before = progress(runner.pid, log)
        async with asyncio.timeout(HUNG):
            while progress(runner.pid, log) < before + least:
                assert not watched.task.done()
                await asyncio.sleep(0.01)
        clock.advance(limit / 2)
    (tmp_path / "gate").touch()
    await watched.ready()
    await watched.stop()


async def test_a_health_check_that_is_not_answered_with_http(watch, tmp_path):
    backend = FakeBackend(tmp_path)
    program = tmp_path / "engine"
    program.write_text("#!/bin/sh\necho loading up; exec sleep 100\n")
    program.chmod(0o755)
    backend.executable = (str(program),)
    clock = FakeClock()
    watched = watch(backend=backend, stall_limit=30.0, clock=clock)
    await watched.until(lambda runner: runner.stage == "loading up")
    await pass_time(clock, watched.task)
    with pytest.raises(TimedOut, match="loading up"):
        await watched.task


async def test_engine_on_tcp(watch, tmp_path, port):
    watched = watch(backend=FakeTcpBackend(tmp_path), endpoint=Endpoint(host="127.0.0.1", port=port))
    runner = await watched.ready()
    assert (await runner.upstream.fetch("GET", "/v1/models", timeout=HUNG))[0] == 200
    await watched.stop()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("knobs", [[], ["--gate-before-listening", "--never-ready"]])
async def test_a_stranger_that_answers_health_is_not_taken_for_the_engine(watch, tmp_path, port, address, knobs):
    """Whether the engine gives up, or waits without listening."""
    there = Observer()
    argv = [*FakeBackend.executable, "--host", address, "--port", str(port)]
    options = ProcessOptions(tmp_path / "stranger.log", there)
    stranger = asyncio.create_task(process.run(argv, env=process.scrubbed_environment(), options=options))
    await there.line("ready")
    watched = watch(*knobs, backend=FakeTcpBackend(tmp_path), endpoint=Endpoint(host="127.0.0.1", port=port))
    with pytest.raises(EngineFailed, match="is taken by process" if knobs else "is taken by"):
        await watched.task
    assert ProcessPhase.READY not in [state for state, _ in watched.seen]
    assert not stranger.done()
    stranger.cancel()
    await asyncio.wait([stranger])


async def test_a_port_that_is_taken_leads_to_another(watch, tmp_path, port):
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        first = Endpoint(host="127.0.0.1", port=port)
        watched = watch(backend=FakeTcpBackend(tmp_path), endpoint=first, other_port=free_port)
        runner = await watched.ready()
        assert runner.endpoint != first
        assert (await runner.upstream.fetch("GET", "/v1/models", timeout=HUNG))[0] == 200
        await watched.stop()


async def test_an_engine_that_forks_workers_is_no_stranger(watch, tmp_path, port):
    """Workers that hold its listening socket come and go all the time."""
    for _ in range(10):
        watched = watch("--forking", backend=FakeTcpBackend(tmp_path), endpoint=Endpoint(host="127.0.0.1", port=port))
        await watched.ready()
        await watched.stop()


async def test_a_listener_of_a_worker_process_is_the_engine_s(watch, tmp_path, port):
    """An engine may listen from a process that has left its session."""
    backend = FakeTcpBackend(tmp_path)
    backend.executable = ("sh", "-c", 'setsid -f "$@"; exec sleep 100', "sh", *FakeTcpBackend.executable)
    watched = watch(backend=backend, endpoint=Endpoint(host="127.0.0.1", port=port))
    await watched.ready()
    await watched.stop()


async def test_leftover_socket_file_does_no_harm(watch, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "r.sock"))
    watched = watch()
    await watched.ready()
    await watched.stop()
    assert not folder.exists()


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55])
async def test_cancelled_at_any_moment(watch, turns):
    watched = watch(stop_grace=GRACE)
    for _ in range(turns):
        await asyncio.sleep(0.001)
    await watched.stop()
    assert watched.runner.pid is None


async def test_cancelled_twice_does_not_wait_for_the_grace(watch):
    watched = watch("--ignore-term", stop_grace=GRACE)
    await watched.ready()
    watched.task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    await watched.stop()


class Parting(FakeBackend):
    """Notes its last exchange with the engine."""

    parted = False
    hangs = False

    async def before_stop(self, spec: RunSpec, endpoint: Endpoint, owner: str | None) -> None:
        assert endpoint.path is not None
        await super().before_stop(spec, endpoint, owner)
        self.parted = endpoint.path.exists()
        if self.hangs:
            await asyncio.Event().wait()


@of_code("it saves something of a run")
async def test_the_backend_is_heard_before_a_stop(watch, tmp_path):
    backend = Parting(tmp_path)
    watched = watch(backend=backend)
    await watched.ready()
    await watched.stop()
    assert backend.parted


@of_code("it saves something of a run")
async def test_the_backend_is_not_heard_before_readiness_or_after_the_end(watch, tmp_path):
    backend = Parting(tmp_path)
    watched = watch("--never-ready", backend=backend)
    await watched.until(lambda runner: runner.pid is not None)
    await watched.stop()
    watched = watch(backend=backend)
    os.kill((await watched.ready()).pid, signal.SIGKILL)
    with pytest.raises(BackendExited):
        await watched.task
    assert not backend.parted


@of_code("it saves something of a run")
@pytest.mark.parametrize(
    ("loaded_for", "requests", "used_by"),
    [("", [], ""), ("kim", ["kim"], "kim"), ("kim", ["lee"], None), (None, [], None), (None, ["lee"], "lee")],
)
async def test_the_backend_is_told_whose_the_engine_is(watch, tmp_path, loaded_for, requests, used_by):
    backend = FakeBackend(tmp_path)
    watched = watch(backend=backend)
    watched.loaded_for = loaded_for
    (await watched.ready()).owners.update(requests)
    await watched.stop()
    assert (backend.loaded_for, backend.used_by) == ([loaded_for], [used_by])


@of_code("it saves something of a run")
async def test_a_backend_that_cannot_part_holds_up_for_the_grace_at_most(watch, tmp_path, caplog):
    backend = Parting(tmp_path)
    backend.hangs = True
    watched = watch(backend=backend, stop_grace=0.2)
    await watched.ready()
    await watched.stop()
    assert "was not done" in caplog.text


async def test_a_backend_with_a_bug(watch, tmp_path, caplog):
    class Broken(FakeBackend):
        async def run(self, spec, launch):
            raise KeyError("argv")

    with pytest.raises(EngineFailed, match="the backend fake failed: KeyError: 'argv'"):
        await watch(backend=Broken(tmp_path)).task
    assert "Traceback" in caplog.text


async def test_a_backend_that_returns(watch, tmp_path):
    class Returning(FakeBackend):
        async def run(self, spec, launch):
            return

    with pytest.raises(EngineFailed, match="returned"):
        await watch(backend=Returning(tmp_path)).task


async def test_the_guard(watch):
    watched = watch()
    check_model(watched.runner, watched.runner.spec.model_id)
    with pytest.raises(Misdirected, match=r"runner r1 serves docker.io/ai/fake:latest"):
        check_model(watched.runner, "sha256:" + "0" * 64)
    await watched.stop()


async def test_a_runner_told_to_stop_never_becomes_ready(watch, tmp_path):
    watched = watch("--gate", str(tmp_path / "gate"))
    await watched.until(lambda runner: runner.pid is not None)
    watched.runner.mark_stopping()
    (tmp_path / "gate").touch()
    await watched.stop()
    assert ProcessPhase.READY not in [state for state, _ in watched.seen]


async def test_measured_memory_is_that_of_all_its_processes(watch):
    watched = watch("--allocate", "64", "--grandchild", "setsid")
    runner = await watched.ready()
    measured = await runner.memory()
    assert 64 << 20 < measured.ram < 128 << 20
    await watched.stop()
    assert await runner.memory() is None


def test_last_words_are_the_last_lines_without_controls():
    assert last_words("a\nb\n\n\x1b[1mc\td\x00\n   \ne\n".splitlines()) == "b | [1mc d | e"
    assert len(last_words(["x" * 10_000])) == 400
    assert last_words([]) == ""


class StuckBackend(FakeBackend):
    """Its engine neither falls asleep nor wakes."""

    def sleep_level(self, spec) -> int:
        return 0

    async def sleep(self, spec, endpoint) -> None:
        await asyncio.Event().wait()

    async def wake(self, spec, endpoint) -> None:
        raise ConnectionResetError("it hung up")


async def test_an_engine_that_does_not_sleep_or_wake_has_failed(watch, tmp_path):
    watched = watch(backend=StuckBackend(tmp_path), stop_grace=0.05)
    runner = await watched.ready()
    with pytest.raises(EngineFailed, match=r"did not fall asleep within 0\.05 seconds"):
        await runner.sleep()
    with pytest.raises(EngineFailed, match=r"did not wake up: .*it hung up"):
        await runner.wake()
    await watched.stop()


async def test_a_backend_that_cannot_sleep_says_so(watch):
    watched = watch()
    runner = await watched.ready()
    assert runner.sleep_level == 0
    with pytest.raises(EngineFailed, match="fake cannot sleep"):
        await runner.sleep()
    await watched.stop()


async def test_the_loop_goes_on_while_a_folder_of_many_files_is_removed(watch, tmp_path):
    """An engine may fill its folder; /health answers meanwhile."""
    watched = watch()
    await watched.ready()
    files = [tmp_path / "run" / str(number) for number in range(15_000)]
    for file in files:
        file.touch()
    watched.task.cancel()
    between = False
    while not watched.task.done():
        left = sum(file.exists() for file in files[::1000])
        between |= 0 < left < len(files) // 1000
        await asyncio.sleep(0)
    assert watched.task.cancelled()
    assert between
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("when", ["while it starts", "once it serves"])
async def test_an_engine_that_takes_far_more_memory_than_was_planned_is_ended(watch, tmp_path, when):
    gate = tmp_path / "gate"
    watched = watch("--allocate", "300", "--gate", str(gate))
    watched.runner.expect(RequiredMemory(1 << 30))
    limit, watched.runner._excess.limit = watched.runner._excess.limit, 200 << 20
    assert 2 << 30 <= limit <= 8 << 30
    if when == "once it serves":
        watched.runner._excess.limit = limit
        gate.touch()
        await watched.ready()
        watched.runner._excess.limit = 200 << 20
    async with asyncio.timeout(HUNG):
        with pytest.raises(EngineFailed, match="far more than was planned"):
            await watched.task
    assert not (tmp_path / "run").exists()


async def test_memory_that_the_processes_of_an_engine_share_counts_once(watch, tmp_path):
    watched = watch("--allocate", "100", "--sharing", "6")
    await watched.ready()
    pid = watched.runner.pid
    assert sum(private_memory(process.pid) for process in process_tree(pid)) > 300 << 20
    excess = Excess(tmp_path / "run")
    excess.limit = 300 << 20
    assert excess.fault(pid) == ""
    excess.limit = 50 << 20
    assert "far more than was planned" in excess.fault(pid)
    await watched.stop()


async def test_an_engine_that_fills_its_folder_is_ended(watch, tmp_path):
    watched = watch()
    await watched.ready()
    for number in range(20_100):
        (tmp_path / "run" / str(number)).touch()
    async with asyncio.timeout(HUNG):
        with pytest.raises(EngineFailed, match="20000 files"):
            await watched.task


async def test_an_engine_cannot_lead_the_daemon_to_another_program(watch, tmp_path):
    """By a link in the place of its socket. The other program sees nothing, and the engine ends."""
    seen = []

    async def accept(reader, writer):
        seen.append(await reader.read())
        writer.close()
        await writer.wait_closed()

    watched = watch()
    runner = await watched.ready()
    assert (await runner.upstream.fetch("GET", "/health", timeout=HUNG))[0] == 200
    other = await asyncio.start_unix_server(accept, str(tmp_path / "other.sock"))
    (tmp_path / "run" / "r.sock").unlink()
    (tmp_path / "run" / "r.sock").symlink_to(tmp_path / "other.sock")
    with pytest.raises(EngineProtocolError, match="another program"):
        await runner.upstream.fetch("GET", "/health", timeout=HUNG)
    async with asyncio.timeout(HUNG):
        with pytest.raises(EngineFailed, match="in the place of its own"):
            await watched.task
    other.close()
    await other.wait_closed()
    assert b"".join(seen) == b""
