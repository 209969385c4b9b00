"""A real MCP server, made with the `mcp` package: over stdio, or with a port over HTTP."""

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def environment(name: str) -> str:
    """A variable of the server's environment."""
    return os.environ.get(name, "none")


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("as it must")


@server.tool()
def sleep(seconds: float) -> str:
    """Takes its time."""
    time.sleep(seconds)
    return "slept"


@server.tool()
def process() -> int:
    """The server's process ID."""
    return os.getpid()


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
