"""MCP servers over HTTP that answer anything: a failure in words, no secret in the log."""

import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from modelrunner.daemon.logs import daemon_log, logging_to
from modelrunner.errors import ToolServerFailed
from modelrunner.tools import toolbox
from modelrunner.tools.toolbox import Toolbox
from modelrunner.types import McpServer
from tests.waiting import HUNG

Answer = Callable[[web.Request, Any], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def asked(answer: Answer, folder: Path) -> AsyncIterator[Toolbox]:
    """The tools of a server that gives `answer` to each message."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(request, await request.json() if request.method == "POST" else {})

    app = web.Application()
    app.router.add_route("*", "/mcp", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    server = McpServer(url=f"http://127.0.0.1:{port}/mcp?key=SECRET-Q", headers={"Authorization": "Bearer SECRET-H"})
    box = Toolbox({"s": server}, folder, folder, HUNG)
    try:
        yield box
    finally:
        await box.close()
        await runner.cleanup()


async def refusing(request: web.Request, message: Any) -> web.StreamResponse:
    return web.Response(status=401)


async def endless(request: web.Request, message: Any) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while True:
        await response.write(b" " * (1 << 20))


async def bomb(request: web.Request, message: Any) -> web.StreamResponse:
    head = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    return web.Response(body=gzip.compress(bytes(64 << 20)), headers=head)


async def elsewhere(request: web.Request, message: Any) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": "http://169.254.169.254/"})


async def page(request: web.Request, message: Any) -> web.StreamResponse:
    return web.Response(text="<html>", content_type="text/html")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (refusing, "error response"),
        (endless, "more than 16777216 bytes"),
        (bomb, "content coding"),
        (elsewhere, "not followed"),
        (page, "text/html"),
    ],
)
async def test_a_failure_is_told_in_words_and_without_secrets(tmp_path: Path, answer: Answer, said: str) -> None:
    with logging_to(tmp_path, "info"):
        async with asked(answer, tmp_path) as box:
            tools, faults = await box.tools()
            assert tools == []
            assert said in faults["s"]
            with pytest.raises(ToolServerFailed, match=said):
                await box.call("s__x", {})
    told = daemon_log(tmp_path).read_text() + str(faults)
    assert "the MCP server s" in told
    assert "SECRET" not in told


async def listing_without_end(request: web.Request, message: Any) -> web.StreamResponse:
    """A server that speaks the protocol, and always has more tools."""
    if message.get("method") == "initialize":
        about = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}}}
        result = about | {"serverInfo": {"name": "s", "version": "1"}}
    elif message.get("method") == "tools/list":
        result = {"tools": [{"name": f"t{n}", "inputSchema": {"type": "object"}} for n in range(100)]}
        result["nextCursor"] = "more"
    else:
        return web.Response(status=202 if request.method == "POST" else 405)
    return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result})


async def test_a_list_without_an_end(tmp_path: Path) -> None:
    async with asked(listing_without_end, tmp_path) as box:
        tools, faults = await box.tools()
    assert tools == []
    assert f"more than {toolbox._MOST_TOOLS} tools" in faults["s"]
