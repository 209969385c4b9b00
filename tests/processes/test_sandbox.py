"""What an engine gets that tries to leave its sandbox (intruder.py), and what is said of a kernel that cannot
hold it."""

import errno
import os
import socket
import subprocess
import sys
import venv
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest

from modelrunner.errors import BackendExited, BackendUnavailable
from modelrunner.processes import confinement, process, seccomp
from modelrunner.sandbox import Permissions
from modelrunner.types import ProcessOptions
from tests.fakes import Observer
from tests.ports import reserved_port
from tests.processes.intruder import ATTEMPTS

BY_MACHINE = {  # what they need without a sandbox, some kernels, settings of theirs or file systems do not have
    *("gain_privileges", "read_keyring", "use_io_uring", "mount", "connect_fast_open", "trace_daemon"),
    *("move_memory_of_daemon", "compare_with_daemon", "take_file_of_daemon", "change_mode_by_new_call"),
    *("connect_multipath", "add_upper_layer", "read_memory"),
    *("change_flags_of_model", "set_attribute", "set_attribute_of_model", "remove_attribute", "read_attribute"),
    *("list_attributes", "share_queue"),
}
INTRUDER = Path(__file__).with_name("intruder.py")
pytestmark = pytest.mark.skipif(confinement.landlock_abi() < 6, reason="this kernel's Landlock lacks scopes")


class Ground:
    """Folders with something to get, and a process that stands for the daemon."""

    def __init__(self, folder: Path) -> None:
        self.secrets, self.data, self.own = folder / ".ssh", folder / "data", folder / "own"
        for place in (self.secrets, self.data, self.own):
            place.mkdir()
        (self.secrets / "id_ed25519").write_text("PRIVATE KEY")
        (self.data / "state.json").write_text("{}")
        (self.data / "model.gguf").write_text("GGUF")
        with suppress(OSError):  # a file system without attributes
            os.setxattr(self.data / "state.json", "user.note", b"x")
        self.permissions = Permissions(reads=(INTRUDER, self.data / "model.gguf"), writes=(self.own,))
        self.log = folder / "log"

    def outside(self) -> list[tuple[int, int, int]]:
        """Returns modes and times of the files that are not the engine's."""
        places = (self.secrets, *self.secrets.iterdir(), self.data, *self.data.iterdir())
        return [(found.st_mode, found.st_mtime_ns, found.st_ctime_ns) for found in map(os.stat, places)]

    async def tried(
        self,
        daemon: int,
        listener: int,
        *attempts: str,
        asks: Permissions,
        confined: bool = True,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> Observer:
        """Returns what the intruder printed, and its sandbox."""
        observer = Observer()
        places = ["--secrets", self.secrets, "--data", self.data, "--folder", self.own]
        numbers = ["--daemon", str(daemon), "--listener", str(listener)]
        argv = [sys.executable, "-I", "-S", str(INTRUDER), *map(str, places), *numbers, *attempts]
        permissions = self.permissions if confined else None
        options = ProcessOptions(self.log, observer, permissions=permissions)
        with pytest.raises(BackendExited) as ended:
            await process.run(argv, env={**process.scrubbed_environment(), **env}, options=options, permissions=asks)
        assert ended.value.returncode == 0, observer.lines
        return observer


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


@pytest.fixture
def daemon():
    """It has no privileges, as under an account: those that root's daemon has over its engines hold some attempts."""
    without = ["setpriv", "--bounding-set=-all"] if os.geteuid() == 0 else []
    with subprocess.Popen([*without, "sleep", "60"]) as stands_for_it:
        yield stands_for_it.pid
        stands_for_it.kill()


@pytest.fixture
def listener(ground: Ground):
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(ground.data / "daemon.sock"))
        unix.listen()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams, socket.socket(socket.AF_UNIX) as abstract:
            datagrams.bind(str(ground.data / "log.sock"))
            abstract.bind(f"\0{ground.data}")
            abstract.listen()
            yield tcp.getsockname()[1]


@pytest.mark.parametrize("name", [name for name in ATTEMPTS if name != "kill_guardian"])
async def test_every_attempt_gets_somewhere_without_a_sandbox(ground, daemon, listener, name: str) -> None:
    """So that the next test shows what the sandbox does."""
    if name in BY_MACHINE:
        pytest.skip("that depends on the machine")
    observer = await ground.tried(daemon, listener, name, asks=Permissions(), confined=False)
    assert f"{name} got" in observer.lines[0]
    assert observer.sandbox.state == "off"


async def test_no_attempt_gets_anywhere(ground, daemon, listener) -> None:
    before = ground.outside()
    observer = await ground.tried(daemon, listener, asks=Permissions())
    assert [line.split(":")[0] for line in observer.lines[: len(ATTEMPTS)]] == [f"{name} held" for name in ATTEMPTS]
    assert observer.lines[len(ATTEMPTS) :] == ["thread works", "reads its model: GGUF"]
    assert observer.sandbox.state == "on"
    assert (ground.data / "state.json").read_text() == "{}"
    assert ground.outside() == before


async def test_a_permission_opens_what_it_names_and_is_reported(ground, daemon, listener) -> None:
    asks = Permissions(network="cluster", processes="workers", affinity="node", scheduling="class")
    observer = await ground.tried(daemon, listener, asks=asks)
    got = {line.split(" ")[0] for line in observer.lines if " got: " in line}
    opened = {"connect_tcp", "connect_unix", "send_udp", "send_unix", "listen_elsewhere", "listen_beside_daemon"}
    opened |= {"fork", "spawn", "leave_group", "outlive_parent", "bind_daemon", "reset_class_of_daemon"}
    assert got == opened
    assert observer.sandbox.state == "partial"
    *reasons, outlives = observer.sandbox.gaps
    assert [gap.rpartition(": ")[2] for gap in reasons] == ["cluster", "node", "class", "workers"]
    assert outlives.startswith("new processes outlive a daemon and a guardian that are killed at once")


async def test_a_private_port_stays_closed_to_an_engine_that_may_connect_elsewhere(ground, daemon, listener) -> None:
    tries = ("connect_tcp", "connect_fast_open", "connect_multipath", "add_upper_layer", "listen_beside_daemon")
    asks = Permissions(network="cluster", private_port=listener)
    observer = await ground.tried(daemon, listener, *tries, "listen_elsewhere", asks=asks)
    found = [line.split(":")[0] for line in observer.lines[: len(tries) + 1]]
    assert found == [*(f"{name} held" for name in tries), "listen_elsewhere got"]
    assert observer.sandbox.gaps == ("connections: cluster",)
    (ground.own / "own.sock").unlink()
    with socket.create_server(("127.0.0.1", 0)) as other:
        asks = Permissions(network="cluster", private_port=listener)
        observer = await ground.tried(daemon, other.getsockname()[1], "connect_tcp", asks=asks)
    assert observer.lines[0].startswith("connect_tcp got")


@pytest.mark.parametrize(("abi", "filters"), [(3, True), (7, False)])
def test_a_private_port_that_the_kernel_cannot_close_is_a_gap(monkeypatch, abi: int, filters: bool) -> None:
    monkeypatch.setattr(confinement, "landlock_abi", lambda: abi)
    monkeypatch.setattr(seccomp, "supported", lambda: filters)
    asks = Permissions(network="cluster", private_port=12434)
    gap = "connections, also to the daemon's TCP port while there is no API key: cluster"
    assert gap in confinement.confined("/bin/true", {}, asks).sandbox.gaps


async def test_a_variable_that_binds_threads_is_a_permission_and_is_reported(ground, daemon, listener) -> None:
    env = {"OMP_PROC_BIND": "true"}
    observer = await ground.tried(daemon, listener, "bind_daemon", "limit_daemon", asks=Permissions(), env=env)
    assert [line.split(":")[0] for line in observer.lines[:2]] == ["bind_daemon got", "limit_daemon held"]
    assert observer.sandbox.gaps == ("processors of other processes: OMP_PROC_BIND binds threads to processors",)


async def test_an_endpoint_on_tcp_is_the_only_port(ground, daemon, listener) -> None:
    code = "import socket, sys\nfor port in map(int, sys.argv[1:]):\n try: socket.create_server(('127.0.0.1', port))\n"
    code += " except OSError as error: print(port, error.errno)\n else: print(port, 'listens')"
    observer = Observer()
    with reserved_port() as port:
        options = ProcessOptions(ground.log, observer, permissions=Permissions(port=port))
        code += "\ntry: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)\nexcept OSError: print('no multipath')"
        words = [sys.executable, "-c", code, str(port), "0"]
        with pytest.raises(BackendExited):
            await process.run(words, env=process.scrubbed_environment(), options=options)
    assert observer.lines == [f"{port} listens", f"0 {errno.EACCES}", "no multipath"]
    assert observer.sandbox is not None
    assert [gap.partition(":")[0] for gap in observer.sandbox.gaps] == [
        "requests of other users of this machine",
        "listening on a port that the kernel chooses",
    ]


# What libcuda does before anything else. It fails with error 304, "OS call failed", if one of these is refused.
_AS_CUDA = """
import os, socket, threading
packets = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
packets.bind(f"\\0cuda-uvmfd-{os.getpid()}")
packets.listen()
os.close(os.memfd_create("cuda"))
def name():
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as comm:  # it truncates, as fopen(3) does
        comm.write("cuda-EvtHandlr")
    print("as cuda", flush=True)
thread = threading.Thread(target=name)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("asks", [Permissions(), Permissions(processes="workers", network="workers")])
@pytest.mark.parametrize("driver", [True, False])
async def test_cuda_can_begin_where_a_driver_is(ground, tmp_path, monkeypatch, asks: Permissions, driver: bool) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("null", "urandom", *(["nvidiactl"] if driver else [])):
        (devices / name).touch()
    monkeypatch.setattr(process, "confined", partial(confinement.confined, devices=devices))
    observer = Observer()
    options = ProcessOptions(ground.log, observer, permissions=ground.permissions)
    argv = [sys.executable, "-I", "-S", "-c", _AS_CUDA]
    with pytest.raises(BackendExited):
        await process.run(argv, env=process.scrubbed_environment(), options=options, permissions=asks)
    assert ("as cuda" in observer.lines) is driver


async def test_packets_reach_no_network(ground) -> None:
    """They would be SCTP, which Landlock does not know."""
    code = (
        "import socket\ntry: socket.socket(socket.AF_INET, socket.SOCK_SEQPACKET)\nexcept OSError as e: print(e.errno)"
    )
    observer = Observer()
    options = ProcessOptions(ground.log, observer, permissions=ground.permissions)
    with pytest.raises(BackendExited):
        await process.run([sys.executable, "-I", "-S", "-c", code], env={}, options=options)
    assert observer.lines == [str(errno.EACCES)]


async def test_limits_hold(ground, daemon, listener) -> None:
    code = "import resource as r; print(r.getrlimit(r.RLIMIT_CORE), max(r.getrlimit(r.RLIMIT_NOFILE)) <= 65536,"
    code += " max(r.getrlimit(r.RLIMIT_NPROC)) <= 16384, open('/proc/self/status').read().split('NoNewPrivs:')[1][1])"
    observer = Observer()
    options = ProcessOptions(ground.log, observer, permissions=Permissions())
    with pytest.raises(BackendExited):
        await process.run([sys.executable, "-c", code], env=process.scrubbed_environment(), options=options)
    assert observer.lines == ["(0, 0) True True 1"]


async def test_a_sandbox_that_the_kernel_refuses_prevents_the_start(ground, monkeypatch) -> None:
    monkeypatch.setattr(seccomp, "program", lambda **_: b"\xff" * 8)
    options = ProcessOptions(ground.log, permissions=Permissions())
    with pytest.raises(BackendUnavailable, match=r"cannot be confined here: .*sandbox = \"off\""):
        await process.run(["/bin/true"], env={}, options=options)


@pytest.mark.parametrize(
    ("abi", "filters", "told"),
    [
        (0, False, ("files, tracing", "connections", "new processes", "modes")),
        (1, True, ("truncation", "signals")),
        (3, True, ("signals",)),
        (6, True, ()),
        (7, False, ("connections", "new processes", "modes")),
    ],
)
def test_a_gap_of_the_kernel_is_said(monkeypatch, abi: int, filters: bool, told: tuple[str, ...]) -> None:
    monkeypatch.setattr(confinement, "landlock_abi", lambda: abi)
    monkeypatch.setattr(seccomp, "supported", lambda: filters)
    sandbox = confinement.confined("/bin/true", {}, Permissions()).sandbox
    assert len(sandbox.gaps) == len(told)
    assert all(gap.startswith(start) for gap, start in zip(sandbox.gaps, told, strict=True))


@pytest.mark.parametrize("abi", range(1, 8))
async def test_the_rules_of_every_version_are_accepted(ground, monkeypatch, abi: int) -> None:
    monkeypatch.setattr(confinement, "landlock_abi", lambda: abi)
    for asks in (Permissions(port=os.getpid()), Permissions(network="cluster", private_port=12434)):
        options = ProcessOptions(ground.log, permissions=Permissions(writes=(ground.own,)) | asks)
        with pytest.raises(BackendExited) as ended:
            await process.run(["/bin/true"], env={}, options=options)
        assert ended.value.returncode == 0


@pytest.mark.parametrize("by_script", [False, True])
async def test_a_python_that_was_copied_into_its_environment_finds_its_library(
    ground, tmp_path: Path, by_script: bool
) -> None:
    """And its headers: vLLM compiles some work when it first meets it."""
    venv.create(tmp_path / "env", symlinks=False)
    work = "import json, os, sysconfig; os.listdir(sysconfig.get_path('include')); print('found')"
    python, tool = tmp_path / "env/bin/python", tmp_path / "tools/tool"
    tool.parent.mkdir()
    tool.write_text(f"#!{python}\n{work}\n")
    tool.chmod(0o755)
    observer = Observer()
    options = ProcessOptions(ground.log, observer, permissions=ground.permissions)
    argv = [str(tool)] if by_script else [str(python), "-c", work]
    with pytest.raises(BackendExited) as ended:
        await process.run(argv, env=process.scrubbed_environment(), options=options, permissions=Permissions())
    assert (ended.value.returncode, observer.lines) == (0, ["found"])


@pytest.mark.parametrize("place", ["home", "data", "parent"])
async def test_a_program_does_not_open_the_home_folder_or_the_data_around_it(
    ground, tmp_path: Path, monkeypatch, place: str
) -> None:
    folder = {"home": tmp_path / "home", "data": ground.data, "parent": tmp_path}[place]
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (folder / "lib").mkdir()
    for name in ("secret", "libown.so.1", "lib/helper"):
        (folder / name).write_text(f"content of {name}\n")
    program = folder / "llama-server"
    program.write_text('#!/bin/sh\nfor file in "$@"; do read line < "$file" && echo "$line"; done\nls "${0%/*}"\n:\n')
    program.chmod(0o755)
    observer = Observer()
    options = ProcessOptions(ground.log, observer, permissions=Permissions(private=(ground.data,)))
    argv = [str(program), *(str(folder / name) for name in ("secret", "libown.so.1", "lib/helper"))]
    asks = Permissions(reads=(folder,), processes="it lists a folder")
    with pytest.raises(BackendExited) as ended:
        await process.run(argv, env=process.scrubbed_environment(), options=options, permissions=asks)
    assert ended.value.returncode == 0
    assert [line for line in observer.lines if line.startswith("content")] == [
        "content of libown.so.1",
        "content of lib/helper",
    ]
    assert sum("ermission denied" in line for line in observer.lines) == 2  # the secret, and the names beside it
    assert observer.sandbox is not None
    assert all(gap.startswith("new processes") for gap in observer.sandbox.gaps)


@pytest.mark.parametrize(
    ("private", "writes", "folder"), [("/opt/made/data", (), "/opt"), ("/srv/made/data", ("/srv/made",), "/srv/made")]
)
def test_a_private_folder_that_stays_open_is_a_gap(private: str, writes: tuple[str, ...], folder: str) -> None:
    asks = Permissions(private=(Path(private),), writes=tuple(map(Path, writes)))
    assert confinement.confined("/bin/true", {}, asks).sandbox.gaps == (f"files in {private}: it lies in {folder}",)
