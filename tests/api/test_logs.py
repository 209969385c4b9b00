"""The daemon's log, and following one that grows and rotates."""

import asyncio
import logging
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.daemon import instance, logs
from modelrunner.daemon.logs import daemon_log, logging_to, prune_engine_logs
from modelrunner.processes import log
from modelrunner.processes.log import read_log
from tests.api.conftest import StartDaemon, make_settings


def test_everything_is_logged_to_the_file_and_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(tmp_path, "info"):
        logging.getLogger("some.part").info("hello")
        logging.getLogger("some.part").debug("unseen")
    assert "INFO some.part: hello" in daemon_log(tmp_path).read_text()
    assert "unseen" not in daemon_log(tmp_path).read_text()
    assert "INFO some.part: hello" in capsys.readouterr().err


def test_a_stderr_that_is_the_log_gets_each_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon_log(tmp_path).open("a") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with logging_to(tmp_path, "info"):
            logging.getLogger("some.part").info("hello")
    assert daemon_log(tmp_path).read_text().count("hello") == 1


def test_a_daemon_without_stderr_still_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with logging_to(tmp_path, "info"):
        logging.getLogger("some.part").info("hello")
    assert "hello" in daemon_log(tmp_path).read_text()


def test_the_log_stays_within_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LOG_BYTES", 1000)
    with logging_to(tmp_path, "info"):
        for _ in range(100):
            logging.getLogger("some.part").info("x" * 100)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000


async def test_a_log_is_followed_across_rotations(tmp_path: Path) -> None:
    path, ending = tmp_path / "a.log", asyncio.Event()
    seen = read_log(path, ending)
    path.write_bytes(b"one\n")
    assert await anext(seen) == b"one\n"
    path.rename(tmp_path / "a.log.1")
    path.write_bytes(b"two\n")
    assert await anext(seen) == b"two\n"
    with path.open("ab") as file:
        file.write(b"three\n")
    assert await anext(seen) == b"three\n"
    ending.set()
    with pytest.raises(StopAsyncIteration):
        await anext(seen)


@given(st.binary(max_size=60), st.integers(0, 8), st.integers(1, 5))
async def test_the_last_lines_of_any_file(text: bytes, lines: int, chunk: int) -> None:
    text = text.replace(b"a", b"\n")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "_CHUNK", chunk)
        path = Path(folder) / "a.log"
        path.write_bytes(text)
        seen = b"".join([piece async for piece in read_log(path, lines=lines)])
    assert seen == b"".join(re.findall(rb"[^\n]*\n|[^\n]+", text)[-lines:] if lines else [])


async def test_the_last_lines_of_a_large_log_are_read_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    pread = os.pread

    def counted(descriptor: int, size: int, at: int) -> bytes:
        read.append(size)
        return pread(descriptor, size, at)

    monkeypatch.setattr(os, "pread", counted)
    path = tmp_path / "a.log"
    path.write_bytes(b"a line of a log\n" * (logs.LOG_BYTES // 16))
    seen = b"".join([piece async for piece in read_log(path, lines=200)])
    assert seen == b"a line of a log\n" * 200
    assert 0 < sum(read) <= 64 << 10


async def test_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert [chunk async for chunk in read_log(tmp_path / "none.log", None)] == []


async def test_old_engine_logs_go_when_a_daemon_or_a_host_begins(tmp_path: Path) -> None:
    settings = make_settings(tmp_path)
    folder = settings.data_dir / "logs"
    folder.mkdir(parents=True)
    for number in range(2 * logs.ENGINE_LOGS_KEPT + 3):
        path = folder / f"engine-fake-{number}-completion-0.log"
        path.touch()
        os.utime(path, (number, number))
    async with instance.opened(settings.data_dir, settings.socket, settings.log_level, settings.runtime_folder):
        left = {path.name for path in folder.iterdir()}
    assert len(left) == 2 * logs.ENGINE_LOGS_KEPT + 1  # and the daemon's
    assert "engine-fake-2-completion-0.log" not in left
    assert "engine-fake-3-completion-0.log" in left


def test_an_engine_log_that_is_none_stops_no_start(tmp_path: Path) -> None:
    (tmp_path / "engine-dangling-0.log").symlink_to("nowhere")
    for number in range(2 * logs.ENGINE_LOGS_KEPT + 1):
        (tmp_path / f"engine-folder-{number}.log").mkdir()
    prune_engine_logs(tmp_path)


async def test_a_line_for_each_load_eviction_and_crash(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1}, memory_budget="66MiB")

    async def ask(model: str) -> int:
        body = {"model": model, "messages": [{"role": "user", "content": "planted-prompt"}]}
        async with daemon.tcp.post("/v1/chat/completions", json=body) as answer:
            await answer.read()
            return answer.status

    assert await ask("smol") == 200
    daemon.backend.knobs = ("--die", "before-headers")
    assert await ask("other") == 502  # it is asked once more, by another engine
    lines = daemon_log(daemon.settings.data_dir / "logs").read_text().splitlines()
    told = [line.partition(": ")[2] for line in lines if "reconciler" in line]
    assert [line.partition(" (")[0] for line in told if line.startswith("starting")] == [
        "starting smol",
        "starting other",
        "starting other",
    ]
    [evicted] = [line for line in told if line.startswith("stopping smol")]
    assert "other" in evicted
    crashes = [line for line in told if line.startswith("other ended: ")]
    assert len(crashes) == 2
    assert all("signal 9" in line for line in crashes)
    assert "planted-prompt" not in "\n".join(lines)
