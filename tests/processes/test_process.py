"""process.run with real children: whatever they do, they end, and nothing of them is left."""

import asyncio
import errno
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from modelrunner.errors import BackendExited, BackendUnavailable, Unavailable
from modelrunner.processes import process
from modelrunner.types import ProcessOptions
from tests.fakes import FAKE_ENGINE, Observer
from tests.waiting import HUNG

GRACE = 100 * HUNG
"""Seconds that an engine would get: what ends within `HUNG` did not wait for them. Grandchildren live for an hour."""


@pytest.fixture
def start(tmp_path):
    """Starts a command as a task; the observer has what it says."""

    def start(*argv: str, grace: float = 2.0, **options) -> tuple[asyncio.Task, Observer]:
        observer = Observer()
        env = options.pop("env", process.scrubbed_environment())
        kept = ProcessOptions(tmp_path / "logs" / "engine.log", observer, stop_grace=grace, **options)
        return asyncio.create_task(process.run(argv, env=env, options=kept)), observer

    return start


def guardian_of(observer: Observer) -> psutil.Process:
    guardian = psutil.Process(observer.pid).parent()
    assert guardian is not None
    return guardian


def engine(tmp_path: Path, *knobs: str) -> list[str]:
    return [sys.executable, "-I", "-S", str(FAKE_ENGINE), "--socket", str(tmp_path / "e.sock"), *knobs]


def is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


async def stop(task: asyncio.Task) -> None:
    """Cancels it and waits for its end."""
    task.cancel()
    async with asyncio.timeout(HUNG):
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_exit_code_and_last_words(start):
    task, observer = start("sh", "-c", "echo some words; echo last words >&2; exit 3")
    with pytest.raises(BackendExited, match="exited with 3") as caught:
        await task
    assert caught.value.returncode == 3
    assert caught.value.tail == "some words\nlast words\n"
    assert observer.lines == ["some words", "last words"]
    assert observer.pid is not None


async def test_end_by_a_signal(start):
    task, _ = start("sh", "-c", "kill -SEGV $$")
    with pytest.raises(BackendExited) as caught:
        await task
    assert caught.value.returncode == -signal.SIGSEGV


async def test_guardian_is_reaped(start):
    before = psutil.Process().children()
    task, _ = start("true")
    with pytest.raises(BackendExited):
        await task
    assert psutil.Process().children() == before


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (None, 0, errno.ENOENT),
        (b"#!/bin/sh\n", 0o644, errno.EACCES),
        (b"neither script nor program", 0o755, errno.ENOEXEC),
        (b"#!/nonexistent/interpreter\n", 0o755, errno.ENOENT),
    ],
)
async def test_what_cannot_be_executed(start, tmp_path, content, mode, reason):
    program = tmp_path / "program"
    if content is not None:
        program.write_bytes(content)
        program.chmod(mode)
    task, observer = start(str(program))
    with pytest.raises(BackendUnavailable) as caught:
        await task
    assert str(program) in caught.value.message
    assert os.strerror(reason) in caught.value.message
    assert observer.pid is None


async def test_missing_working_directory(tmp_path):
    with pytest.raises(BackendUnavailable, match="No such file"):
        await process.run(["true"], env={}, options=ProcessOptions(tmp_path / "log"), cwd=tmp_path / "gone")


@pytest.mark.parametrize("free", range(8))
async def test_hardly_a_descriptor_left(start, free):
    """However far it gets: it says so, and gives back what it had taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(name) for name in os.listdir("/proc/self/fd")) + 8, hard))
    spent: list[int] = []
    try:
        with suppress(OSError):
            while True:
                spent.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(free):
            os.close(spent.pop())
        task, _ = start("true")
        await asyncio.wait([task])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in spent:
            os.close(fd)
    assert isinstance(task.exception(), Unavailable if free < 5 else Unavailable | BackendExited)


async def test_command_line_that_is_too_long(start):
    task, _ = start("true", "x" * (200 << 10))
    with pytest.raises(BackendUnavailable, match="too long"):
        await task


async def test_command_line_with_a_nul(start):
    task, _ = start("true", "a\0b")
    with pytest.raises(BackendUnavailable, match="Invalid argument"):
        await task


async def test_surroundings_of_the_engine(start, monkeypatch):
    """Nothing of the daemon's: descriptors, terminal, signal settings, environment, core dumps."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    held = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    monkeypatch.setenv("HF_TOKEN", "secret")
    try:
        status = "grep -E '^Sig(Blk|Ign)' /proc/self/status; cat /proc/$$/oom_score_adj; env"
        script = f"readlink /proc/self/fd/0; ls /proc/self/fd | wc -w; umask; ulimit -c; {status}"
        task, observer = start("sh", "-c", script)
        with pytest.raises(BackendExited):
            await task
    finally:
        signal.signal(signal.SIGUSR1, held)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
        os.close(reader)
        os.close(writer)
    said = observer.lines
    assert said[:4] == ["/dev/null", "4", "0077", "0"]  # ls has one of its own for the folder
    assert [int(line.split()[1], 16) for line in said[4:6]] == [0, 0]
    assert said[6] == "500"
    assert "HF_TOKEN=secret" not in said


async def test_stop_is_graceful(start):
    task, observer = start(
        "sh", "-c", "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.01; done", grace=GRACE
    )
    await observer.line("up")
    await stop(task)
    assert "bye" in observer.lines


async def test_term_is_ignored(start, tmp_path):
    task, observer = start(*engine(tmp_path, "--ignore-term"), grace=0.3)
    await observer.line("ready")
    await stop(task)
    assert not is_alive(observer.pid)


async def test_stopped_process_ends_gracefully(start, tmp_path):
    task, observer = start(*engine(tmp_path), grace=GRACE)
    await observer.line("ready")
    os.kill(observer.pid, signal.SIGSTOP)
    await stop(task)


async def test_stopped_process_that_ignores_term(start, tmp_path):
    task, observer = start(*engine(tmp_path, "--ignore-term"), grace=0.2)
    await observer.line("ready")
    os.kill(observer.pid, signal.SIGSTOP)
    await stop(task)


async def test_second_cancellation_skips_the_grace(start, tmp_path):
    task, observer = start(*engine(tmp_path, "--ignore-term"), grace=GRACE)
    await observer.line("ready")
    task.cancel()
    await observer.line("TERM is ignored")
    assert not task.done()
    await stop(task)
    assert not is_alive(observer.pid)


async def test_two_cancellations_at_once(start, tmp_path):
    task, observer = start(*engine(tmp_path, "--ignore-term"), grace=GRACE)
    await observer.line("ready")
    task.cancel()
    await asyncio.sleep(0)
    await stop(task)
    assert not is_alive(observer.pid)


@pytest.mark.parametrize("turns", [*range(12), 50, 200])
async def test_cancelled_at_any_moment(start, tmp_path, turns):
    """The leak check of every test sees what is left; the turns of the loop spread over spawn, exec and start."""
    task, _ = start(*engine(tmp_path, "--grandchild", "double-fork"))
    for _ in range(turns):
        await asyncio.sleep(0.0005 if turns > 12 else 0)
    await stop(task)


GRANDCHILDREN = ["plain", "setsid", "double-fork"]


@pytest.mark.parametrize("kind", GRANDCHILDREN)
async def test_grandchildren_end_with_a_stop(start, tmp_path, kind):
    task, observer = start(*engine(tmp_path, "--grandchild", kind), grace=GRACE)
    grandchild = int((await observer.line(r"grandchild (\d+)"))[1])
    await observer.line("ready")
    await stop(task)
    assert not is_alive(grandchild)


@pytest.mark.parametrize("kind", GRANDCHILDREN)
async def test_exit_is_noticed_while_a_grandchild_holds_stdout(start, tmp_path, kind):
    task, observer = start(*engine(tmp_path, "--grandchild", kind))
    grandchild = int((await observer.line(r"grandchild (\d+)"))[1])
    await observer.line("ready")
    os.kill(observer.pid, signal.SIGKILL)
    async with asyncio.timeout(HUNG):
        with pytest.raises(BackendExited) as caught:
            await task
    assert caught.value.returncode == -signal.SIGKILL
    assert not is_alive(grandchild)


async def test_orphans_are_reaped_while_the_engine_runs(start):
    script = "for i in 1 2 3 4 5; do (sh -c 'sleep 0 & exit' ); done; sleep 0.2; echo done; exec sleep 100"
    task, observer = start("sh", "-c", script)
    await observer.line("done")
    guardian = guardian_of(observer)
    assert [child.pid for child in guardian.children()] == [observer.pid]
    await stop(task)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_guardian_leaves_the_end_to_the_daemon(start, tmp_path, number):
    task, observer = start("sh", "-c", "echo up; exec sleep 100")
    await observer.line("up")
    guardian_of(observer).send_signal(number)
    await asyncio.wait([task], timeout=0.1)
    assert not task.done()
    await stop(task)


@pytest.mark.parametrize("kind", GRANDCHILDREN)
async def test_guardian_is_killed(start, tmp_path, kind):
    task, observer = start(*engine(tmp_path, "--grandchild", kind))
    grandchild = int((await observer.line(r"grandchild (\d+)"))[1])
    await observer.line("ready")
    guardian_of(observer).kill()
    async with asyncio.timeout(HUNG):
        with pytest.raises(BackendExited, match="guardian") as caught:
            await task
    assert caught.value.returncode is None
    assert not is_alive(observer.pid)
    assert not is_alive(grandchild)


CHAIN = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    end = time.monotonic() + 600
    while time.monotonic() < end:  # one that replaces itself all the time
        if os.fork():
            os._exit(0)
"""


@pytest.mark.parametrize("victim", ["guardian", "engine"])
@pytest.mark.parametrize("script", ["setsid -f sleep 100", f"setsid -f {sys.executable} -I -S -c '{CHAIN}'"])
async def test_descendants_that_hide_end_with_the_engine(start, victim, script):
    """In sessions of their own, with nothing in their environment that tells where they come from."""
    before = {child.pid for child in psutil.Process().children()}
    task, observer = start("sh", "-c", f"env -i PATH=$PATH {script}; echo up; exec sleep 100")
    await observer.line("up")
    process_of = {"guardian": guardian_of(observer), "engine": psutil.Process(observer.pid)}
    process_of[victim].kill()
    async with asyncio.timeout(HUNG):
        with pytest.raises(BackendExited):
            await task
    assert {child.pid for child in psutil.Process().children()} <= before  # orphans of other tests may have ended


async def test_a_guardian_s_end_leaves_other_engines(start, tmp_path):
    first, killed = start("sh", "-c", "echo up; exec sleep 100")
    second, spared = start("sh", "-c", "echo up; exec sleep 100")
    await killed.line("up")
    await spared.line("up")
    guardian_of(killed).kill()
    with pytest.raises(BackendExited):
        await first
    assert is_alive(spared.pid)
    await stop(second)


async def test_guardian_is_stopped(start, tmp_path):
    task, observer = start(*engine(tmp_path, "--grandchild", "setsid"), grace=0.2)
    grandchild = int((await observer.line(r"grandchild (\d+)"))[1])
    await observer.line("ready")
    guardian_of(observer).suspend()
    await stop(task)
    assert not is_alive(observer.pid)
    assert not is_alive(grandchild)


async def test_flood_does_not_block_the_engine(start, tmp_path):
    task, observer = start(*engine(tmp_path, "--flood", str(8 << 20)), log_limit=1 << 20)
    await observer.line("ready")
    await stop(task)
    log = tmp_path / "logs" / "engine.log"
    size = log.stat().st_size + log.with_name("engine.log.1").stat().st_size
    assert size <= 1 << 20
    assert b"ready" in log.read_bytes()
    assert [line for line in observer.lines if line.startswith("line ")][-1].startswith(f"line {(8 << 20) // 100 - 1} ")


async def test_endless_flood_leaves_the_loop_alive_and_can_be_stopped(start, tmp_path):
    task, observer = start(*engine(tmp_path, "--flood-forever"), log_limit=1 << 20)
    await observer.line("flood")
    before = len(observer.lines)
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert len(observer.lines) > before
    assert not task.done()
    await stop(task)


async def test_line_of_ten_megabytes(start, tmp_path):
    task, observer = start(*engine(tmp_path, "--long-line", str(10 << 20)))
    await observer.line("ready")
    await stop(task)
    assert max(map(len, observer.lines)) == 4096


async def test_log_that_cannot_be_written(start, tmp_path, caplog):
    (tmp_path / "logs").write_text("a file where the folder should be")
    task, _ = start("sh", "-c", "echo hello; exit 1")
    with pytest.raises(BackendExited) as caught:
        await task
    assert caught.value.tail == "hello\n"
    assert "not written for now" in caplog.text


async def test_log_is_private_and_goes_on_after_the_earlier_runs(start, tmp_path):
    for word in ("one", "two"):
        task, _ = start("echo", word)
        with pytest.raises(BackendExited):
            await task
    log = tmp_path / "logs" / "engine.log"
    assert log.read_text() == "one\ntwo\n"
    assert log.stat().st_mode & 0o777 == 0o600


async def test_many_at_once(start):
    tasks = [start("sh", "-c", f"exit {number}")[0] for number in range(20)]
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [getattr(end, "returncode", end) for end in ends] == list(range(20))


def test_environment_is_an_allow_list():
    given = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "CUDA_VISIBLE_DEVICES": "0",
        "NVIDIA_API_KEY": "secret",
        "LLAMA_ARG_MODEL": "/evil",
        "HF_TOKEN": "secret",
        "OPENAI_API_KEY": "secret",
        "GGML_PASSWORD": "secret",
        "CUDA_SECRET": "secret",
        "NVIDIA_NGC_KEY": "secret",
        "NVIDIA_NGC_APIKEY": "secret",
        "CUDA_REGISTRY_PASS": "secret",
        "NCCL_AWS_CREDENTIALS": "secret",
        "lc_password": "secret",
        "LC_password": "secret",
        "PATHS": "another",
        "XCUDA_": "another",
        "PYTHONPATH": "/evil",
        "LD_PRELOAD": "/evil.so",
        "GGML_X": "1",
        "GGML_TOKEN": "secret",
        "MY_TOKEN": "wanted",
    }
    assert process.scrubbed_environment(environ=given) == {"PATH": "/bin", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "0"}
    kept = process.scrubbed_environment(["GGML_*", "MY_TOKEN"], given)
    assert kept.keys() - {"PATH", "LC_ALL", "CUDA_VISIBLE_DEVICES"} == {"GGML_X", "MY_TOKEN"}
