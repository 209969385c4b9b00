"""An engine that may open connections is no client of the daemon: it would be its owner."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from modelrunner.errors import BackendExited
from modelrunner.processes import confinement, process
from modelrunner.types import ProcessOptions
from tests.api.conftest import Daemon, StartDaemon
from tests.fakes import FAKE_ENGINE, Observer

CHAT = {"model": "smol", "messages": [{"role": "user", "content": "x"}]}
ASKING = """
import json, os, socket, sys
KEY = b'{"name": "evil", "scopes": ["admin"]}'
HEAD = b"POST /keys HTTP/1.1\\r\\nHost: 127.0.0.1:%b\\r\\nContent-Length: %d\\r\\n\\r\\n"
ASK = HEAD % (sys.argv[2].encode(), len(KEY)) + KEY

def to_socket():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    return connection

def to_port():
    return socket.create_connection(("127.0.0.1", int(sys.argv[2])))

def ask(connection):
    connection.sendall(ASK)
    return connection.recv(12)

def far_away(connect_late):
    '''From a process in a session of its own, whose parent has ended: before or after it has connected.'''
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        connection = None if connect_late else to_socket()
        parent = os.getpid()
        if os.fork() == 0:
            os.setsid()
            while os.getppid() == parent:
                pass
            os.write(writer, ask(connection or to_socket()))
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(reader, 12)
"""
ENGINE = (
    ASKING
    + """
answers = [ask(to_socket()), far_away(True), far_away(False)]
try:
    answers.append(ask(to_port()))
except PermissionError:
    answers.append(b"HTTP/1.1 0")
with open(sys.argv[3], "w") as report:
    json.dump([int(answer.split()[1]) for answer in answers], report)
os.execv(sys.argv[4], sys.argv[4:])
"""
)
pytestmark = pytest.mark.skipif(confinement.landlock_abi() < 4, reason="this kernel's Landlock knows no ports")


async def answers(daemon: Daemon, report: Path) -> list[int]:
    """The statuses that the engine gets over the socket in three ways, and over TCP; 0 where it may not connect."""
    backend, where = daemon.backend, str(daemon.settings.runtime_dir / "modelrunner.sock")
    python = (sys.executable, "-I", "-S")
    backend.permissions = replace(backend.permissions, network="it has a cluster")
    backend.executable = (*python, "-c", ENGINE, where, str(daemon.port), str(report), *python, str(FAKE_ENGINE))
    async with daemon.unix.post("/v1/chat/completions", json=CHAT) as answer:
        assert answer.status == 200, await answer.text()
    told: list[int] = json.loads(report.read_text())
    return told


async def test_the_socket_and_the_port_are_closed_to_it(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Landlock closes the port, whether there is an API key or not."""
    daemon = await start_daemon(models={"smol": 0})
    assert await answers(daemon, tmp_path / "report") == [403, 403, 403, 0]
    async with daemon.unix.get("/keys") as answer:
        assert await answer.json() == []
    async with daemon.unix.get("/version") as answer:
        [sandbox] = (await answer.json())["sandboxes"].values()
    assert "connections: it has a cluster" in sandbox


async def test_others_are_clients_meanwhile(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Also a child of the daemon that is no engine, as a server of tools."""
    daemon = await start_daemon(models={"smol": 0})
    await answers(daemon, tmp_path / "report")
    observer, where = Observer(), str(daemon.settings.runtime_dir / "modelrunner.sock")
    argv = [sys.executable, "-I", "-S", "-c", f"{ASKING}\nprint(ask(to_socket()).decode())", where, "1"]
    with pytest.raises(BackendExited):
        await process.run(argv, env={}, options=ProcessOptions(tmp_path / "log", observer))
    assert observer.lines == ["HTTP/1.1 201"]
    async with daemon.unix.get("/keys") as answer:
        assert answer.status == 200
