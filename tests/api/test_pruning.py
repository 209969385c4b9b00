"""Removing models that were not used for long, and the quota for models."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from modelrunner.jsonfile import JsonFile
from modelrunner.models.disk import LastUsed
from modelrunner.store import Store
from tests.api.conftest import Daemon, StartDaemon
from tests.store.samples import add_model, write_gguf

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def prune(daemon: Daemon, query: str) -> dict[str, Any]:
    async with daemon.unix.post(f"/models/prune?{query}") as answer:
        assert answer.status == 200, await answer.text()
        return dict(await answer.json())


async def names(daemon: Daemon) -> list[str]:
    async with daemon.unix.get("/models") as answer:
        return [model["tags"][0] for model in await answer.json()]


async def usage(daemon: Daemon) -> dict[str, Any]:
    async with daemon.unix.get("/engines/df") as answer:
        return dict(await answer.json())


async def test_models_that_were_not_used_for_long_are_removed(start_daemon: StartDaemon, aged: None) -> None:
    daemon = await start_daemon(models={"old": 1, "used": 2, "pinned": 3})
    async with daemon.unix.post("/engines/pin", json={"model": "pinned"}) as answer:
        assert answer.status == 200
    async with daemon.unix.post("/v1/chat/completions", json={**CHAT, "model": "used", "keep_alive": "0"}) as answer:
        assert answer.status == 200
    async with daemon.unix.post("/engines/unload", json={"all": True}) as answer:
        assert answer.status == 200
    sizes = {model["tags"][0]: model["reclaimable"] for model in (await usage(daemon))["models"]}
    planned = await prune(daemon, "unused=30d&dry_run=true")
    assert planned == {
        "freed": sizes["old"],
        "removed": [{"kind": "model", "name": "old", "size": sizes["old"]}],
        "dry_run": True,
    }
    assert await names(daemon) == ["old", "used", "pinned"]
    assert await prune(daemon, "unused=400d") == {"freed": 0}
    done = await prune(daemon, "unused=30d")
    assert (done["freed"], done["removed"]) == (planned["freed"], planned["removed"])
    assert await names(daemon) == ["used", "pinned"]


async def test_models_go_until_the_others_have_a_size(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"a": 1, "b": 2, "c": 3})
    async with daemon.unix.post("/v1/chat/completions", json={**CHAT, "model": "a"}) as answer:
        assert answer.status == 200  # and it stays loaded
    total = (await usage(daemon))["models_disk_usage"]
    assert await prune(daemon, f"to={total}") == {"freed": 0}
    assert [item["name"] for item in (await prune(daemon, f"to={total - 1}"))["removed"]] == ["b"]
    assert [item["name"] for item in (await prune(daemon, "to=0"))["removed"]] == ["c"]
    assert await names(daemon) == ["a"]


@pytest.mark.parametrize("query", ["unused=soon", "unused=-5m", "to=much", "dry_run=maybe", "other=1"])
async def test_a_wrong_rule_removes_nothing(start_daemon: StartDaemon, query: str) -> None:
    daemon = await start_daemon(models={"a": 1})
    async with daemon.unix.post(f"/models/prune?{query}") as answer:
        assert answer.status == 400
    assert await names(daemon) == ["a"]


@pytest.fixture
def aged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that came here 100 days ago."""
    create = Store.create

    def earlier(self: Store, *arguments: Any, **options: Any) -> Any:
        model = create(self, *arguments, **options)
        path = self.data / "manifests/sha256" / f"{model.id[7:]}.names"
        record = json.loads(path.read_text())["content"]
        JsonFile(path, dict).save(record | {"created": record["created"] - 100 * 86_400})
        return model

    monkeypatch.setattr(Store, "create", earlier)


def test_when_a_model_was_used_survives_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path / "data")
    model = add_model(store, "a")
    scheduler: Any = type("Idle", (), {"runners": lambda self: []})()
    used = LastUsed(tmp_path / "used.json", store, scheduler, wall=lambda: 5e9)
    assert used.of(model) == model.created
    used.note("a")
    used.write()
    before = os.stat(tmp_path / "used.json")
    used.write()  # nothing is new
    assert os.path.samestat(os.stat(tmp_path / "used.json"), before)
    assert LastUsed(tmp_path / "used.json", store, scheduler).of(model) == 5e9
    store.remove("a")
    used.write()
    assert LastUsed(tmp_path / "used.json", store, scheduler).of(model) == model.created


async def test_a_quota_says_what_to_remove(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"a": 1, "b": 2}, models_quota=30_000)
    file = write_gguf(tmp_path / "big.gguf", seed=3, vocabulary=900)

    async def package() -> dict[str, Any]:
        body, headers = {"from": file.as_uri(), "name": "big"}, {"Accept": "application/json"}
        async with daemon.unix.post("/models/create", json=body, headers=headers) as answer:
            return dict(json.loads((await answer.text()).splitlines()[-1]))

    error = (await package())["error"]
    assert (error["code"], "models_quota" in error["message"]) == ("insufficient_disk", True)
    assert await names(daemon) == ["a", "b"]
    advice = re.search("prune --to ([0-9]+)`", error["message"])
    assert advice
    assert [item["name"] for item in (await prune(daemon, f"to={advice[1]}"))["removed"]] == ["a"]
    assert (await package())["type"] == "success"
    assert await names(daemon) == ["b", "big"]
    assert (await usage(daemon))["models_disk_usage"] <= 30_000


async def test_a_model_that_is_made_again_leaves_none_behind(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 1})
    for number in range(3):
        made = {"model": "again", "from": "smol", "system": f"You are {number}.", "stream": False}
        async with daemon.unix.post("/api/create", json=made) as answer:
            assert answer.status == 200, await answer.text()
    assert sorted(await names(daemon)) == ["again", "smol"]


async def test_a_model_that_lost_its_name_is_pruned(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 1, "other": 2})
    async with daemon.unix.post("/models/other/tag?repo=smol&tag=latest") as answer:
        assert answer.status < 300, await answer.text()
    [planned] = (await prune(daemon, "dry_run=true"))["removed"]
    assert planned["kind"] == "model"
    [done] = (await prune(daemon, ""))["removed"]
    assert done == planned
    assert sorted(await names(daemon)) == ["other"]
