"""/openapi.json describes every route of the daemon."""

import re
from typing import Any

from modelrunner.gateway.routes import all_routes
from tests.api.conftest import Daemon, StartDaemon

NAMES = re.compile(r"\{(\w+)[^{}]*\}")


async def document_of(daemon: Daemon) -> dict[str, Any]:
    async with daemon.tcp.get("/openapi.json") as answer:
        assert answer.status == 200
        found: dict[str, Any] = await answer.json()
        return found


def refs(value: Any) -> set[str]:
    match value:
        case dict():
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(refs, value.values()))
        case list():
            return set[str]().union(*map(refs, value))
    return set()


async def test_every_route_is_described(start_daemon: StartDaemon) -> None:
    """Those of inference, and those of the control plane as the router has them."""
    document = await document_of(await start_daemon())
    paths = document["paths"]
    for pattern, _, _ in all_routes():
        assert "post" in paths[pattern], pattern
    assert "get" in paths["/models/{ref}/fit"]
    assert "post" in paths["/engines/unpin"]
    for path, operations in paths.items():
        for method, operation in operations.items():
            assert operation["summary"], path
            named = [parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"]
            assert named == NAMES.findall(path)
            is_open = path in ("/", "/health", "/ready", "/openapi.json", "/docs") or path.startswith("/ui")
            assert operation["security"] == [] if is_open else len(operation["security"]) == 3, (method, path)
    ids = [operation["operationId"] for operations in paths.values() for operation in operations.values()]
    assert len(ids) == len(set(ids))
    for ref in refs(document):
        _, components, kind, name = ref.split("/")
        assert name in document[components][kind]


async def test_scopes_and_error_shapes(start_daemon: StartDaemon) -> None:
    paths = (await document_of(await start_daemon()))["paths"]
    assert paths["/keys"]["get"]["security"][0] == {"bearer": ["admin"]}
    assert paths["/models/create"]["post"]["security"][1] == {"key": ["models"]}
    assert paths["/v1/messages"]["post"]["security"][0] == {"bearer": ["inference"]}
    assert paths["/api/show"]["post"]["responses"]["404"]["$ref"].endswith("/OllamaError404")
    assert paths["/anthropic/v1/messages"]["post"]["responses"]["429"]["$ref"].endswith("/AnthropicError429")
