"""Models that an engine manages itself (`Backend.uses_external_model_management`): they are served and listed as any
other, without a file in the store."""

import threading
from typing import Any

import pytest

from modelrunner.backend import DeclaredModel
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
