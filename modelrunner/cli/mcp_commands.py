"""The command mcp: an MCP server (Model Context Protocol) whose tools are the daemon's models."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import click
import msgspec

from modelrunner import wire
from modelrunner.cli.client import HttpClient
from modelrunner.cli.common_options import with_client
from modelrunner.errors import ModelRunnerError, NotImplementedHere

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


@click.command()
@with_client()
def mcp(client: HttpClient) -> None:
    """Serve the models as tools of an MCP server.

    It speaks over stdin and stdout; the tools are list_models, load_model, ask and embed.
    """
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        raise NotImplementedHere("`modelrunner mcp` needs the extra `mcp`: pip install 'modelrunner[mcp]'") from None
    server = MCPServer("modelrunner", instructions="Language models that run on this machine.")

    def tool(function: Callable[_Parameters, _Result]) -> None:
        @wraps(function)
        def called(*args: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
            try:
                return function(*args, **options)
            except ModelRunnerError as error:
                raise ToolError(error.message) from None

        server.tool()(called)

    def post(path: str, body: dict[str, Any]) -> Any:
        return msgspec.json.decode(client.fetch("POST", path, body, timeout=None))

    def list_models() -> list[str]:
        """Lists the models that are on this machine."""
        return [model.id for model in client.call("GET", "/v1/models", wire.OpenAIModels).data]

    def load_model(model: str) -> str:
        """Loads a model into memory, so that its next answer begins at once."""
        *_, last = client.progress("/engines/preload", wire.ModelName(model))
        return last.message

    def ask(model: str, prompt: str, system: str = "", max_tokens: int = 1024) -> str:
        """Asks a model of this machine a question, and returns its answer."""
        opening = [{"role": "system", "content": system}] if system else []
        messages = [*opening, {"role": "user", "content": prompt}]
        answer = post("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": max_tokens})
        return str(answer["choices"][0]["message"]["content"] or "")

    def embed(model: str, text: str) -> list[float]:
        """Returns the embedding of a text by a model of this machine."""
        vector: list[float] = post("/v1/embeddings", {"model": model, "input": text})["data"][0]["embedding"]
        return vector

    for function in (list_models, load_model, ask, embed):
        tool(function)
    server.run()
