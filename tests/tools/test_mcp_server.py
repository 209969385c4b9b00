"""`modelrunner mcp` with the `mcp` package's own client, against a whole daemon."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mcp import Client, StdioServerParameters

from tests.api.conftest import Daemon, StartDaemon, start_daemon

__all__ = ["start_daemon"]


@asynccontextmanager
async def served(daemon: Daemon) -> AsyncIterator[Client]:
    arguments = ["-m", "modelrunner", "mcp", "--host", f"http://127.0.0.1:{daemon.port}"]
    async with Client(StdioServerParameters(command=sys.executable, args=arguments)) as client:
        yield client


def text(result: Any) -> str:
    return "".join(block.text for block in result.content)


async def test_the_daemon_as_a_server_of_tools(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--tokens", "3")
    async with served(daemon) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == [
            "list_models",
            "load_model",
            "ask",
            "embed",
        ]
        assert (await client.call_tool("list_models")).structured_content == {"result": ["smol"]}
        assert not (await client.call_tool("load_model", {"model": "smol"})).is_error
        assert daemon.backend.runs == 1
        answer = await client.call_tool("ask", {"model": "smol", "prompt": "hello", "max_tokens": 3})
        assert text(answer) == "w0 w1 w2 "
        vector = await client.call_tool("embed", {"model": "smol", "text": "hello"})
        assert vector.structured_content == {"result": [5.0, 0.5, -0.5]}


async def test_errors_are_the_daemons(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    async with served(daemon) as client:
        unknown = await client.call_tool("ask", {"model": "nope", "prompt": "hello"})
        assert unknown.is_error
        assert "not here" in text(unknown)
        assert (await client.call_tool("load_model", {"model": "nope"})).is_error
