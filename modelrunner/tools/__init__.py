"""Tools of MCP servers. The `mcp` package is an extra: only `sessions.py` imports it, when a tool is first wanted."""
