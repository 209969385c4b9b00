"""`/engines/settings`: settings that are written into the configuration file."""

import asyncio
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest

from modelrunner.config.settingsfile import SettingsFile, with_values
from modelrunner.errors import BadRequest
from tests.api.conftest import Daemon, StartDaemon
from tests.waiting import HUNG


async def post(daemon: Daemon, **values: str) -> tuple[int, Any]:
    async with daemon.tcp.post("/engines/settings", json={"values": values}) as answer:
        return answer.status, await answer.json()


async def shown(daemon: Daemon) -> dict[str, tuple[str, str]]:
    async with daemon.tcp.get("/engines/settings") as answer:
        return {each["name"]: (each["value"], each["source"]) for each in await answer.json()}


async def test_settings_are_written_and_apply_with_a_reload(
    start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, file = tmp_path / "dotfiles" / "modelrunner.toml", tmp_path / "config.toml"
    real.parent.mkdir()
    real.write_text('# mine\nkeep_alive = "5m" # usual\n[models.smol]\npin = true\n')
    file.symlink_to(real)
    daemon = await start_daemon(models={"smol": 0})
    assert (await shown(daemon))["keep_alive"] == ("5m", f"{file}, line 2, column 1")
    status, told = await post(daemon, keep_alive="2h", max_queue="7", telemetry="true")
    assert status == 200
    assert {each["name"]: each["value"] for each in told if each["value"]} == {
        "keep_alive": "2h",
        "max_queue": "7",
        "telemetry": "true",
    }
    assert file.is_symlink()
    assert real.read_text() == (
        '# mine\nkeep_alive = "2h"\nmax_queue = 7\ntelemetry = true\n[models.smol]\npin = true\n'
    )
    async with daemon.tcp.post("/engines/reload") as answer:
        changes = (await answer.json())["changes"]
    assert {change["what"]: change["effect"] for change in changes}["max_queue"] == "holds at once"
    assert (await post(daemon, max_queue=""))[0] == 200
    assert "max_queue" not in tomllib.loads(real.read_text())


@pytest.mark.parametrize(
    "values",
    [
        {"keep_alive": "soon"},
        {"keep_alive": "\U0001f600"},
        {"max_queue": "-1"},
        {"log_level": '\x7f\n"]'},
        {"sandbox": "off"},
        {"listen": ":1"},
    ],
)
async def test_a_wrong_value_changes_nothing(start_daemon: StartDaemon, tmp_path: Path, values: dict[str, str]) -> None:
    daemon = await start_daemon()
    for before in (None, 'log_level = "info"\n'):
        if before is not None:
            (tmp_path / "config.toml").write_text(before)
            (tmp_path / "config.toml").chmod(0o640)
        status, told = await post(daemon, **values)
        assert (status, told["error"]["code"]) == (400, "bad_request")
        assert next(iter(values)) in told["error"]["message"]
        assert ((tmp_path / "config.toml").read_text() if before else None) == before
        assert (tmp_path / "config.toml").exists() == (before is not None)
    assert (tmp_path / "config.toml").stat().st_mode & 0o777 == 0o640


async def test_a_client_that_leaves_leaves_no_wrong_file(
    start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = await start_daemon()
    written, left = threading.Event(), threading.Event()
    write = SettingsFile.write

    def slow(self: SettingsFile, values: dict[str, str]) -> str | None:
        before = write(self, values)
        written.set()
        left.wait(HUNG)
        return before

    monkeypatch.setattr(SettingsFile, "write", slow)
    asking = asyncio.create_task(post(daemon, keep_alive="soon"))
    await asyncio.to_thread(written.wait, HUNG)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    async with daemon.unix.get("/health") as answer:  # the daemon has seen by then that it left
        assert answer.status == 200
    left.set()
    assert (await post(daemon, max_queue="7"))[0] == 200  # waits for its turn
    assert (tmp_path / "config.toml").read_text() == "max_queue = 7\n"


def test_what_is_written_in_another_way_is_left_to_an_editor() -> None:
    for text in ('access_log = """\ntext"""\n', 'note = """\nkeep_alive = 1\n"""\n'):
        with pytest.raises(BadRequest, match="more than one line"):
            with_values(text, {"access_log": "off", "keep_alive": "5m"})


async def test_the_ends_of_lines_stay(start_daemon: StartDaemon, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(b'# mine\r\nkeep_alive = "5m"\r\n[models.smol]\r\npin = true\r\n')
    daemon = await start_daemon(models={"smol": 0})
    assert (await shown(daemon))["keep_alive"] == ("5m", f"{file}, line 2, column 1")
    assert (await post(daemon, max_queue="7"))[0] == 200
    assert file.read_bytes() == (b'# mine\r\nkeep_alive = "5m"\r\nmax_queue = 7\r\n[models.smol]\r\npin = true\r\n')
