"""Models that an engine manages itself (`Backend.uses_external_model_management`): they are served and listed as any
other, without a file in the store."""

import threading
from typing import Any

import pytest

from modelrunner.backend import DeclaredModel
from modelrunner.types import Mode
from tests.api.conftest import Daemon, StartDaemon

NAME = "theirs/big:70b"
MODELS = [DeclaredModel(NAME, frozenset({"completion", "chat"}), size=7, context_length=4096)]


@pytest.fixture
async def daemon(start_daemon: StartDaemon) -> Daemon:
    daemon = await start_daemon(models={"smol": 0})
    backend: Any = daemon.backend
    backend.uses_external_model_management = True
    backend.models = lambda: MODELS
    return daemon


async def test_a_declared_model_is_served(daemon: Daemon) -> None:
    for path in ("/v1/completions", "/engines/fake/v1/completions"):
        async with daemon.tcp.post(path, json={"model": NAME, "prompt": "x", "max_tokens": 2}) as answer:
            assert answer.status == 200, await answer.text()
    async with daemon.tcp.get("/engines/ps") as answer:
        [runner] = await answer.json()
    assert (runner["model_name"], runner["backend_name"]) == (NAME, "fake")


async def test_it_is_listed_beside_those_of_the_store(daemon: Daemon) -> None:
    async with daemon.tcp.get("/v1/models") as answer:
        listed = {model["id"]: model for model in (await answer.json())["data"]}
    assert len(listed) == 2
    theirs = listed["theirs/big:70b"]
    assert (theirs["backend"], theirs["context_window"], theirs["capabilities"]) == (
        "fake",
        4096,
        ["chat", "completion"],
    )
    async with daemon.tcp.get(f"/v1/models/{NAME}") as answer:
        assert await answer.json() == theirs
    async with daemon.tcp.get("/v1/models/theirs/small") as answer:
        assert answer.status == 404


async def test_every_api_lists_and_shows_it(daemon: Daemon) -> None:
    async with daemon.unix.get("/models") as answer:
        [_, listed] = await answer.json()
    assert (listed["tags"], listed["created"], listed["context_window"]) == ([NAME], 0, 4096)
    assert listed["config"] == {"format": "declared", "size": "7B", "context_size": 4096}
    assert listed["capabilities"] == ["chat", "completion"]
    async with daemon.unix.get(f"/models/{NAME}") as answer:
        assert await answer.json() == listed
    async with daemon.unix.get(f"/models/{NAME}/show") as answer:
        shown = await answer.json()
    assert (shown["id"], shown["template"], shown["template_problem"]) == (listed["id"], "", "")
    async with daemon.tcp.get("/api/tags") as answer:
        [_, theirs] = (await answer.json())["models"]
    assert (theirs["name"], theirs["size"], theirs["capabilities"]) == (NAME, 7, ["completion"])
    async with daemon.tcp.post("/api/show", json={"model": NAME}) as answer:
        assert (await answer.json())["capabilities"] == ["completion"]
    async with daemon.tcp.get("/anthropic/v1/models") as answer:
        assert [model["id"] for model in (await answer.json())["data"]][1:] == [NAME]
    async with daemon.tcp.get(f"/anthropic/v1/models/{NAME}") as answer:
        assert (await answer.json())["max_input_tokens"] == 4096


@pytest.mark.parametrize("path", ["/models", "/v1/models", "/engines/fake/v1/models", "/api/tags"])
async def test_a_key_for_another_model_does_not_see_it(daemon: Daemon, path: str) -> None:
    async with daemon.unix.post(
        "/keys", json={"name": "narrow", "models": ["smol"], "scopes": ["models", "inference"]}
    ) as answer:
        key = (await answer.json())["text"]
    async with daemon.tcp.get(path, headers={"Authorization": f"Bearer {key}"}) as answer:
        assert answer.status == 200, await answer.text()
        assert NAME not in await answer.text()


async def test_a_backend_that_blocks_hides_no_other_model(daemon: Daemon) -> None:
    """The list has what it declared before."""
    async with daemon.tcp.get("/v1/models") as answer:
        before = await answer.json()
    backend: Any = daemon.backend
    released = threading.Event()
    backend.models = lambda: MODELS if released.wait() else []
    try:
        for _ in range(2):
            async with daemon.tcp.get("/v1/models") as answer:
                assert await answer.json() == before
    finally:
        released.set()


@pytest.mark.parametrize(("model", "path", "status"), [("theirs/small", "completions", 404), (NAME, "rerank", 400)])
async def test_what_it_does_not_declare_is_refused(daemon: Daemon, model: str, path: str, status: int) -> None:
    body = {"model": model, "prompt": "x", "query": "x", "documents": ["x"]}
    async with daemon.tcp.post(f"/v1/{path}", json=body) as answer:
        assert answer.status == status, await answer.text()


async def test_it_is_explained_and_unloaded_by_its_name(daemon: Daemon) -> None:
    async with daemon.unix.get(f"/engines/why?model={NAME}") as answer:
        assert ((await answer.json())["state"], answer.status) == ("stopped", 200)
    async with daemon.tcp.post("/v1/completions", json={"model": NAME, "prompt": "x", "max_tokens": 2}) as answer:
        assert answer.status == 200
    async with daemon.unix.post("/engines/unload", json={"models": [NAME]}) as answer:
        assert (await answer.json())["unloaded"] == [NAME]
    async with daemon.unix.post("/engines/unload", json={"models": ["theirs/small"]}) as answer:
        assert answer.status == 404


async def test_it_has_settings_and_a_log(daemon: Daemon) -> None:
    body = {"model": NAME, "prompt": "x", "max_tokens": 2}
    async with daemon.unix.get(f"/logs?model={NAME}") as answer:
        assert (answer.status, "no engine has run" in await answer.text()) == (404, True)
    async with daemon.tcp.post("/v1/completions", json=body) as answer:
        assert answer.status == 200
    async with daemon.unix.get(f"/logs?model={NAME}") as answer:
        assert (answer.status, await answer.text() != "") == (200, True)
    wanted = {"model": NAME, "context-size": 1024, "keep_alive": "1h", "apply": "restart"}
    async with daemon.unix.post("/engines/_configure", json=wanted) as answer:
        assert answer.status == 202, await answer.text()
    async with daemon.unix.get("/engines/_configure") as answer:
        [shown] = await answer.json()
    assert (shown["model"], shown["config"]) == (NAME, {"context-size": 1024, "keep_alive": "1h"})
    assert (shown["effective"]["backend"], shown["effective"]["context-size"]) == ("fake", 1024)
    async with daemon.tcp.post("/v1/completions", json=body) as answer:
        assert answer.status == 200
    async with daemon.unix.get("/engines/ps") as answer:
        [runner] = [runner for runner in await answer.json() if runner["state"] == "ready"]
    assert (runner["context_size"], runner["keep_alive"]) == (1024, "1h")


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "theirs/small", "pin": True}, 404),
        ({"model": NAME, "context-size": 8192}, 400),
        ({"model": NAME, "backend": "broken"}, 400),
        ({"model": NAME, "mode": "reranking", "pin": True, "parallel": 2}, 400),
    ],
)
async def test_settings_that_it_cannot_have(daemon: Daemon, change: dict[str, Any], status: int) -> None:
    async with daemon.unix.post("/engines/_configure", json=change) as answer:
        assert answer.status == status, await answer.text()
    async with daemon.unix.get(f"/engines/_configure?model={NAME}") as answer:
        [shown] = await answer.json()
    assert (answer.status, shown["config"]) == (200, {})


async def test_a_model_that_its_engine_has_no_more_is_not_found(daemon: Daemon) -> None:
    async with daemon.unix.get(f"/models/{NAME}") as answer:
        model_id = (await answer.json())["id"]
    async with daemon.unix.get(f"/engines/_configure?model={model_id}") as answer:
        assert answer.status == 200
    backend: Any = daemon.backend
    backend.models = list
    async with daemon.unix.get(f"/engines/_configure?model={NAME}") as answer:
        assert answer.status == 404


async def test_one_runner_serves_the_modes_that_share_a_process_also_for_an_unknown_model(daemon: Daemon) -> None:
    """The engine decides what a model of which nothing is known can do."""
    backend: Any = daemon.backend
    backend.models = lambda: [DeclaredModel(NAME, frozenset())]
    backend.shared_modes = {Mode.EMBEDDING: (Mode.COMPLETION, "audio")}
    for path, body in (("completions", {"prompt": "x", "max_tokens": 2}), ("embeddings", {"input": "x"})):
        async with daemon.tcp.post(f"/v1/{path}", json={"model": NAME, **body}) as answer:
            assert answer.status == 200, await answer.text()
    async with daemon.tcp.get("/engines/ps") as answer:
        assert [runner["mode"] for runner in await answer.json()] == ["completion"]
