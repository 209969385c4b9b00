"""The tools of the configured MCP servers, under the names `SERVER__TOOL`."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from modelrunner.errors import BadRequest, ModelRunnerError, NotFound, NotImplementedHere, ToolServerFailed
from modelrunner.types import McpServer

if TYPE_CHECKING:
    from mcp import Client

log = logging.getLogger(__name__)
_LISTING = 30.0  # seconds
_MOST_TOOLS = 1000  # of one server


class ServerTool(NamedTuple):
    """`parameters` is a JSON schema."""

    name: str
    server: str
    description: str
    parameters: dict[str, Any]


class ToolResult(NamedTuple):
    """`content` are MCP's blocks, `text` those of text in one. `is_error` is the tool's own word."""

    content: list[dict[str, Any]]
    structured: Any
    is_error: bool

    @property
    def text(self) -> str:
        return "\n".join(str(block["text"]) for block in self.content if block.get("type") == "text")


class Toolbox:
    """`folder` is for sockets, `logs` for the stderr of servers of the kind stdio; a call may take `seconds`. A server
    is started, or connected to, when it is first wanted, and again after it has failed."""

    def __init__(self, servers: Mapping[str, McpServer], folder: Path, logs: Path, seconds: float) -> None:
        self._servers = servers
        self._folder, self._logs, self._seconds = folder, logs, seconds
        self._connections: dict[str, _OpenServer] = {}

    async def tools(self) -> tuple[list[ServerTool], dict[str, str]]:
        """Returns the tools, and for each server that failed the reason. Raises `NotImplementedHere` without the
        package."""
        listings = await asyncio.gather(*(self._listed(name) for name in self._servers), return_exceptions=True)
        tools: list[ServerTool] = []
        faults: dict[str, str] = {}
        for name, each in zip(self._servers, listings, strict=True):
            match each:
                case list():
                    tools += each
                case ToolServerFailed():
                    faults[name] = each.message
                case _:
                    raise each
        return tools, faults

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Calls a tool. Raises `NotFound` for an unknown server, `ToolServerFailed`, `NotImplementedHere`."""
        server, _, tool = name.partition("__")
        if server not in self._servers or not tool:
            raise NotFound(f"there is no tool {name!r}: GET /v1/tools lists those that are here", param="name")
        connection = self._connection(server)
        client = await self._client(server, connection)
        try:
            async with asyncio.timeout(self._seconds):
                result = await client.call_tool(tool, dict(arguments))
        except Exception as error:
            raise await self._failed(server, connection, error) from None
        content = [block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in result.content]
        return ToolResult(content, result.structured_content, result.is_error)

    async def close(self) -> None:
        """Ends every connection, and the servers that are processes of ours."""
        await asyncio.gather(*(self._forget(*each) for each in list(self._connections.items())))

    async def _listed(self, name: str) -> list[ServerTool]:
        connection = self._connection(name)
        client = await self._client(name, connection)
        try:
            async with asyncio.timeout(_LISTING):
                tools, cursor = [], None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    if len(tools) > _MOST_TOOLS:
                        raise ToolServerFailed(f"it has more than {_MOST_TOOLS} tools")
                    if (cursor := page.next_cursor) is None:
                        break
        except Exception as error:
            raise await self._failed(name, connection, error) from None
        return [ServerTool(f"{name}__{tool.name}", name, tool.description or "", tool.input_schema) for tool in tools]

    def _connection(self, name: str) -> "_OpenServer":
        connection = self._connections.get(name)
        if connection is None or connection.task.done():
            connection = self._connections[name] = _OpenServer(name, self._servers[name], self._folder, self._logs)
        return connection

    async def _client(self, name: str, connection: "_OpenServer") -> "Client":
        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.shield(connection.client)
        except (ModelRunnerError, TimeoutError) as error:
            if isinstance(error, NotImplementedHere):
                raise
            raise await self._failed(name, connection, error) from None

    async def _failed(self, name: str, connection: "_OpenServer", error: Exception) -> ModelRunnerError:
        """Returns the error of a server. A call that the server refuses is the caller's fault; after another the
        connection is given up."""
        if type(error).__name__ == "MCPError" and getattr(error, "code", 0) in (-32602, -32601):
            return BadRequest(f"the MCP server {name} refuses the call: {error}")
        await self._forget(name, connection)
        what = f"took more than {self._seconds:g} s" if isinstance(error, TimeoutError) else f"failed: {_reason(error)}"
        return ToolServerFailed(f"the MCP server {name} {what}")

    async def _forget(self, name: str, connection: "_OpenServer") -> None:
        """Forgets and closes this connection. A newer connection to the server stays, with the calls on it."""
        if self._connections.get(name) is connection:
            del self._connections[name]
        await connection.close()


def _reason(error: BaseException) -> str:
    """Returns the message of the failure. A group of tasks says only how many failed, so its first failure is told."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


class _OpenServer:
    """`client` is the server's client once it is connected."""

    def __init__(self, name: str, server: McpServer, folder: Path, logs: Path) -> None:
        self.client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._hold(name, server, folder, logs), name=f"MCP server {name}")

    async def _hold(self, name: str, server: McpServer, folder: Path, logs: Path) -> None:
        try:
            from modelrunner.tools.sessions import session
        except ImportError:
            self._fail(NotImplementedHere("tools need the extra `mcp`: pip install 'modelrunner[mcp]'"))
            return
        try:
            async with session(name, server, folder, logs) as client:
                if not self.client.done():
                    self.client.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            log.warning("the MCP server %s: %s", name, _reason(error))
            self._fail(ToolServerFailed(_reason(error)))
        finally:
            self._fail(ToolServerFailed("the connection was closed"))

    def _fail(self, error: ModelRunnerError) -> None:
        if not self.client.done():
            self.client.set_exception(error)
            self.client.exception()  # it may be that nobody waits

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
