"""The daemon as a service: the files for systemd and launchd, and a socket that the service manager made."""

import os
import plistlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from contextlib import contextmanager
from pathlib import Path

import pytest

from modelrunner.cli.service import launchd, systemd
from modelrunner.config import lockfile
from modelrunner.config.locations import Locations
from tests.cli.conftest import Cli
from tests.cli.tmux import screen
from tests.waiting import HUNG

# As systemd does: the socket becomes descriptor 3, and the variables name the process.
ACTIVATED = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.executable, [sys.executable, "-m", "modelrunner", "serve"])
"""


@contextmanager
def activated(path: Path) -> "Iterator[subprocess.Popen[bytes]]":
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        number = listener.fileno()
        with subprocess.Popen([sys.executable, "-c", ACTIVATED, str(number)], pass_fds=[number]) as process:
            try:
                yield process
            finally:
                process.terminate()
                process.wait(HUNG)


def test_the_daemon_serves_the_socket_that_it_is_given(folders: Path, cli: Cli) -> None:
    """A command that comes before the daemon answers waits in the socket's queue; no second daemon is started."""
    path = Locations.find().socket
    with activated(path) as process:
        begun = cli("list")
        assert begun.code == 0
        assert "starting the daemon" not in begun.err
        assert f"process {process.pid}," in cli("status").out
        assert cli("shutdown").code == 0
        assert process.wait(HUNG) == 0
    assert path.is_socket()  # the service manager's, which starts the daemon again


@pytest.fixture
def systemctl(folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `systemctl`, and a `loginctl`, that write down how they are called."""
    calls = folders / "calls"
    for name in ("systemctl", "loginctl"):
        program = folders / name
        program.write_text(f'#!/bin/sh\necho "$*" >> {calls}\necho active\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folders}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folders / "config"))
    return calls


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
def test_a_service_is_installed_shown_and_removed(systemctl: Path, folders: Path) -> None:
    units = folders / "config" / "systemd" / "user"
    with screen(folders, "service", "install", columns=160) as terminal:
        terminal.wait_for("^installed$")
        assert terminal.ended() == 0
    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read([units / "modelrunner.socket", units / "modelrunner.service"])
    assert unit["Socket"]["ListenStream"] == str(Locations.find().socket)
    assert {unit["Install"]["WantedBy"]} == {"default.target"}  # the daemon itself, whose port then answers
    assert unit["Service"]["ExecStart"] == f'"{sys.executable}" "-P" "-m" "modelrunner" "serve"'
    with screen(folders, "service", "status") as terminal:
        terminal.wait_for("^active")
        assert terminal.ended() == 0
    with screen(folders, "service", "remove") as terminal:
        terminal.wait_for("^removed")
        assert terminal.ended() == 0
    assert list(units.iterdir()) == []
    assert systemctl.read_text().splitlines() == [
        "--user show-environment",
        "--user daemon-reload",
        "--user enable --now modelrunner.socket modelrunner.service",
        "--user status modelrunner.socket modelrunner.service",
        "--user disable --now modelrunner.socket modelrunner.service",
        "--user daemon-reload",
    ]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_understands_the_units(folders: Path) -> None:
    """Both are for the login, so that the daemon opens its port without a command before."""
    for file, text in systemd(Locations.find()).files.items():
        (folders / file.name).write_text(text)
    paths = [str(folders / f"modelrunner.{kind}") for kind in ("socket", "service")]
    command, variables = ["systemd-analyze", "--user", "verify", *paths], os.environ | {"XDG_RUNTIME_DIR": str(folders)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
def test_the_service_takes_the_place_of_a_daemon_that_runs(systemctl: Path, cli: Cli) -> None:
    """Before systemd makes its socket in the same place, which would leave the daemon without one."""
    assert Cli.process("list").code == 0
    assert lockfile.holder(Locations.find().data)
    done = cli("service", "install", "--linger")
    assert (done.code, done.out) == (0, "installed\n")
    assert lockfile.holder(Locations.find().data) is None
    assert systemctl.read_text().splitlines()[-1] == "enable-linger"


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
def test_without_a_session_of_the_user_nothing_changes(systemctl: Path, folders: Path, cli: Cli) -> None:
    """As under `su`: the user's service manager does not answer."""
    (folders / "systemctl").write_text("#!/bin/sh\nexit 1\n")
    done = cli("service", "install")
    assert done.code == 1
    assert "log in as the user" in done.err
    assert not (folders / "config").exists()


def test_a_dry_run_writes_nothing(systemctl: Path, folders: Path, cli: Cli) -> None:
    assert "ListenStream=" in cli("service", "install", "--dry-run").out
    assert not (folders / "config").exists()
    assert not systemctl.exists()


def test_what_is_not_installed_is_not_found(systemctl: Path, cli: Cli) -> None:
    assert cli("service", "remove").code == 4


def test_the_launch_agent_is_a_property_list(folders: Path) -> None:
    [text] = launchd(Locations.find()).files.values()
    agent = plistlib.loads(text.encode())
    assert agent["ProgramArguments"] == [sys.executable, "-P", "-m", "modelrunner", "serve"]
    assert agent["EnvironmentVariables"]["MODELRUNNER_DATA_DIR"] == str(folders / "data")
