"""Models as archives over HTTP."""

import json

import pytest

from modelrunner.store import Store
from tests.api.conftest import StartDaemon

TAR = {"Content-Type": "application/x-tar", "Accept": "application/json"}


async def test_a_model_goes_from_daemon_to_daemon(start_daemon: StartDaemon, tmp_path) -> None:
    one = await start_daemon(models={"ai/smol:v1": 0})
    two = await start_daemon(folder=tmp_path / "two")
    async with one.tcp.get("/models/ai/smol:v1/export") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "application/x-tar"
        data = await answer.read()
    assert len(data) == int(answer.headers["Content-Length"])
    async with two.tcp.post("/models/load", data=data, headers=TAR) as answer:
        last = json.loads((await answer.text()).splitlines()[-1])
    assert (last["type"], last["model"]) == ("success", "smol:v1")
    assert Store(two.settings.data_dir).get("smol:v1").id == Store(one.settings.data_dir).get("smol:v1").id
    async with two.unix.post("/models/load?name=other", data=data, headers=TAR) as answer:
        assert json.loads((await answer.text()).splitlines()[-1])["model"] == "other"
    async with one.unix.get("/models/smol%3Av1/export") as answer:
        assert await answer.read() == data


@pytest.mark.parametrize(
    ("path", "headers", "status", "code"),
    [
        ("/models/load", {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ("/models/load", TAR, 422, "invalid_model"),
        ("/models/load?trust=1", TAR, 403, "forbidden"),
        ("/models/load?name=a@b", TAR, 400, "invalid_reference"),
        ("/models/load?odd=1", TAR, 400, "bad_request"),
    ],
)
async def test_what_is_no_archive_is_told(start_daemon: StartDaemon, path, headers, status, code) -> None:
    daemon = await start_daemon()
    async with daemon.tcp.post(path, data=b"no archive" * 1000, headers=headers) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (status, code)
    async with daemon.tcp.get("/models/nothing/export") as answer:
        assert answer.status == 404
    assert list((daemon.settings.data_dir / "partial").iterdir()) == []
