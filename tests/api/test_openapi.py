"""/openapi.json describes every route of the daemon."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelrunner.gateway.routes import all_routes
from modelrunner.store import Store
from tests.api.conftest import Daemon, StartDaemon
from tests.store.samples import add_model

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
        assert "*/*" not in paths[pattern]["post"]["requestBody"]["content"], pattern
        assert "*/*" not in paths[pattern]["post"]["responses"]["200"]["content"], pattern
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


SAMPLES: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a"}],
    "documents": ["a"],
    "tokens": [1],
    "max_tokens": 1,
    "target": "mine",
    "destination": "mine",
    "name": "mine",
} | dict.fromkeys(("prompt", "input", "query", "text_1", "text_2", "content"), "a")


def requests_for(document: dict[str, Any], model: str) -> Iterator[tuple[str, str, str, dict[str, Any] | None]]:
    """(method, pattern, path with query, body) of each operation that takes a model's name, those that remove last."""
    schemas = document["components"]["schemas"]
    everything = [
        (method, path, o) for path, operations in document["paths"].items() for method, o in operations.items()
    ]
    for method, path, operation in sorted(everything, key=lambda found: found[0] == "delete"):
        queries = {p["name"] for p in operation["parameters"] if p["in"] == "query"}
        content = operation.get("requestBody", {}).get("content", {}).get("application/json", {"schema": {}})
        fields = schemas.get(content["schema"].get("$ref", "").rpartition("/")[2], {}).get("properties", {})
        takes_model = "{ref}" in path or "model" in queries | fields.keys()
        if not takes_model or path in ("/api/pull", "/api/push"):
            continue
        where = path.replace("{ref}", model).replace("{backend}", "fake").replace("{id}", "none")
        query = {"model": model, "repo": "mine"}
        where += "?" + "&".join(f"{name}={query[name]}" for name in sorted(query.keys() & queries))
        samples = SAMPLES | {"model": model, "source": model, "from": model}
        yield method, path, where, {name: samples[name] for name in fields if name in samples} if fields else None


@pytest.mark.parametrize("damage", ["manifest", "file"])
async def test_what_a_damaged_model_is_answered_is_described(
    start_daemon: StartDaemon, tmp_path: Path, subtests: pytest.Subtests, damage: str
) -> None:
    store = Store(tmp_path / "data_dir")
    model = add_model(store, "hurt", 1)
    if damage == "manifest":
        (tmp_path / "data_dir" / "manifests" / "sha256" / model.id.removeprefix("sha256:")).write_bytes(b"{")
    else:
        for file in (tmp_path / "data_dir" / "blobs" / "sha256").iterdir():
            file.unlink()
    daemon = await start_daemon(listen="")
    async with daemon.unix.get("/openapi.json") as answer:
        document = await answer.json()
    refused = set()
    for method, pattern, path, body in requests_for(document, "hurt"):
        with subtests.test(method=method, path=pattern):
            async with daemon.unix.request(method, path, json=body) as answer:
                assert str(answer.status) in document["paths"][pattern][method]["responses"]
                if answer.status == 422:
                    refused.add(pattern)
    assert refused >= {"/models/{ref}/export", "/api/show", "/engines/pin", "/v1/chat/completions"}
