"""Models in safetensors through a daemon's HTTP interface: packaged, listed, asked; and refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from modelrunner.types import ModelFormat
from tests.api.conftest import Daemon, StartDaemon
from tests.store.folders import model_files, write

ASK = {"model": "mine", "messages": [{"role": "user", "content": "hi"}]}


async def create(client: aiohttp.ClientSession, source: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    """The status and the last line."""
    body = {"from": source, "name": "mine", **fields}
    async with client.post("/models/create", json=body, headers={"Accept": "application/json"}) as answer:
        return answer.status, json.loads((await answer.read()).splitlines()[-1])


async def status_of(daemon: Daemon, path: str) -> tuple[int, Any]:
    async with daemon.unix.post(path, json=ASK) as answer:
        return answer.status, await answer.json()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "folder", model_files())


async def test_a_folder_is_packaged_listed_and_asked(start_daemon: StartDaemon, folder: Path) -> None:
    daemon = await start_daemon()
    daemon.backend.formats = frozenset(ModelFormat)  # type: ignore[misc]
    status, last = await create(daemon.unix, folder.as_uri())
    assert (status, last["type"], last["model"]) == (200, "success", "mine")
    async with daemon.unix.get("/models") as answer:
        [model] = await answer.json()
    assert model["config"]["format"] == "safetensors"
    assert model["config"]["safetensors"]["hidden_size"] == "8"
    async with daemon.unix.get("/models/mine") as answer:
        assert await answer.json() == model
    async with daemon.unix.get("/engines/fake/v1/models") as answer:
        assert [m["context_window"] for m in (await answer.json())["data"]] == [2048]
    assert (await status_of(daemon, "/v1/chat/completions"))[0] == 200


async def test_where_nothing_runs_the_format(start_daemon: StartDaemon, folder: Path) -> None:
    daemon = await start_daemon()
    await create(daemon.unix, folder.as_uri())
    status, body = await status_of(daemon, "/engines/fake/v1/chat/completions")
    assert (status, body["error"]["code"]) == (421, "misdirected_request")
    status, body = await status_of(daemon, "/v1/chat/completions")
    assert (status, body["error"]["code"]) == (422, "unsupported_model")


async def test_code_is_refused_and_only_the_owner_can_trust_it(start_daemon: StartDaemon, folder: Path) -> None:
    write(folder, {"modeling.py": b"raise SystemExit"})
    daemon = await start_daemon()
    status, last = await create(daemon.unix, folder.as_uri())
    assert (status, last["error"]["code"]) == (422, "unsupported_model")
    status, _ = await create(daemon.tcp, "pypi:anything", **{"trust-remote-code": True})
    assert status == 403
    _, last = await create(daemon.unix, folder.as_uri(), **{"trust-remote-code": True})
    assert last["type"] == "success"


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "invalid_model", "there is no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "invalid_model", "no model in safetensors"),
        (lambda folder: os.truncate(folder / "model.safetensors", 20), "invalid_model", "truncated"),
        (lambda folder: write(folder, model_files(auto_map={"AutoModel": "evil.M"})), "unsupported_model", "auto_map"),
    ],
)
async def test_what_is_no_whole_model_is_said_and_the_daemon_lives(
    start_daemon: StartDaemon, folder: Path, change: Callable[[Path], object], code: str, said: str
) -> None:
    change(folder)
    daemon = await start_daemon()
    _, last = await create(daemon.unix, folder.as_uri())
    assert last["error"]["code"] == code
    assert said in last["error"]["message"]
    async with daemon.unix.get("/models") as answer:
        assert await answer.json() == []
