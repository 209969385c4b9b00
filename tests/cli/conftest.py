import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from modelrunner.cli import main
from tests.cli.fake_daemon import FakeDaemon, fake_daemon
from tests.waiting import HUNG


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data, cache and runtime folders of this test's own, in the environment."""
    for name in [name for name in os.environ if name.startswith("MODELRUNNER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MODELRUNNER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("MODELRUNNER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MODELRUNNER_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("MODELRUNNER_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("MODELRUNNER_LISTEN", "")
    return tmp_path


@pytest.fixture
def daemon(folders: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    """The daemon that the command line finds."""
    with fake_daemon(folders / "d.sock") as daemon:
        monkeypatch.setenv("MODELRUNNER_HOST", daemon.url)
        yield daemon


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


class Cli:
    """Runs the command line in this process, as pipes see it, or as a process of its own."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *arguments: str) -> Result:
        code = main(arguments)
        captured = self._capfd.readouterr()
        return Result(code, captured.out, captured.err)

    @staticmethod
    def start(*arguments: str, **options: object) -> "subprocess.Popen[bytes]":
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-m", "modelrunner", *arguments]
        return subprocess.Popen(command, **{**pipes, **options})  # type: ignore[call-overload,no-any-return]

    @classmethod
    def process(cls, *arguments: str, text: str = "") -> Result:
        with cls.start(*arguments, stdin=subprocess.PIPE) as process:
            out, err = process.communicate(text.encode(), timeout=HUNG)
        return Result(process.returncode, out.decode(), err.decode())

    @staticmethod
    def interrupt(process: "subprocess.Popen[bytes]") -> Result:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HUNG)
        return Result(process.returncode, out.decode(), err.decode())


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield Cli(capfd)
