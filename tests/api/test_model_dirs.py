"""Models in several folders, through the daemon: where pulls go, and disks that come and go."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from modelrunner.errors import InsufficientDisk
from modelrunner.store import Store
from tests.api.conftest import Daemon, StartDaemon
from tests.api.test_reload import effects, reload
from tests.api.test_serving import chat
from tests.store.samples import add_model, write_gguf


@pytest.fixture
def disks(tmp_path: Path) -> tuple[Path, Path]:
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    return folders


def fill(data: Path, folder: Path, **models: int) -> None:
    """Models that lie in the folder before the daemon starts."""
    data.mkdir(exist_ok=True)
    store = Store(data, folders=[folder])
    for name, seed in models.items():
        add_model(store, name, seed)
    store.close()


async def create(daemon: Daemon, file: Path, name: str, **more: Any) -> tuple[int, str]:
    body = {"from": file.as_uri(), "name": name, **more}
    async with daemon.unix.post("/models/create", json=body) as answer:
        return answer.status, await answer.text()


async def ask(daemon: Daemon, path: str) -> Any:
    async with daemon.unix.get(path) as answer:
        return await answer.json()


async def listed(daemon: Daemon) -> dict[str, str]:
    return {model["tags"][0]: model.get("damage", "") for model in await ask(daemon, "/models")}


async def where(daemon: Daemon) -> dict[str, str]:
    return {model["tags"][0]: model["folder"] for model in (await ask(daemon, "/engines/df"))["models"]}


async def test_models_of_all_folders_are_served_and_removed_where_they_lie(
    start_daemon: StartDaemon, tmp_path: Path, disks: tuple[Path, Path]
) -> None:
    fill(tmp_path / "data_dir", disks[1], second=1)
    daemon = await start_daemon(models={"smol": 0}, model_dirs=disks)
    for name in ("smol", "second"):
        await chat(daemon.unix, model=name)
    file = write_gguf(tmp_path / "new.gguf", seed=2)
    assert (await create(daemon, file, "new"))[0] == 200
    assert (await create(daemon, write_gguf(tmp_path / "x.gguf", seed=3), "there", folder=str(disks[1])))[0] == 200
    data = str(daemon.settings.data_dir)
    one, two = map(str, disks)
    assert await where(daemon) == {"smol": data, "second": two, "new": one, "there": two}
    usage = await ask(daemon, "/engines/df")
    assert [folder["path"] for folder in usage["folders"]] == [one, two, data]
    assert usage["models_disk_usage"] == sum(folder["size"] for folder in usage["folders"])
    async with daemon.unix.delete("/models/second?force=true") as answer:
        assert answer.status == 200
    assert set(await listed(daemon)) == {"smol", "new", "there"}
    assert (await ask(daemon, "/version"))["model_dirs"] == {one: "", two: "", data: ""}


async def test_a_folder_that_is_none_of_them_is_refused(
    start_daemon: StartDaemon, tmp_path: Path, disks: tuple[Path, Path]
) -> None:
    daemon = await start_daemon(model_dirs=disks)
    file = write_gguf(tmp_path / "new.gguf")
    status, text = await create(daemon, file, "new", folder=str(tmp_path))
    assert status == 400
    assert "add it to model_dirs" in text
    await create(daemon, file, "new")
    status, text = await create(daemon, file, "new", folder=str(disks[1]))
    assert status == 409
    assert f"the model lies in {disks[0]}: remove it, then pull it to {disks[1]}" in text


async def test_a_folder_that_is_missing_isolates_its_models(
    start_daemon: StartDaemon, tmp_path: Path, disks: tuple[Path, Path]
) -> None:
    add_model(Store(tmp_path / "data_dir"), "smol")
    fill(tmp_path / "data_dir", disks[0], big=1)
    away = disks[0].with_name("away")
    disks[0].rename(away)
    daemon = await start_daemon(model_dirs=disks)
    await chat(daemon.unix)
    told = f"the folder {disks[0]} is not there: mount its disk"
    assert (await listed(daemon))["big"].startswith(told)
    assert (await listed(daemon))["smol"] == ""
    body = {"model": "big", "messages": [{"role": "user", "content": "x"}]}
    async with daemon.unix.post("/engines/v1/chat/completions", json=body) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (503, "folder_missing")
        assert error["message"].startswith(f"big: {told}")
    async with daemon.unix.delete("/models/big") as answer:
        assert answer.status == 503
    assert told in (await ask(daemon, "/ready"))["reason"]
    assert (await ask(daemon, "/engines/df"))["folders"][-1]["absent"].startswith(told)
    assert (await create(daemon, write_gguf(tmp_path / "new.gguf", seed=2), "new"))[0] == 200
    assert (await where(daemon))["new"] == str(disks[1])
    away.rename(disks[0])
    assert (await reload(daemon))[0] == 200
    await chat(daemon.unix, model="big")
    assert not any((await listed(daemon)).values())


async def test_a_disk_is_lost_and_found_while_the_daemon_runs(
    start_daemon: StartDaemon, tmp_path: Path, disks: tuple[Path, Path]
) -> None:
    fill(tmp_path / "data_dir", disks[0], big=1, other=2)
    daemon = await start_daemon(models={"smol": 0}, model_dirs=disks[:1])
    await chat(daemon.unix, model="big")
    disks[0].rename(disks[0].with_name("away"))
    disks[0].mkdir()  # where the disk was mounted
    await chat(daemon.unix, model="big")  # its engine runs on
    body = {"model": "other", "messages": [{"role": "user", "content": "x"}]}
    async with daemon.unix.post("/engines/v1/chat/completions", json=body) as answer:
        assert answer.status == 503
        assert "is empty, and it had models: mount its disk" in await answer.text()
    await chat(daemon.unix, model="smol")
    assert [bool(damage) for _, damage in sorted((await listed(daemon)).items())] == [True, True, False]
    assert os.listdir(disks[0]) == []
    disks[0].rmdir()
    disks[0].with_name("away").rename(disks[0])
    assert not any((await listed(daemon)).values())  # the list looks again
    await chat(daemon.unix, model="other")


async def test_a_pull_to_a_disk_that_is_back_finds_it(
    start_daemon: StartDaemon, tmp_path: Path, disks: tuple[Path, Path]
) -> None:
    disks[0].rename(disks[0].with_name("away"))
    daemon = await start_daemon(model_dirs=disks)
    file = write_gguf(tmp_path / "new.gguf")
    status, text = await create(daemon, file, "new", folder=str(disks[0]))
    assert (status, "is not there: mount its disk" in text) == (503, True)
    disks[0].with_name("away").rename(disks[0])
    assert (await create(daemon, file, "new", folder=str(disks[0])))[0] == 200
    assert await where(daemon) == {"new": str(disks[0])}


async def test_a_reload_adds_a_folder_and_takes_it_out(
    start_daemon: StartDaemon, tmp_path: Path, disks: tuple[Path, Path]
) -> None:
    fill(tmp_path / "elsewhere", disks[0], big=1)
    daemon = await start_daemon(models={"smol": 0})
    config = tmp_path / "config.toml"
    config.write_text(f'model_dirs = ["{disks[0]}"]\n')
    assert effects((await reload(daemon, dry_run=True))[1]) == {"model_dirs": "holds at once"}
    assert set(await listed(daemon)) == {"smol"}
    assert effects((await reload(daemon))[1]) == {"model_dirs": "holds at once"}
    await chat(daemon.unix, model="big")
    assert (await ask(daemon, "/models/big"))["capabilities"]
    config.write_text("")
    assert (await reload(daemon))[0] == 200
    assert set(await listed(daemon)) == {"smol"}
    config.write_text('model_dirs = ["models"]\n')
    status, body = await reload(daemon)
    assert status == 400
    assert "line 1, column 1: model_dirs.0: 'models' is not absolute" in body["error"]["message"]


async def test_a_full_disk_passes_a_model_on_to_the_next(
    start_daemon: StartDaemon, tmp_path: Path, disks: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = await start_daemon(model_dirs=disks)
    real, full = shutil.disk_usage, {str(disks[0])}

    def disk_usage(path: Any) -> Any:
        found = real(path)
        return found._replace(free=0) if any(str(path).startswith(each) for each in full) else found

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    status, text = await create(daemon, write_gguf(tmp_path / "new.gguf"), "new")
    assert status == 200
    assert f"not enough room on the disk: needed {(tmp_path / 'new.gguf').stat().st_size * 105 // 100} bytes" in text
    assert f"it goes to {disks[1]}" in text
    assert await where(daemon) == {"new": str(disks[1])}
    assert os.listdir(disks[0] / "partial") == []
    full |= {str(disks[1]), str(daemon.settings.data_dir)}
    assert "not enough room" in (await create(daemon, write_gguf(tmp_path / "b.gguf", seed=1), "b"))[1]
    full -= {str(disks[0])}
    status, text = await create(daemon, write_gguf(tmp_path / "c.gguf", seed=2), "c", folder=str(disks[1]))
    assert "not enough room" in text  # what was asked for, and nothing else
    assert set(await listed(daemon)) == {"new"}


async def test_an_archive_goes_where_there_is_room(
    start_daemon: StartDaemon, disks: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = await start_daemon(models={"smol": 0}, model_dirs=disks)
    async with daemon.unix.get("/models/smol/export") as answer:
        archive = await answer.read()
    async with daemon.unix.delete("/models/smol") as answer:
        assert answer.status == 200
    real = shutil.disk_usage
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda path: real(path)._replace(**{"free": 0} if Path(path).is_relative_to(disks[0]) else {}),
    )
    async with daemon.unix.post("/models/load", data=archive) as answer:
        assert "smol is here" in await answer.text()
    assert await where(daemon) == {"smol": str(disks[1])}


async def test_files_that_were_sent_wait_in_the_first_folder(
    start_daemon: StartDaemon, tmp_path: Path, disks: tuple[Path, Path]
) -> None:
    daemon = await start_daemon(model_dirs=disks)
    data = write_gguf(tmp_path / "new.gguf").read_bytes()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    async with daemon.unix.post(f"/api/blobs/{digest}", data=data) as answer:
        assert answer.status == 201
    assert [path.name for path in (disks[0] / "partial").iterdir()] == [f"upload-{digest[7:]}"]
    async with daemon.unix.post("/api/create", json={"model": "sent", "files": {"m.gguf": digest}}) as answer:
        assert answer.status == 200
        await answer.read()
    assert await where(daemon) == {"sent": str(disks[0])}


async def test_a_model_moves_to_another_disk_with_all_of_its_names(
    start_daemon: StartDaemon, tmp_path: Path, disks: tuple[Path, Path]
) -> None:
    fill(tmp_path / "data_dir", disks[1], second=1)
    daemon = await start_daemon(models={"smol": 0}, model_dirs=disks)
    async with daemon.unix.post("/models/smol/tag?repo=other") as answer:
        assert answer.status == 201
    await chat(daemon.unix, model="smol")
    before = await ask(daemon, "/models")
    for target in (disks[0], daemon.settings.data_dir, disks[1], disks[1]):
        body, headers = {"folder": str(target)}, {"Accept": "application/json"}
        async with daemon.unix.post("/models/other/move", json=body, headers=headers) as answer:
            lines = [json.loads(line) for line in (await answer.text()).splitlines()]
            assert lines[-1]["type"] == "success", lines
        assert (await where(daemon))["smol"] == str(target)
        assert [model["tags"] for model in await ask(daemon, "/models")] == [model["tags"] for model in before]
        for name in ("smol", "other"):
            await chat(daemon.unix, model=name)
    blobs = [file for place in (disks[0], daemon.settings.data_dir) for file in (place / "blobs/sha256").iterdir()]
    assert blobs == []
    async with daemon.unix.post("/models/smol/move", json={"folder": str(tmp_path)}) as answer:
        assert (answer.status, "is not a folder of models" in await answer.text()) == (400, True)


async def test_a_move_for_which_there_is_no_room_changes_nothing(
    start_daemon: StartDaemon, disks: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = await start_daemon(models={"smol": 0}, model_dirs=disks)
    before = await where(daemon)

    def full(path: Path, needed: int) -> None:
        raise InsufficientDisk("no room")

    monkeypatch.setattr("modelrunner.store.store.require_space", full)
    async with daemon.unix.post("/models/smol/move", json={"folder": str(disks[0])}) as answer:
        assert answer.status == 507
    assert await where(daemon) == before
    await chat(daemon.unix, model="smol")
