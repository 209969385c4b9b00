"""Commands that need the daemon start it: the real one, in folders of the test's own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from modelrunner.cli.client import HttpClient
from modelrunner.cli.start import ensure_running
from modelrunner.config import lockfile
from modelrunner.config.locations import Locations
from tests.cli.conftest import Cli
from tests.cli.fake_daemon import READY, Text, fake_daemon
from tests.waiting import HUNG


@pytest.fixture
def home(folders: Path) -> Iterator[Path]:
    """Nothing runs afterwards, whatever the test did."""
    yield folders
    Cli.process("shutdown")


def daemons(data: Path) -> list[psutil.Process]:
    living = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return [process for process in living if process.environ().get("MODELRUNNER_DATA_DIR") == str(data)]


def test_a_command_starts_it_another_uses_it_and_shutdown_waits_for_its_end(home: Path) -> None:
    first = Cli.process("list")
    assert (first.code, first.err) == (0, "starting the daemon\n")
    status = json.loads(Cli.process("status", "--json").out)
    assert {"pid", "version", "socket", "listen", "data_dir", "backends", "memory"} <= status.keys()
    assert status["data_dir"] == str(home / "data")
    [daemon] = daemons(home / "data")
    assert daemon.pid == status["pid"]
    assert os.getsid(daemon.pid) == daemon.pid, "it must outlive the terminal that it was started from"
    assert Cli.process("list").err == ""
    assert Cli.process("shutdown").code == 0
    assert daemons(home / "data") == []
    assert Cli.process("ps").code == 3
    assert Cli.process("stop", "--all").code == 3


def test_without_a_daemon_what_can_be_said_is_said(home: Path) -> None:
    assert "no daemon runs" in Cli.process("logs").err  # and none has written a log
    assert Cli.process("list").code == 0
    assert Cli.process("shutdown").code == 0
    log = home / "data" / "logs" / "daemon.log"
    shown = Cli.process("logs")
    assert (shown.code, shown.out, shown.err) == (0, log.read_text(), f"no daemon runs; the last one wrote {log}:\n")
    assert Cli.process("logs", "-n", "1").out == log.read_text().splitlines(keepends=True)[-1]
    named = Cli.process("logs", "some-model")
    assert (named.code, str(log.parent) in named.err) == (3, True)
    loaded = Cli.process("ps", "--json")
    assert (loaded.code, loaded.out) == (3, "[]\n")
    assert "no model is loaded" in loaded.err
    status = Cli.process("status")
    assert (status.code, str(home / "data") in status.out, str(home / "config.toml") in status.out) == (3, True, True)
    assert daemons(home / "data") == []
    used = Cli.process("usage", "--json")  # it asks a daemon that it starts
    assert (used.code, used.out) == (0, "[]\n")


def test_two_commands_at_once_get_one_daemon(home: Path) -> None:
    commands = [Cli.start("list") for _ in range(3)]
    results = [(command.communicate(timeout=HUNG)[1], command.returncode) for command in commands]
    assert [code for _, code in results] == [0, 0, 0]
    assert sorted(err for err, _ in results) == [b"", b"", b"starting the daemon\n"]
    assert len(daemons(home / "data")) == 1


def test_its_last_words_are_shown_when_it_does_not_start(home: Path) -> None:
    (home / "config.toml").write_text('max_queue = "many"\n')
    result = Cli.process("list")
    assert result.code == 3
    error = result.err.splitlines()[-1]
    assert error.startswith("error: the daemon did not start: ")
    assert "max_queue" in error
    assert str(home / "data" / "logs" / "daemon.log") in error
    assert daemons(home / "data") == []


def test_the_socket_of_the_configuration_is_found(home: Path) -> None:
    (home / "config.toml").write_text(f'socket = "{home}/other.sock"\n')
    assert Cli.process("list").code == 0
    assert json.loads(Cli.process("status", "--json").out)["socket"] == f"{home}/other.sock"


def test_what_somebody_else_names_is_not_started(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = f"unix://{home}/elsewhere.sock"
    assert Cli.process("list", "--host", elsewhere).code == 3
    monkeypatch.setenv("MODELRUNNER_HOST", elsewhere)
    assert Cli.process("list").code == 3
    assert not (home / "data").exists()


def test_ctrl_c_while_it_starts_leaves_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon is held before its first step, by a module that its interpreter loads."""
    (home / "sitecustomize.py").write_text("import signal, sys\nif 'serve' in sys.orig_argv:\n    signal.pause()\n")
    monkeypatch.setenv("PYTHONPATH", str(home))
    with Cli.start("list") as command:
        assert command.stderr is not None
        assert command.stderr.readline() == b"starting the daemon\n"
        result = Cli.interrupt(command)
    assert result.code == 130
    assert daemons(home / "data") == []


def test_one_that_is_shutting_down_is_waited_for(folders: Path) -> None:
    (folders / "run").mkdir(mode=0o700)
    with fake_daemon(folders / "run" / "modelrunner.sock") as daemon:
        ending, ready = (
            Text(json.dumps({**READY, "status": status}).encode()) for status in ("shutting_down", "ready")
        )
        daemon.answers["GET /health"] = [ending, ending, ready]
        ensure_running(Locations.find(), HttpClient)
        assert len(daemon.requests) == 3


def test_a_daemon_is_found_wherever_it_listens(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket lies where this environment would not look: the lock of the data directory knows."""
    assert Cli.process("list").code == 0
    monkeypatch.setenv("MODELRUNNER_RUNTIME_DIR", str(home / "elsewhere"))
    status = json.loads(Cli.process("status", "--json").out)
    assert status["socket"] == str(home / "run" / "modelrunner.sock")
    assert Cli.process("list").err == ""
    assert Cli.process("shutdown").code == 0
    assert daemons(home / "data") == []


@pytest.fixture
def xdg(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of the user's, with a path that is short enough for sockets."""
    monkeypatch.delenv("MODELRUNNER_RUNTIME_DIR")
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)
        Cli.process("shutdown")


def socket_of_the_daemon() -> Path:
    assert Cli.process("list").code == 0
    return Path(json.loads(Cli.process("status", "--json").out)["socket"])


def test_sockets_lie_in_the_runtime_directory_of_the_user(xdg: Path) -> None:
    assert socket_of_the_daemon().parent.parent == xdg
    assert Cli.process("shutdown").code == 0
    assert list(xdg.iterdir()) == [], "an empty folder of the daemon's own is not left"


def test_a_folder_that_another_has_taken_is_passed_over(xdg: Path) -> None:
    """A file stands for it: nothing that is not a folder of ours is used."""
    Locations.find().runtime.touch()
    assert socket_of_the_daemon().parent in Locations.find().runtimes[1:]


def test_a_daemon_outlives_the_runtime_directory_of_its_user(home: Path, xdg: Path) -> None:
    """systemd removes it at the logout."""
    assert socket_of_the_daemon().parent.parent == xdg
    before = daemons(home / "data")
    shutil.rmtree(xdg)
    xdg.touch()  # root could make the folder again
    assert socket_of_the_daemon().parent.parent != xdg
    assert daemons(home / "data") == before
    xdg.unlink()
    xdg.mkdir()


def test_a_removed_socket_comes_back(home: Path) -> None:
    assert Cli.process("list").code == 0
    before = daemons(home / "data")
    for remove in (lambda: (home / "run" / "modelrunner.sock").unlink(), lambda: shutil.rmtree(home / "run")):
        remove()
        assert Cli.process("list").err == ""
    assert daemons(home / "data") == before


def test_a_data_directory_that_cannot_be_used_is_named(home: Path) -> None:
    (home / "data").touch()
    result = Cli.process("list")
    assert result.code == 1
    assert str(home / "data") in result.err
    assert "MODELRUNNER_DATA_DIR" in result.err
    (home / "data").unlink()


@pytest.mark.parametrize("name", ["start.lock", "logs/daemon.log"])
def test_a_fifo_in_the_place_of_a_file_is_named_and_not_waited_for(home: Path, name: str) -> None:
    place = home / "data" / name
    place.parent.mkdir(parents=True)
    os.mkfifo(place)
    result = Cli.process("list")
    assert (result.code, str(place) in result.err) == (1, True)
    place.unlink()
    assert Cli.process("list").code == 0


def test_however_often_it_is_interrupted_a_daemon_ends_well(home: Path) -> None:
    with Cli.start("serve") as daemon:
        while (holder := lockfile.holder(home / "data")) is None or not Path(holder.socket).exists():
            assert daemon.poll() is None
            time.sleep(0.01)
        while daemon.poll() is None:
            daemon.send_signal(signal.SIGINT)
        assert daemon.returncode == 0


def test_a_daemon_adopts_what_its_guardians_leave() -> None:
    """An orphan's parent is the daemon's process then, and not that of the system or of this test."""
    orphan = "import os\nif os.fork() == 0:\n    os.read(0, 1)\n    print(os.getppid(), flush=True)"
    script = f"""
import os, subprocess, sys
from modelrunner.daemon.instance import prepare_process
prepare_process()
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", {orphan!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.wait()
child.stdin.write(b"x")
child.stdin.close()
assert int(child.stdout.readline()) == os.getpid()
os.wait()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_start_collects_no_garbage_and_a_daemon_that_serves_does(home: Path) -> None:
    code = (
        "import gc, os\n"
        "from modelrunner.cli import main\n"
        "from modelrunner.daemon import app\n"
        "def whole(): return gc.get_stats()[2]['collections']\n"
        "async def wait(daemon): print(gc.isenabled(), whole() - before, flush=True)\n"
        "app.Daemon.wait, before = wait, whole()\n"
        "main(['serve'])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HUNG, check=False)
    assert result.stdout == "True 0\n", result.stderr


def test_a_start_loads_no_library_that_only_some_requests_need() -> None:
    code = (
        "import sys; from modelrunner.daemon import app; "
        "heavy = {'cryptography', 'httpx', 'mcp', 'opentelemetry', 'rich', 'jinja2'}; "
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HUNG, check=False)
    assert result.stderr == ""
