"""The control plane as clients see it, through both listeners."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from modelrunner.backend import InstallProgress, ProgressCallback
from tests.api.conftest import Daemon, StartDaemon
from tests.store.samples import write_gguf
from tests.waiting import HUNG


async def fault(answer: aiohttp.ClientResponse) -> tuple[int, str]:
    """Status and code, once the shape is checked."""
    body = await answer.json()
    assert set(body) == {"error", "request_id"}, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["request_id"] == answer.headers["X-Request-ID"]
    return answer.status, body["error"]["code"]


async def raw(daemon: Daemon, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def lines(answer: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await answer.read()).splitlines()]


async def test_the_daemon_about_itself(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    for client in (daemon.unix, daemon.tcp):
        async with client.get("/") as answer:
            assert await answer.text() == "modelrunner is running\n"
        async with client.head("/") as answer:
            assert answer.status == 200
        async with client.get("/ready") as answer:
            assert (await answer.json())["status"] == "ready"
    async with daemon.unix.get("/version") as answer:
        version = await answer.json()
    assert version["data_dir"] == str(daemon.settings.data_dir)
    assert version["listen"] == f"http://127.0.0.1:{daemon.port}"
    assert version["backends"] == {"fake": "Running: fake 1.0", "broken": "Error: ImportError: no such module"}
    async with daemon.unix.get("/engines/status") as answer:
        assert await answer.json() == version["backends"]


@pytest.mark.parametrize(
    ("body", "param"), [("[]", None), ("{}", "from"), ('{"from": 3}', "from"), ('{"from": "a", "name": 3}', "name")]
)
async def test_a_wrong_body_names_the_field(start_daemon: StartDaemon, body: str, param: str | None) -> None:
    daemon = await start_daemon()
    async with daemon.unix.post("/models/create", data=body) as answer:
        assert (await answer.json())["error"]["param"] == param


FAULTS: list[tuple[str, str, str | None, tuple[int, str]]] = [
    ("GET", "/nowhere", None, (404, "route_not_found")),
    ("GET", "/props", None, (404, "route_not_found")),
    ("GET", "/models/search", None, (400, "bad_request")),
    ("GET", "/models/create", None, (404, "route_not_found")),
    ("DELETE", "/models/purge", None, (404, "route_not_found")),
    ("GET", "/models/search:latest", None, (404, "model_not_found")),
    ("PUT", "/models", None, (405, "method_not_allowed")),
    ("GET", "/models/nope", None, (404, "model_not_found")),
    ("GET", "/v1/models/nope", None, (404, "model_not_found")),
    ("GET", "/models/..%2F..%2Fetc%2Fpasswd", None, (400, "invalid_reference")),
    ("GET", "/models/%00", None, (400, "invalid_reference")),
    ("GET", "/models/%ff", None, (400, "invalid_reference")),
    ("DELETE", "/models/nope", None, (404, "model_not_found")),
    ("DELETE", "/models/smol?force=perhaps", None, (400, "bad_request")),
    ("POST", "/models/smol/tag", None, (400, "bad_request")),
    ("POST", "/models/smol/tag?repo=Not%20a%20name", None, (400, "invalid_reference")),
    ("POST", "/models/smol/dance", None, (405, "method_not_allowed")),
    ("POST", "/models/create", "{", (400, "bad_request")),
    ("POST", "/models/create", "[]", (400, "bad_request")),
    ("POST", "/models/create", "[" * 100_000, (400, "bad_request")),
    ("POST", "/models/create", '{"from": 3}', (400, "bad_request")),
    ("POST", "/models/create", '{"from": " "}', (400, "bad_request")),
    ("POST", "/models/create", '{"from": "file:///etc/passwd"}', (400, "bad_request")),
    ("POST", "/models/create", '{"from": "file:///etc/passwd", "name": "x"}', (422, "invalid_model")),
    ("POST", "/engines/unload", "{}", (400, "bad_request")),
    ("POST", "/engines/unload", '{"models": ["nope"]}', (404, "model_not_found")),
    ("POST", "/engines/unload", '{"backend": "nope"}', (404, "backend_not_found")),
    ("POST", "/engines/_configure", '{"model": "nope"}', (404, "model_not_found")),
    ("POST", "/engines/_configure", '{"model": "smol", "colour": 1}', (400, "bad_request")),
    ("POST", "/engines/_configure", '{"model": "smol", "context-size": 2049}', (400, "bad_request")),
    ("POST", "/engines/_configure", '{"model": "smol", "backend": "nope"}', (404, "backend_not_found")),
    ("POST", "/engines/nope/_configure", '{"model": "smol"}', (404, "backend_not_found")),
    ("POST", "/engines/fake/_configure", '{"model": "smol", "backend": "x"}', (400, "bad_request")),
    ("GET", "/engines/_configure?model=nope", None, (404, "model_not_found")),
    ("POST", "/engines/install-backend", '{"backend": "nope"}', (404, "backend_not_found")),
    ("POST", "/engines/install-backend", '{"backend": "broken"}', (412, "backend_unavailable")),
    ("GET", "/logs?runner=nope", None, (404, "runner_not_found")),
    ("GET", "/logs?model=smol", None, (404, "model_not_found")),
    ("GET", "/engines/nope/v1/models", None, (404, "backend_not_found")),
]


async def test_every_error_has_one_shape(start_daemon: StartDaemon, subtests: pytest.Subtests) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    connector = aiohttp.UnixConnector(str(daemon.settings.runtime_dir / "modelrunner.sock"))
    async with aiohttp.ClientSession(connector=connector) as client:
        for method, path, body, expected in FAULTS:
            with subtests.test(method=method, path=path, body=body and body[:80]):
                url = URL(f"http://localhost{path}", encoded=True)
                async with client.request(method, url, data=body) as answer:
                    assert await fault(answer) == expected


async def test_what_is_no_http_is_answered_in_our_shape_too(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    host = f"Host: localhost:{daemon.port}\r\n".encode()
    for request, status in (
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + host + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + host + b"Expect: a-miracle\r\nConnection: close\r\n\r\n", 417),
    ):
        head, _, body = (await raw(daemon, request)).partition(b"\r\n\r\n")
        assert int(head.split()[1]) == status
        request_id = re.search(rb"X-Request-ID: (\S+)", head, re.IGNORECASE)
        assert request_id
        assert json.loads(body)["request_id"] == request_id[1].decode()


async def test_a_body_beyond_the_limit_is_refused(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(body_limit=1000)
    async with daemon.unix.post("/models/create", data=b" " * 2000) as answer:
        assert await fault(answer) == (413, "payload_too_large")


async def test_bodies_of_the_control_plane_count_among_all_bodies(start_daemon: StartDaemon) -> None:
    """Bodies that never end: each client leaves as much for others, and what is kept is free once they are gone."""
    daemon = await start_daemon(body_limit=10_000, total_body_limit=40_000)
    head = b"POST /models/create HTTP/1.1\r\nHost: localhost:%d\r\nConnection: close\r\n" % daemon.port
    head += b"Content-Length: 9000\r\n\r\n"
    answers, writers = [], []
    for _ in range(4):
        reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
        writer.write(head + b" " * 8990)
        writers.append(writer)
        answers.append(asyncio.create_task(reader.readline()))
    async with asyncio.timeout(HUNG):
        while sum(answer.done() for answer in answers) < 2:
            await asyncio.wait([answer for answer in answers if not answer.done()], return_when="FIRST_COMPLETED")
    assert all(b" 503 " in answer.result() for answer in answers if answer.done())
    async with daemon.unix.post("/models/create", data=b" " * 9000) as answer:  # of another client
        assert answer.status == 400
    for answer_line, writer in zip(answers, writers, strict=True):
        answer_line.cancel()
        writer.close()
    async with asyncio.timeout(HUNG):
        while (await raw(daemon, head + b" " * 9000)).split()[1] == b"503":
            pass


async def test_a_harmless_request_id_is_kept_and_a_harmful_one_is_not(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    async with daemon.unix.get("/health", headers={"X-Request-ID": "abc-123"}) as answer:
        assert answer.headers["X-Request-ID"] == "abc-123"
    async with daemon.unix.get("/health", headers={"X-Request-ID": "a b<script>"}) as answer:
        assert re.fullmatch("[0-9a-f]{22}", answer.headers["X-Request-ID"])


async def test_strange_hosts_and_origins_are_refused_on_tcp(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(origins=("http://app.example",))
    async with daemon.tcp.get("/health", headers={"Host": "rebound.example"}) as answer:
        assert await fault(answer) == (403, "forbidden")
    async with daemon.unix.get("/health", headers={"Host": "anything"}) as answer:
        assert answer.status == 200
    for client in (daemon.tcp, daemon.unix):
        async with client.post("/shutdown", headers={"Origin": "http://evil.example"}) as answer:
            assert await fault(answer) == (403, "forbidden")
    absolute = f"GET http://evil.example/health HTTP/1.1\r\nHost: localhost:{daemon.port}\r\nConnection: close\r\n\r\n"
    assert b" 403 " in (await raw(daemon, absolute.encode())).partition(b"\r\n")[0]
    async with daemon.tcp.get("/health") as answer:
        assert answer.status == 200


async def test_allowed_pages_get_cors_headers_and_preflights(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(origins=("http://app.example",))
    origin = {"Origin": "http://app.example"}
    async with daemon.tcp.get("/nowhere", headers=origin) as answer:
        assert answer.headers["Access-Control-Allow-Origin"] == "http://app.example"
        assert answer.headers["Vary"] == "Origin"
        assert await fault(answer) == (404, "route_not_found")
    async with daemon.tcp.options(
        "/models/create", headers=origin | {"Access-Control-Request-Method": "POST"}
    ) as answer:
        assert answer.status == 204
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    # A page may send text/plain without a preflight, so its bodies have to say that they are JSON.
    async with daemon.tcp.post("/engines/unload", data='{"all": true}', headers=origin) as answer:
        assert await fault(answer) == (415, "unsupported_media_type")
    async with daemon.tcp.post("/engines/unload", json={"all": True}, headers=origin) as answer:
        assert answer.status == 200
    async with daemon.tcp.get("/health") as answer:
        assert "Access-Control-Allow-Origin" not in answer.headers


async def test_a_file_is_packaged_over_the_unix_socket_only(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon()
    file = write_gguf(tmp_path / "some.gguf")
    wanted = {"from": file.as_uri(), "name": "mine"}
    async with daemon.tcp.post("/models/create", json=wanted) as answer:
        assert await fault(answer) == (403, "forbidden")
    async with daemon.unix.post("/models/create", json=wanted, headers={"Accept": "application/json"}) as answer:
        assert answer.content_type == "application/x-ndjson"
        *steps, last = await lines(answer)
    assert {step["type"] for step in steps} == {"progress"}
    assert {line["mode"] for line in (*steps, last)} == {"pull"}
    assert (last["type"], last["model"]) == ("success", "mine")
    async with daemon.unix.post("/models/create", json=wanted) as answer:
        assert answer.content_type == "text/plain"
        assert (await answer.text()).splitlines()[-1].startswith("success: mine")
    assert file.exists()


async def test_models_by_any_name(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"hf.co/org/repo:Q4_0": 0})
    async with daemon.unix.get("/models") as answer:
        (model,) = await answer.json()
    assert model["tags"] == ["hf.co/org/repo:Q4_0"]
    for reference in ("hf.co/org/repo:Q4_0", "hf.co%2Forg%2Frepo%3AQ4_0", model["id"], model["id"][7:20], "repo"):
        url = URL(f"http://localhost/models/{reference}", encoded=True)
        async with daemon.unix.get(url.relative()) as answer:
            assert (await answer.json())["id"] == model["id"]


async def test_the_openai_list(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0, "encoder": 1})
    for path in ("/v1/models", "/engines/v1/models", "/engines/fake/v1/models"):
        async with daemon.unix.get(path) as answer:
            found = await answer.json()
        assert found["object"] == "list"
        assert [model["id"] for model in found["data"]] == ["smol", "encoder"]
        async with daemon.unix.get(f"{path}/smol") as answer:
            smol = await answer.json()
        assert smol == found["data"][0]
    assert smol.pop("created") > 0
    assert smol == {
        "id": "smol",
        "object": "model",
        "owned_by": "modelrunner",
        "architecture": "llama",
        "context_window": 2048,
        "capabilities": ["completion"],
        "backend": "fake",
        "check": None,
    }
    async with daemon.unix.delete("/v1/models/smol") as answer:
        assert await answer.json() == {"id": "smol", "object": "model", "deleted": True}


async def test_tags_come_and_go_and_the_last_takes_the_model_along(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    async with daemon.unix.post("/models/smol/tag", params={"repo": "org/other", "tag": "v1"}) as answer:
        assert answer.status == 201
    async with daemon.unix.post("/models/org/other:v1/tag", params={"repo": "third"}) as answer:
        assert answer.status == 201
    async with daemon.unix.get("/models/smol") as answer:
        model = await answer.json()
    assert model["tags"] == ["smol", "org/other:v1", "third"]
    async with daemon.unix.delete(f"/models/{model['id']}") as answer:
        assert await fault(answer) == (409, "in_use")
    async with daemon.unix.delete("/models/smol") as answer:
        assert await answer.json() == [{"Untagged": "smol"}]
    async with daemon.unix.delete(f"/models/{model['id']}?force") as answer:
        removed = await answer.json()
    assert removed == [{"Untagged": "org/other:v1"}, {"Untagged": "third"}, {"Deleted": model["id"]}]
    async with daemon.unix.get("/engines/df") as answer:
        usage = await answer.json()
    assert (usage["models"], usage["models_disk_usage"], usage["partial"]) == ([], 0, 0)
    assert [backend["name"] for backend in usage["backends"]] == ["fake"]


async def test_a_configuration_outlives_the_daemon(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    wanted = {"model": "smol", "context-size": 1024, "runtime-flags": ["--tokens=5"], "keep_alive": 90}
    async with daemon.unix.post("/engines/fake/_configure", json=wanted) as answer:
        assert answer.status == 202
        posted = await answer.json()
    assert posted["config"] == {
        "backend": "fake",
        "context-size": 1024,
        "keep_alive": "1m30s",
        "runtime-flags": ["--tokens=5"],
    }
    async with daemon.unix.post("/shutdown") as answer:
        assert answer.status == 202
    await daemon.task
    again = await start_daemon()
    for query in ("", "?model=smol"):
        async with again.unix.get(f"/engines/_configure{query}") as answer:
            assert await answer.json() == [posted]
    async with again.unix.delete("/models/smol") as answer:
        assert answer.status == 200
    async with again.unix.get("/engines/_configure") as answer:
        assert await answer.json() == []


async def test_installing_reports_and_uninstalling_is_seen(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()

    async def install(progress: ProgressCallback, **options: Any) -> None:
        progress(InstallProgress("downloading", 5, 10))

    daemon.backend.install = install  # type: ignore[method-assign]
    wanted, accept = {"backend": "fake"}, {"Accept": "application/json"}
    async with daemon.unix.post("/engines/install-backend", json=wanted, headers=accept) as answer:
        step, last = await lines(answer)
    assert (step["message"], step["current"], step["total"], step["mode"]) == ("downloading", 5, 10, "install")
    assert (last["type"], last["message"]) == ("success", "fake: Running: fake 1.0")
    async with daemon.unix.post("/engines/uninstall-backend", json=wanted, headers=accept) as answer:
        (last,) = await lines(answer)
    assert last["message"] == "fake: Not Installed: binary not found"


async def test_the_log_is_followed_until_the_end(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    async with daemon.unix.get("/logs") as answer:
        assert "serves unix://" in await answer.text()
    async with daemon.unix.get("/logs?lines=1") as answer:
        assert (await answer.text()).count("\n") == 1
    async with daemon.unix.get("/logs?lines=-1") as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "lines")
    async with daemon.unix.get("/logs?follow=true") as answer:
        assert b"serves unix://" in await answer.content.readline()
        async with daemon.unix.post("/shutdown"):
            pass
        assert b"shutting down" in await answer.content.read()
    await daemon.task
    assert list(daemon.settings.runtime_dir.iterdir()) == []


async def test_the_window_is_the_one_that_a_request_may_have_now(start_daemon: StartDaemon) -> None:
    """Trained for 2,048 tokens."""
    daemon = await start_daemon(models={"smol": 0})
    changes: list[dict[str, Any]] = [
        {"context-size": 512},
        {"min-context-size": 256},
        {"min-context-size": None, "context-size": -1},
    ]
    windows = []
    for change in changes:
        async with daemon.unix.post("/engines/_configure", json={"model": "smol", **change}) as answer:
            assert answer.status == 202
        async with daemon.unix.get("/v1/models/smol") as answer:
            windows.append((await answer.json())["context_window"])
    assert windows == [512, 256, 2048]
    async with daemon.unix.post("/engines/_configure", json={"model": "smol", "context-size": 0}) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "context-size")
