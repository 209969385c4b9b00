"""What removes or changes a model, what the daemon says of itself, and what it does not let pass in silence."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from modelrunner.config.locations import ConfigurationError
from modelrunner.config.modelconfig import NOTHING_SET
from modelrunner.models.configurations import Configurations, PostedConfiguration
from modelrunner.store import Store
from tests.api.conftest import Daemon, StartDaemon
from tests.store.samples import add_model, write_gguf
from tests.waiting import HUNG


async def ask(daemon: Daemon, method: str, path: str, **options: Any) -> tuple[int, Any]:
    url = URL(f"http://localhost{path}", encoded=True)
    async with daemon.unix.request(method, url, **options) as answer:
        return answer.status, await answer.json()


CHANGES: list[tuple[str, str, dict[str, Any] | None]] = [
    ("DELETE", "/models/zeb?force", None),
    ("DELETE", "/v1/models/zeb", None),
    ("POST", "/models/zeb/tag?repo=mine", None),
    ("POST", "/engines/_configure", {"model": "zeb", "parallel": 2}),
    ("POST", "/engines/pin", {"model": "zeb"}),
    ("POST", "/engines/unpin", {"model": "zeb"}),
    ("POST", "/engines/pause", {"model": "zeb"}),
    ("POST", "/engines/resume", {"model": "zeb"}),
]


async def test_what_changes_a_model_takes_its_whole_name(start_daemon: StartDaemon, subtests: pytest.Subtests) -> None:
    daemon = await start_daemon(models={"other/zebra": 0}, listen="")
    assert (await ask(daemon, "GET", "/models/zeb"))[0] == 200  # to look takes less
    before = (await ask(daemon, "GET", "/models"), await ask(daemon, "GET", "/engines/_configure"))
    for method, path, body in CHANGES:
        with subtests.test(method=method, path=path):
            status, fault = await ask(daemon, method, path, json=body)
            assert (status, fault["error"]["code"]) == (404, "model_not_found")
            assert "did you mean other/zebra?" in fault["error"]["message"]
    assert (await ask(daemon, "GET", "/models"), await ask(daemon, "GET", "/engines/_configure")) == before


async def test_a_table_of_the_file_is_for_the_whole_name(start_daemon: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[models.zeb]\nparallel = 2\n[models."other/zebra"]\ncontext-size = 512')
    daemon = await start_daemon(models={"other/zebra": 0}, listen="")
    (shown,) = (await ask(daemon, "GET", "/engines/_configure"))[1]
    assert shown["file"] == {"context-size": 512}


async def test_a_part_of_an_id_is_not_enough_where_it_is_short(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    id = (await ask(daemon, "GET", "/models/smol"))[1]["id"].removeprefix("sha256:")
    assert (await ask(daemon, "DELETE", f"/models/{id[:7]}"))[0] == 404
    assert (await ask(daemon, "DELETE", f"/models/{id[:8]}"))[0] == 200


async def test_a_packaged_file_answers_to_the_name_that_was_given(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(listen="")
    file = tmp_path / "model.gguf"
    write_gguf(file)
    for name in ("smol", "mine"):
        wanted = {"from": file.as_uri(), "name": name}
        async with daemon.unix.post("/models/create", json=wanted, headers={"Accept": "application/json"}) as answer:
            last = (await answer.text()).splitlines()[-1]
        assert f'"{name} is here"' in last
        assert f'"model":"{name}"' in last


UNKNOWN = [
    ("POST", "/models/create", {"from": "pypi:x", "quantization": "Q4"}, "quantization", ""),
    ("POST", "/models/create", {"from": "pypi:x", "bearer_token": "x"}, "bearer_token", "'bearer-token'"),
    ("POST", "/engines/unload", {"all": True, "forse": True}, "forse", "'force'"),
    ("POST", "/engines/pin", {"model": "smol", "pin": True}, "pin", ""),
    ("POST", "/engines/preload", {"model": "smol", "mode": "embedding"}, "mode", ""),
    ("POST", "/engines/reload", {"dry-run": True}, "dry-run", "'dry_run'"),
    ("POST", "/engines/install-backend", {"backend": "fake", "version": "1"}, "version", ""),
    ("POST", "/engines/_configure", {"model": "smol", "parallell": 1}, "parallell", "'parallel'"),
    ("DELETE", "/models/smol?forced=true", None, "forced", "'force'"),
    ("GET", "/engines/why?modell=smol", None, "modell", "'model'"),
    ("GET", "/engines/events?form=1", None, "form", ""),
    ("GET", "/logs?folow=true", None, "folow", "'follow'"),
    ("GET", "/engines/_configure?modell=smol", None, "modell", "'model'"),
]


async def test_what_a_route_does_not_know_is_refused_by_its_name(
    start_daemon: StartDaemon, subtests: pytest.Subtests
) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    for method, path, body, name, meant in UNKNOWN:
        with subtests.test(path=path, name=name):
            status, fault = await ask(daemon, method, path, json=body)
            assert (status, fault["error"]["param"]) == (400, name)
            assert repr(name) in fault["error"]["message"]
            assert meant in fault["error"]["message"]


async def test_a_damaged_model_is_listed_and_can_be_removed(start_daemon: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "data_dir").mkdir()
    model = add_model(Store(tmp_path / "data_dir"), "hurt", 1)
    manifest = tmp_path / "data_dir" / "manifests" / "sha256" / model.id.removeprefix("sha256:")
    manifest.write_bytes(b"{")
    daemon = await start_daemon(models={"well": 0}, listen="")
    _, models = await ask(daemon, "GET", "/models")
    assert {found["tags"][0]: "damage" in found for found in models} == {"well": False, "hurt": True}
    assert [found["id"] for found in (await ask(daemon, "GET", "/v1/models"))[1]["data"]] == ["well"]
    status, fault = await ask(daemon, "GET", "/models/hurt")
    assert (status, fault["error"]["code"]) == (422, "invalid_model")
    assert (await ask(daemon, "DELETE", "/models/hurt")) == (200, [{"Untagged": "hurt"}, {"Deleted": model.id}])
    assert [found["tags"] for found in (await ask(daemon, "GET", "/models"))[1]] == [["well"]]
    assert not manifest.exists()


async def test_a_configuration_shows_the_file_and_what_is_in_effect(start_daemon: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[models.smol]\ncontext-size = 512\nkeep_alive = "1h"')
    daemon = await start_daemon(models={"smol": 0, "other": 1}, listen="")
    (shown,) = (await ask(daemon, "GET", "/engines/_configure?model=other"))[1]
    assert (shown["config"], shown["file"]) == ({}, {})
    assert shown["effective"] == {"backend": "fake", "context-size": 2048, "parallel": 1}
    await ask(daemon, "POST", "/engines/_configure", json={"model": "smol", "parallel": 3})
    (shown,) = (await ask(daemon, "GET", "/engines/_configure?model=smol"))[1]
    assert (shown["config"], shown["file"]) == ({"parallel": 3}, {"context-size": 512, "keep_alive": "1h"})
    assert shown["effective"] == {"backend": "fake", "context-size": 512, "parallel": 3, "keep_alive": "1h"}


async def test_a_backend_that_was_removed_is_named_with_the_way_out(start_daemon: StartDaemon, tmp_path: Path) -> None:
    state = tmp_path / "data_dir" / "state"
    state.mkdir(parents=True)
    model = add_model(Store(tmp_path / "data_dir"), "smol")
    nothing = PostedConfiguration(0, NOTHING_SET)
    gone = PostedConfiguration(1, NOTHING_SET.merged({"backend": "gone"}))
    await Configurations(state / "configurations.json").keep(model.id, None, nothing, gone)
    daemon = await start_daemon(listen="")
    chat = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
    status, fault = await ask(daemon, "POST", "/v1/chat/completions", json=chat)
    assert (status, fault["error"]["code"]) == (404, "backend_not_found")
    assert "`modelrunner configure smol --backend default`" in fault["error"]["message"]
    (shown,) = (await ask(daemon, "GET", "/engines/_configure"))[1]  # one such model hides no other
    assert shown["effective"] is None
    assert "gone" in shown["problem"]
    assert (await ask(daemon, "POST", "/engines/_configure", json={"model": "smol", "backend": None}))[0] == 202
    assert (await ask(daemon, "POST", "/v1/chat/completions", json=chat))[0] == 200


@pytest.mark.parametrize("path", ["/engines/_configure", "/engines/pin"])
async def test_a_configuration_that_cannot_be_kept_is_explained(start_daemon: StartDaemon, path: str) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    state = daemon.settings.data_dir / "state"
    state.rename(state.with_name("elsewhere"))
    state.touch()  # a file where the folder was
    change = {"model": "smol"} if path.endswith("pin") else {"model": "smol", "parallel": 2}
    status, fault = await ask(daemon, "POST", path, json=change)
    assert (status, fault["error"]["code"]) == (500, "storage_failed")
    assert str(state) in fault["error"]["message"]
    state.unlink()
    state.with_name("elsewhere").rename(state)
    (shown,) = (await ask(daemon, "GET", "/engines/_configure?model=smol"))[1]
    assert (shown["config"], shown["revision"]) == ({}, 0)
    assert (await ask(daemon, "POST", path, json=change))[0] in (200, 202)


async def test_conversations_are_counted_apart_from_engines(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(listen="")
    _, before = await ask(daemon, "GET", "/engines/df")
    slots = daemon.settings.data_dir / "state" / "fake" / "slots"
    slots.mkdir(parents=True)
    (slots / "conversation").write_bytes(bytes(5000))
    _, after = await ask(daemon, "GET", "/engines/df")
    assert (before["backends"][0]["state"], after["backends"][0]["state"]) == (0, 5000)
    assert after["default_backend_disk_usage"] == before["default_backend_disk_usage"]


async def test_saved_conversations_can_be_removed(start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    slots = daemon.settings.data_dir / "state" / "fake" / "slots"
    slots.mkdir(parents=True)
    (slots / "conversation").write_bytes(bytes(5000))
    forgotten = []

    async def forget(model_id: str) -> None:
        forgotten.append(model_id)
        (slots / "conversation").unlink()

    monkeypatch.setattr(daemon.backend, "forget", forget)
    assert await ask(daemon, "POST", "/engines/prune") == (200, {"freed": 5000})
    (model,) = (await ask(daemon, "GET", "/models"))[1]
    assert forgotten == [model["id"]]


async def last_line(daemon: Daemon, path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
    async with daemon.unix.post(path, json=body, headers={"Accept": "application/json"}) as answer:
        found: dict[str, Any] = json.loads((await answer.text()).splitlines()[-1])
        return found


async def test_verifying_finds_damage_and_packaging_again_heals_it(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    assert (await last_line(daemon, "/models/smol/verify"))["message"] == "smol is intact"
    (blob,) = [path for path in (daemon.settings.data_dir / "blobs" / "sha256").iterdir() if is_gguf(path)]
    content = blob.read_bytes()
    blob.chmod(0o600)
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    fault = (await last_line(daemon, "/models/smol/verify"))["error"]
    assert fault["code"] == "invalid_model"
    assert "pull or package it again" in fault["message"]
    source = daemon.settings.data_dir / "healthy.gguf"
    source.write_bytes(content)
    assert (await last_line(daemon, "/models/create", {"from": source.as_uri(), "name": "smol"}))["type"] == "success"
    assert (await last_line(daemon, "/models/smol/verify"))["message"] == "smol is intact"


def is_gguf(path: Path) -> bool:
    return path.read_bytes().startswith(b"GGUF")


async def test_health_tells_a_start_and_a_queue_from_a_quiet_daemon(start_daemon: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f'[models.smol]\npreload = true\nruntime-flags = ["--gate={tmp_path}/gate"]')
    daemon = await start_daemon(models={"smol": 0}, listen="")

    async def health() -> str:
        return str((await ask(daemon, "GET", "/health"))[1]["status"])

    assert await health() == "starting"
    (tmp_path / "gate").touch()
    async with asyncio.timeout(HUNG):
        while (now := await health()) == "starting":  # noqa: ASYNC110 - over HTTP there is nothing to wait for
            await asyncio.sleep(0)
    assert now == "ready"
    (tmp_path / "gate").unlink()
    await ask(daemon, "POST", "/engines/unload", json={"all": True})
    chat = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
    waiting = asyncio.create_task(ask(daemon, "POST", "/v1/chat/completions", json=chat))
    async with asyncio.timeout(HUNG):
        while (now := await health()) == "ready":  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert now == "busy"
    (tmp_path / "gate").touch()
    assert (await waiting)[0] == 200
    assert await health() == "ready"


async def test_an_origin_that_is_none_stops_the_start(start_daemon: StartDaemon) -> None:
    with pytest.raises(ConfigurationError, match="'localhost:3000' is not an origin"):
        await start_daemon(listen="", origins=("localhost:3000",))


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/moderations", "/engines/v1/moderations", "/v1/images/generations", "/v1/responses/compact"),
        "/v1/responses/input_tokens",
    ],
)
async def test_what_no_engine_serves_is_said(start_daemon: StartDaemon, path: str) -> None:
    daemon = await start_daemon()
    async with daemon.tcp.post(path, json={"input": "x"}) as answer:
        assert answer.status == 501
        assert "no engine here" in (await answer.json())["error"]["message"]
