"""The tools of the configured MCP servers: a list, and a call."""

from aiohttp import web

from modelrunner import wire
from modelrunner.api.documented import documented
from modelrunner.api.messages import json_response, read_json
from modelrunner.errors import NotImplementedHere
from modelrunner.tools.toolbox import Toolbox


class ToolRoutes:
    """`toolbox` is None if no server is configured."""

    def __init__(self, toolbox: Toolbox | None) -> None:
        self._toolbox = toolbox

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/tools", self.list), web.post("/v1/tools/execute", self.execute)]

    def _tools(self) -> Toolbox:
        if self._toolbox is None:
            raise NotImplementedHere("no MCP server is configured: add one as [mcp.NAME] to config.toml")
        return self._toolbox

    @documented(wire.ToolList, errors=(501,))
    async def list(self, request: web.Request) -> web.Response:
        """Lists the tools of the configured MCP servers."""
        tools, faults = await self._tools().tools()
        return json_response(wire.ToolList([wire.ToolStatus(*tool) for tool in tools], faults))

    @documented(wire.ToolAnswer, body=wire.ToolCallRequest, errors=(501, 502))
    async def execute(self, request: web.Request) -> web.Response:
        """Calls a tool of an MCP server."""
        tools = self._tools()
        wanted = await read_json(request, wire.ToolCallRequest)
        result = await tools.call(wanted.name, wanted.arguments)
        answer = wire.ToolAnswer(wanted.name, result.text, result.content, result.structured, result.is_error)
        return json_response(answer)
