"""Tools of MCP servers through a whole daemon: real servers, over stdio and HTTP."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.api.conftest import Daemon, StartDaemon, start_daemon
from tests.gateway.fakes import until
from tests.ports import reserved_port
from tests.waiting import HUNG

__all__ = ["start_daemon"]
SERVER = str(Path(__file__).with_name("server.py"))
STDIO: dict[str, Any] = {"command": [sys.executable, SERVER], "env": {"COLOUR": "blue"}}


@pytest.fixture
async def daemon(start_daemon: StartDaemon) -> Daemon:
    return await start_daemon(models={"smol": 0}, mcp={"local": STDIO}, tools_time=20.0)


@pytest.fixture
def http() -> Iterator[str]:
    with reserved_port() as port:
        process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()
        process.wait()


def servers() -> list[psutil.Process]:
    """The servers that daemons of this process have started and not yet ended."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if SERVER in child.cmdline():
                found.append(child)
    return found


async def call(daemon: Daemon, tool: str, **arguments: Any) -> tuple[int, Any]:
    async with daemon.tcp.post("/v1/tools/execute", json={"name": tool, "arguments": arguments}) as answer:
        return answer.status, await answer.json()


async def test_tools_are_listed_and_called(daemon: Daemon) -> None:
    async with daemon.tcp.get("/v1/tools") as answer:
        found = await answer.json()
    assert (answer.status, found["object"], found["errors"]) == (200, "list", {})
    add = next(tool for tool in found["data"] if tool["name"] == "local__add")
    assert (add["server"], add["description"]) == ("local", "Adds two numbers.")
    assert set(add["parameters"]["properties"]) == {"a", "b"}
    status, told = await call(daemon, "local__add", a=2, b=3)
    assert (status, told["text"], told["is_error"]) == (200, "5", False)
    assert told["structured_content"] == {"result": 5}


async def test_the_environment_is_the_servers_own(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert (await call(daemon, "local__environment", name="COLOUR"))[1]["text"] == "blue"
    assert (await call(daemon, "local__environment", name="OPENAI_API_KEY"))[1]["text"] == "none"


async def test_http(start_daemon: StartDaemon, http: str) -> None:
    daemon = await start_daemon(mcp={"web": {"url": http}})

    async def listening() -> bool:
        async with daemon.tcp.get("/v1/tools") as answer:
            return not (await answer.json())["errors"]

    while not await listening():
        pass
    assert (await call(daemon, "web__add", a=1, b=1))[1]["text"] == "2"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"arguments":{}}', 400),
        (b'{"name":7}', 400),
        (b'{"name":"local__add","arguments":[1]}', 400),
        (b'{"name":"nobody__add"}', 404),
        (b'{"name":"local"}', 404),
    ],
)
async def test_malformed_calls(daemon: Daemon, body: bytes, status: int) -> None:
    async with daemon.tcp.post("/v1/tools/execute", data=body, headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]["message"]


async def test_a_tools_own_errors(daemon: Daemon) -> None:
    status, told = await call(daemon, "local__fail")
    assert (status, told["is_error"]) == (200, True)
    assert "fail" in told["text"]
    status, told = await call(daemon, "local__add", a="x")
    assert status == 400 or told["is_error"]
    status, told = await call(daemon, "local__nothing")
    assert status == 400 or told["is_error"]
    assert (await call(daemon, "local__add", a=1, b=1))[0] == 200


async def test_a_server_that_ends_is_started_again(daemon: Daemon) -> None:
    before = (await call(daemon, "local__process"))[1]["text"]
    status, told = await call(daemon, "local__die")
    assert (status, told["error"]["code"]) == (502, "tool_server_failed")
    assert (await call(daemon, "local__process"))[1]["text"] != before
    assert not psutil.pid_exists(int(before))


async def test_a_call_that_takes_too_long(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(mcp={"local": STDIO}, tools_time=3.0)
    status, told = await call(daemon, "local__sleep", seconds=600)
    assert (status, told["error"]["code"]) == (502, "tool_server_failed")
    assert "took more than" in told["error"]["message"]
    await until(lambda: not servers())


async def test_a_server_that_never_speaks(start_daemon: StartDaemon) -> None:
    mute = {"command": [sys.executable, "-c", "import time; time.sleep(600)"]}
    daemon = await start_daemon(mcp={"mute": mute}, tools_time=1.0)
    async with daemon.tcp.get("/v1/tools") as answer:
        assert "took more than" in (await answer.json())["errors"]["mute"]
    status, told = await call(daemon, "mute__x")
    assert (status, told["error"]["code"]) == (502, "tool_server_failed")


async def test_servers_that_do_not_work_are_named(start_daemon: StartDaemon) -> None:
    bad = {"gone": {"command": ["/no/such/program"]}, "dead": {"command": [sys.executable, "-c", "pass"]}}
    daemon = await start_daemon(mcp={"local": STDIO, **bad})
    async with daemon.tcp.get("/v1/tools") as answer:
        found = await answer.json()
    assert set(found["errors"]) == {"gone", "dead"}
    assert any(tool["name"] == "local__add" for tool in found["data"])


async def test_without_a_server_and_for_keys(start_daemon: StartDaemon, tmp_path: Path) -> None:
    plain = await start_daemon(folder=tmp_path / "plain")
    async with plain.tcp.get("/v1/tools") as answer:
        assert answer.status == 501
        assert "[mcp.NAME]" in (await answer.json())["error"]["message"]
    async with plain.unix.post("/keys", json={"name": "a", "scopes": ["models"]}) as made:
        head = {"Authorization": f"Bearer {(await made.json())['text']}"}
    async with plain.tcp.post("/v1/tools/execute", json={"name": "x"}, headers=head) as answer:
        assert answer.status == 403


def test_nothing_of_a_server_is_left_when_the_daemon_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio; from pathlib import Path; from modelrunner.tools.toolbox import Toolbox\n"
        "from modelrunner.types import McpServer\n"
        "async def main():\n"
        f"    box = Toolbox({{'s': McpServer(({sys.executable!r}, {SERVER!r}))}}, Path({str(tmp_path)!r}), "
        f"Path({str(tmp_path)!r}), 30.0)\n"
        "    print((await box.call('s__process', {})).text, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())"
    )
    daemon = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert daemon.stdout is not None
    pid = int(daemon.stdout.readline())
    descendants = psutil.Process(daemon.pid).children(recursive=True)
    assert pid in {process.pid for process in descendants}
    daemon.kill()
    daemon.wait()
    daemon.stdout.close()
    _, alive = psutil.wait_procs(descendants, HUNG)
    assert not alive
