"""The daemon is killed with SIGKILL: no engine, and nothing that an engine started, is left."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from modelrunner.processes.processtree import sweep_orphans
from tests.cost import cost
from tests.fakes import FAKE_ENGINE
from tests.waiting import HUNG

ROOT = Path(__file__).parents[2]
STUBBORN = ["--ignore-term", "--grandchild", "plain", "--grandchild", "setsid", "--grandchild", "double-fork"]


def living() -> list[psutil.Process]:
    """Orphans come to the test process, which is a subreaper."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def survivors() -> list[list[str]]:
    """The command lines of what lives on, which nobody ends for an hour. Returns as soon as nothing is left."""
    deadline = time.monotonic() + HUNG
    while (found := living()) and time.monotonic() < deadline:
        psutil.wait_procs(found, timeout=0.01)
    return [process.cmdline() for process in found]


def wait_for(file: Path, daemon: psutil.Popen) -> None:
    deadline = time.monotonic() + HUNG
    while not file.exists() and time.monotonic() < deadline:
        psutil.wait_procs([daemon], timeout=0.01)
    assert file.exists()


def start_daemon(tmp_path: Path, *arguments: str, knobs: Sequence[str] = STUBBORN) -> psutil.Popen:
    engine = [sys.executable, "-I", "-S", str(FAKE_ENGINE), "--socket", str(tmp_path / "e.sock"), *knobs]
    command = [sys.executable, "-m", "tests.processes.keeper", *arguments, str(tmp_path / "log"), *engine]
    return psutil.Popen(command, cwd=ROOT)


@pytest.mark.parametrize("milliseconds", [0, 1, 3, 6, 10, 14, 17, 20, 25, 40, 80, 300])
def test_nothing_survives(tmp_path, milliseconds):
    """From before the guardian runs, over the engine's exec and its start, to when it serves."""
    assert start_daemon(tmp_path, str(milliseconds / 1000), "daemon").wait() == -signal.SIGKILL
    assert not survivors()


HIDES = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
os.setpgid(0, os.getpgid(os.getppid()))
open(sys.argv[1], "w").close()
os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"], {})
"""


def test_an_engine_in_its_guardian_s_group_ends(tmp_path):
    """One that asks the kernel not to end it with its guardian, and has an empty environment."""
    moved = tmp_path / "moved"
    command = [sys.executable, "-m", "tests.processes.keeper", "3600", "daemon", str(tmp_path / "log")]
    daemon = psutil.Popen([*command, sys.executable, "-I", "-S", "-c", HIDES, str(moved)], cwd=ROOT)
    wait_for(moved, daemon)
    daemon.kill()
    daemon.wait()
    assert not survivors()


def test_survivors_of_a_killed_guardian_are_swept_by_the_next_daemon(tmp_path):
    """Grandchildren that only a guardian could have killed. A daemon of another test may be the first to sweep them:
    they belong to nobody any more."""
    assert start_daemon(tmp_path, "0.3", "all").wait() == -signal.SIGKILL
    sweep_orphans()
    assert not survivors()


def test_an_engine_that_may_start_nothing_ends_with_its_daemon_and_guardian(tmp_path):
    """Whatever it tries against that, and though nobody sweeps."""
    ready, script = tmp_path / "ready", f"import sys\n{CLINGS}"
    command = [sys.executable, "-m", "tests.processes.keeper", "3600", "daemon of a lone engine"]
    engine = [str(tmp_path / "log"), sys.executable, "-I", "-S", "-c", script, str(ready)]
    with psutil.Popen([*command, *engine], cwd=ROOT) as daemon:
        wait_for(ready, daemon)
        [guardian] = daemon.children()
        left = [guardian, *guardian.children(recursive=True)]
        guardian.suspend()
        daemon.kill()
        guardian.kill()
    assert not psutil.wait_procs(left, timeout=3)[1]


CLINGS = """
import ctypes, os, signal
tries = [
    lambda: os.fork() or os.execv("/bin/sleep", ["sleep", "3600"]),
    lambda: os.posix_spawn("/bin/sleep", ["sleep", "3600"], {}),
    lambda: os.setsid(),
    lambda: os.setpgid(0, os.getpgid(os.getppid())),
    lambda: ctypes.CDLL(None).prctl(1, 0, 0, 0, 0),
]
for attempt in tries:
    try:
        attempt()
    except OSError:
        pass
for number in range(1, 64):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
open(sys.argv[1], "w").close()
while True:
    signal.pause()
"""

STRIPPED = """
import ctypes, os, resource, sys, time
try:
    resource.setrlimit(10, (0, 0))
except (OSError, ValueError):
    pass
else:
    sys.exit("the mark is off")
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
for command in ("time.sleep(3600)", CHAIN):
    if os.fork() == 0:
        os.setsid()
        lies = {"MODELRUNNER_PROCESS": "::1:1:"}
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", "import os, time\\n" + command], lies)
open(sys.argv[1], "w").close()
os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"], {})
"""
CHAIN = """
end = time.monotonic() + 600
while time.monotonic() < end:  # a process that replaces itself all the time
    if os.fork():
        os._exit(0)
"""


def test_the_next_daemon_finds_what_has_nothing_true_in_its_environment(tmp_path):
    """Engines that may start processes, in sessions of their own, whose daemon and guardian were killed together. A
    daemon of another test may be the first to sweep them."""
    ready, script = tmp_path / "ready", f"CHAIN = {CHAIN!r}{STRIPPED}"
    command = [sys.executable, "-m", "tests.processes.keeper", "3600", "daemon of a confined engine"]
    engine = [str(tmp_path / "log"), sys.executable, "-I", "-S", "-c", script, str(ready)]
    with psutil.Popen([*command, *engine], cwd=ROOT) as daemon:
        wait_for(ready, daemon)
        [guardian] = daemon.children()
        guardian.suspend()
        daemon.kill()
        guardian.kill()
    sweep_orphans()
    assert not survivors()


@pytest.mark.parametrize("stepped", [0.0, 3600.0, -3600.0])
def test_the_sweep_spares_the_engines_of_living_daemons(tmp_path, stepped):
    """Whatever was done to the clock since they began. In process IDs of its own: a sweep that is wrong would end the
    engines of every daemon on this machine."""
    isolated = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*isolated, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no process namespace can be made here")
    script = [sys.executable, "-m", "tests.processes.stepped_clock", str(stepped), str(tmp_path)]
    done = subprocess.run([*isolated, *script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "swept 0 of a living daemon\n"), done.stderr


FORGETFUL = """
import os, time
for _ in range(1000):
    if os.fork() == 0:
        os._exit(0)
print(flush=True)
time.sleep(3600)
"""


def look_at_each_process() -> None:
    for pid in psutil.pids():
        with suppress(OSError):
            Path(f"/proc/{pid}/stat").read_bytes()


def test_processes_that_nobody_reaped_cost_the_next_daemon_little() -> None:
    """A program that forgets its children must not keep a daemon from its start: each was looked at for a millisecond,
    in each of fifty rounds."""
    with subprocess.Popen([sys.executable, "-c", FORGETFUL], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        try:
            assert cost(sweep_orphans) < 10 * cost(look_at_each_process)
        finally:
            program.kill()
