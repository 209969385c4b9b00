"""Who may use which route of the control plane, and that nobody else gets in: a route that the table lacks fails the
test."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from modelrunner.gateway.routes import all_routes
from modelrunner.keys.ring import Scope
from tests.api.conftest import Daemon, StartDaemon
from tests.api.test_keys import call, make_key
from tests.api.test_openapi import NAMES, document_of

OPEN = "GET / GET /docs GET /health GET /openapi.json GET /ready GET /ui GET /ui/{name}"
TABLE = {
    Scope.INFERENCE: """
        GET /anthropic/v1/models
        GET /anthropic/v1/models/{ref}
        GET /engines/requests/{id}
        GET /api/ps
        POST /api/show
        GET /api/tags
        GET /api/version
        GET /engines/v1/audio/voices
        GET /engines/v1/batches
        POST /engines/v1/batches
        GET /engines/v1/batches/{id}
        POST /engines/v1/batches/{id}/cancel
        GET /engines/v1/files
        POST /engines/v1/files
        DELETE /engines/v1/files/{id}
        GET /engines/v1/files/{id}
        GET /engines/v1/files/{id}/content
        GET /engines/v1/models
        GET /engines/v1/models/{ref}
        POST /engines/v1/images/edits
        POST /engines/v1/images/generations
        POST /engines/v1/images/variations
        POST /engines/v1/moderations
        GET /engines/v1/realtime
        DELETE /engines/v1/responses/{id}
        GET /engines/v1/responses/{id}
        POST /engines/v1/responses/compact
        POST /engines/v1/responses/input_tokens
        POST /engines/v1/responses/{id}/cancel
        GET /engines/v1/responses/{id}/input_items
        GET /engines/{backend}/v1/models
        GET /engines/{backend}/v1/models/{ref}
        GET /models
        GET /models/import
        GET /models/{ref}
        GET /models/{ref}/fit
        GET /models/{ref}/show
        GET /v1/audio/voices
        GET /v1/batches
        POST /v1/batches
        GET /v1/batches/{id}
        POST /v1/batches/{id}/cancel
        GET /v1/files
        POST /v1/files
        DELETE /v1/files/{id}
        GET /v1/files/{id}
        GET /v1/files/{id}/content
        GET /v1/models
        GET /v1/models/{ref}
        POST /v1/images/edits
        POST /v1/images/generations
        POST /v1/images/variations
        POST /v1/moderations
        GET /v1/realtime
        DELETE /v1/responses/{id}
        GET /v1/responses/{id}
        POST /v1/responses/compact
        POST /v1/responses/input_tokens
        POST /v1/responses/{id}/cancel
        GET /v1/responses/{id}/input_items
        DELETE /v1/streams/{id}
        GET /v1/streams/{id}
        GET /v1/tools
        POST /v1/tools/execute
        GET /version
    """,
    Scope.MODELS: """
        POST /models/{ref}/quantize
        HEAD /api/blobs/{digest}
        POST /api/blobs/{digest}
        POST /api/copy
        POST /api/create
        DELETE /api/delete
        POST /api/pull
        POST /api/push
        GET /engines/df
        DELETE /engines/v1/models/{ref}
        DELETE /engines/{backend}/v1/models/{ref}
        POST /models/create
        POST /models/import
        POST /models/load
        POST /models/prune
        GET /models/search
        DELETE /models/{ref}
        GET /models/{ref}/export
        POST /models/{ref}/push
        POST /models/{ref}/repackage
        POST /models/{ref}/tag
        POST /models/{ref}/check
        POST /models/{ref}/move
        POST /models/{ref}/verify
        GET /pulls
        DELETE /pulls/{ref}
        GET /updates
        DELETE /v1/models/{ref}
    """,
    Scope.ADMIN: """
        GET /engines/_configure
        POST /engines/_configure
        GET /engines/_configure/schema
        GET /engines/events
        GET /engines/history
        GET /engines/machine
        POST /engines/install-backend
        GET /engines/now
        POST /engines/pause
        POST /engines/pin
        POST /engines/preload
        POST /engines/prune
        GET /engines/ps
        POST /engines/reload
        GET /engines/settings
        POST /engines/settings
        GET /engines/requests
        POST /engines/requests/{id}/cancel
        POST /engines/resume
        GET /engines/status
        POST /engines/tune
        POST /engines/uninstall-backend
        POST /engines/unload
        POST /engines/unpin
        POST /engines/update-backend
        GET /engines/why
        GET /hosts
        POST /hosts/preload
        POST /hosts/{name}/drain
        GET /engines/{backend}/_configure
        POST /engines/{backend}/_configure
        GET /keys
        POST /keys
        DELETE /keys/{name}
        POST /keys/{name}/rotate
        GET /logs
        GET /metrics
        POST /shutdown
        GET /usage
    """,
}
LOCAL: dict[str, bool | list[str]] = {
    "POST /api/pull": ["model"],
    "POST /engines/_configure": ["lora"],
    "POST /engines/{backend}/_configure": ["lora"],
    "GET /models/import": True,
    "POST /models/import": True,
    "POST /models/create": ["from", "trust-remote-code"],
    "POST /models/load": ["trust"],
    "POST /models/{ref}/push": ["sign"],
    "POST /models/{ref}/repackage": ["ref"],
}
"""The routes, or their fields, that only the Unix socket serves."""
FILE = "file:///x.gguf"
USES: list[tuple[str, str, dict[str, Any]]] = [
    ("POST /api/pull", "model", {"model": FILE}),
    ("POST /engines/_configure", "lora", {"model": "smol", "lora": ["/x.gguf"]}),
    ("POST /engines/{backend}/_configure", "lora", {"model": "smol", "lora": ["/x.gguf"]}),
    ("GET /models/import", "", {}),
    ("POST /models/import", "", {"model": "x"}),
    ("POST /models/create", "from", {"from": FILE, "name": "x"}),
    ("POST /models/create", "from", {"from": "smol", "name": "x", "mmproj": FILE}),
    ("POST /models/create", "trust-remote-code", {"from": "smol", "trust-remote-code": True}),
    ("POST /models/load", "trust", {}),
    ("POST /models/{ref}/push", "sign", {"sign": "/x.pem"}),
    ("POST /models/{ref}/repackage", "ref", {"target": "x", "context_size": 64}),
]
ENDS_THE_DAEMON = "POST /shutdown"


def routes(text: str) -> list[str]:
    words = text.split()
    return [f"{method} {path}" for method, path in zip(words[::2], words[1::2], strict=True)]


def every_route() -> Iterator[tuple[str, Scope]]:
    for scope, text in TABLE.items():
        yield from ((route, scope) for route in routes(text))
    for pattern, _, _ in all_routes():
        yield f"POST {pattern}", Scope.INFERENCE


async def refusal_of(daemon: Daemon, route: str, key: str) -> int:
    """What the key may not do there: 401, 403 for a scope that it lacks, else 0. The request has no body that could be
    worked on. Some routes refuse everybody on TCP."""
    method, pattern = route.split()
    headers = {"X-API-Key": key} if key else {}
    async with aiohttp.request(
        method, f"http://127.0.0.1:{daemon.port}{NAMES.sub('none', pattern)}", data=b"[]", headers=headers
    ) as answer:
        lacks = answer.status == 403 and (method == "HEAD" or "lacks the scope" in await answer.text())
        return answer.status if lacks or answer.status == 401 else 0


async def test_every_route_has_its_scope(start_daemon: StartDaemon) -> None:
    paths = (await document_of(await start_daemon()))["paths"]
    told = {
        f"{method.upper()} {path}": "".join(scope for each in operation["security"][:1] for scope in each["bearer"])
        for path, operations in paths.items()
        for method, operation in operations.items()
    }
    assert told == {**dict.fromkeys(routes(OPEN), ""), **dict(every_route())}


async def test_what_only_the_unix_socket_serves_is_described_and_refused(
    start_daemon: StartDaemon, subtests: pytest.Subtests
) -> None:
    daemon = await start_daemon(models={"smol": 0})
    paths = (await document_of(daemon))["paths"]
    told = {
        f"{method.upper()} {path}": operation["x-unix-socket-only"]
        for path, operations in paths.items()
        for method, operation in operations.items()
        if "x-unix-socket-only" in operation
    }
    assert told == LOCAL
    assert "can be trusted only over the Unix socket." in paths["/models/load"]["post"]["description"]
    used: dict[str, set[str]] = {}
    for route, field, body in USES:
        used.setdefault(route, set()).add(field)
        with subtests.test(route, field=field):
            method, pattern = route.split()
            path = pattern.replace("{backend}", "fake").replace("{ref}", quote(FILE, safe=""))
            headers = {"Content-Type": "application/x-tar"} if field == "trust" else {}
            sent = {"trust": "1"} if field == "trust" else {}
            async with daemon.tcp.request(method, path, params=sent, json=body, headers=headers) as answer:
                error = await answer.json()
            error = error["error"] if isinstance(error["error"], dict) else {"message": error["error"], "param": field}
            assert answer.status == 403, error
            assert "only over the Unix socket" in error["message"]
            assert error["param"] == (field or None)
    assert {route: {""} if fields is True else set(fields) for route, fields in LOCAL.items()} == used  # type: ignore[arg-type]


async def test_no_other_key_opens_it(start_daemon: StartDaemon, subtests: pytest.Subtests) -> None:
    daemon = await start_daemon(models={"none": 0})
    keys = {scope: await make_key(daemon, name=scope, scopes=[scope]) for scope in Scope}
    everything = list(Scope)
    expired = await make_key(daemon, name="expired", scopes=everything, expires="0s")
    revoked = await make_key(daemon, name="revoked", scopes=everything)
    async with daemon.unix.delete("/keys/revoked") as answer:
        assert answer.status == 200
    strangers = {"none": "", "wrong": "mr-wrong", "expired": expired, "revoked": revoked}
    for route, scope in every_route():
        with subtests.test(route):
            refused = {name: await refusal_of(daemon, route, key) for name, key in strangers.items()}
            assert refused == dict.fromkeys(strangers, 401)
            refused = {other: await refusal_of(daemon, route, key) for other, key in keys.items() if other is not scope}
            assert set(refused.values()) == {403}, refused
            if route != ENDS_THE_DAEMON:
                assert await refusal_of(daemon, route, keys[scope]) == 0


@pytest.mark.parametrize(
    "path",
    ["absent.invalid%2Fx%2Fy?remote=true", "absent.invalid%2Fx%2Fy/show?remote=true", "absent.invalid%2Fx%2Fy/fit"],
)
async def test_what_the_source_of_a_model_is_asked_needs_the_scope_models_too(
    start_daemon: StartDaemon, path: str
) -> None:
    daemon = await start_daemon(models={"smol": 0})
    asker = await make_key(daemon, name="asker", scopes=["inference"])
    both = await make_key(daemon, name="both", scopes=["inference", "models"])
    status, told = await call(daemon, "GET", f"/models/{path}", asker)
    assert (status, told["error"]["code"]) == (403, "forbidden")
    assert (await call(daemon, "GET", f"/models/{path}", both))[0] != 403
    assert (await call(daemon, "GET", "/models/smol/fit", asker))[0] == 200
