"""The configuration file read again while the daemon runs."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from modelrunner.config.locations import ConfigurationError
from tests.api.conftest import Daemon, StartDaemon
from tests.api.test_configure import CONFIGURE, event
from tests.api.test_serving import Stream, chat, runners
from tests.waiting import HUNG

PAGE = {"Origin": "http://page.example"}


async def reload(daemon: Daemon, **body: Any) -> tuple[int, dict[str, Any]]:
    async with daemon.unix.post("/engines/reload", json=body) as answer:
        return answer.status, await answer.json()


def effects(body: dict[str, Any]) -> dict[str, str]:
    return {change["what"]: change["effect"] for change in body["changes"]}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


async def test_only_what_changed_is_touched(start_daemon: StartDaemon, config: Path) -> None:
    config.write_text('[models.smol]\ncontext-size = 512\nkeep_alive = "1h"')
    daemon = await start_daemon(models={"smol": 0, "other": 1, "third": 2}, listen="")
    for model in ("smol", "other", "third"):
        await chat(daemon.unix, model=model)
    before = {runner["model_name"]: runner["id"] for runner in await runners(daemon)}
    config.write_text('[models.smol]\ncontext-size = 256\n[models.other]\nkeep_alive = "2h"\npin = true')
    for dry in (True, False):
        status, body = await reload(daemon, dry_run=dry)
        assert (status, body["dry_run"]) == (200, dry)
        assert effects(body) == {
            'models."smol"': "its runner ends after its last request; the next request starts a new one",
            'models."other"': "holds at once",
        }
        assert body["changes"][0]["from"] == 'context-size = 512, keep_alive = "1h"'
        assert body["changes"][0]["to"] == "context-size = 256"
        if dry:
            assert {runner["model_name"]: runner["id"] for runner in await runners(daemon)} == before
    await chat(daemon.unix)
    await chat(daemon.unix, model="other")
    after = {runner["model_name"]: runner for runner in await runners(daemon) if runner["state"] == "ready"}
    assert {name for name, runner in after.items() if runner["id"] == before[name]} == {"other", "third"}
    assert (after["smol"]["context_size"], after["smol"]["keep_alive"]) == (256, "5m")
    assert (after["other"]["pinned"], after["other"]["keep_alive"]) == (True, "2h")
    assert (await reload(daemon))[1]["changes"] == []


async def test_a_keep_alive_holds_for_what_is_loaded(start_daemon: StartDaemon, config: Path) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1}, listen="")
    for model in ("smol", "other"):
        await chat(daemon.unix, model=model)
    config.write_text('keep_alive = -1\n[models.other]\nkeep_alive = "2h"')
    _, body = await reload(daemon)
    assert body["changes"][0] == {"what": "keep_alive", "from": '"5m"', "to": '"-1"', "effect": "holds at once"}
    assert {r["model_name"]: r["keep_alive"] for r in await runners(daemon)} == {"smol": "-1", "other": "2h"}


async def test_a_running_answer_ends_before_its_runner_does(start_daemon: StartDaemon, config: Path) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    async with Stream(daemon) as stream:
        config.write_text("[models.smol]\ncontext-size = 256")
        assert (await reload(daemon))[0] == 200
        assert [runner["state"] for runner in await runners(daemon)] == ["draining"]
        assert await stream.content.readline()


async def test_settings_of_the_daemon_change_or_say_that_they_cannot(start_daemon: StartDaemon, config: Path) -> None:
    daemon = await start_daemon(models={"smol": 0})
    async with daemon.tcp.get("/health", headers=PAGE) as answer:
        assert answer.status == 403
    config.write_text(
        'origins = ["http://page.example"]\nhosts = ["box"]\nkeep_alive = "3h"\nmax_queue = 3\nmax_wait = "1s"\n'
        'memory_budget = "1MiB"\nbody_limit = "1MiB"\nlog_level = "ERROR"\n[backends.fake]\nthreads = 3'
    )
    status, body = await reload(daemon)
    assert status == 200
    restart, now = "needs a restart of the daemon", "holds at once"
    assert effects(body) == {
        **dict.fromkeys(("origins", "hosts", "keep_alive", "max_queue", "max_wait", "memory_budget", "log_level"), now),
        **dict.fromkeys(("body_limit", "backends"), restart),
    }
    async with daemon.tcp.get("/health", headers=PAGE) as answer:
        assert answer.status == 200
    async with daemon.tcp.get("/health", headers={"Host": f"box:{daemon.port}"}) as answer:
        assert answer.status == 200
    async with daemon.unix.get("/version") as answer:
        assert (await answer.json())["memory"]["budget"] >= 1 << 20
    assert set(effects((await reload(daemon))[1])) == {"body_limit", "backends"}  # told until it is done
    config.unlink()
    assert (await reload(daemon))[0] == 200
    async with daemon.tcp.get("/health", headers=PAGE) as answer:
        assert answer.status == 403


async def test_a_model_of_the_startup_list_comes_back_when_there_is_room(
    start_daemon: StartDaemon, config: Path
) -> None:
    """It had to go for other programs, and for another model."""

    def budget(size: str) -> None:
        config.write_text(f'memory_budget = "{size}"\n[models.smol]\npreload = true\n')

    budget("66MiB")  # room for one
    daemon = await start_daemon(models={"smol": 0, "other": 1}, listen="")
    async with asyncio.timeout(HUNG), daemon.unix.get("/engines/events", params={"since": "0"}) as feed:

        async def comes(kind: str, model: str) -> None:
            async for line in feed.content:
                if line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    if (event["event"], event["model"]) == (kind, model):
                        return
            raise AssertionError("the feed has ended")

        await comes("ready", "smol")
        budget("1MiB")
        await reload(daemon)
        await comes("stop", "smol")
        budget("66MiB")
        await reload(daemon)
        await comes("ready", "smol")
        await chat(daemon.unix, model="other")
        await comes("evict", "smol")
        async with daemon.unix.post("/engines/unload", json={"models": ["other"]}) as answer:
            assert answer.status == 200
        await comes("ready", "smol")


async def test_an_engine_of_ones_own_waits_for_a_restart(start_daemon: StartDaemon, config: Path) -> None:
    """Each reload says it until then."""
    daemon = await start_daemon(listen="")
    config.write_text('llama_server = "/bin/true"\n')
    for _ in range(2):
        assert effects((await reload(daemon))[1]) == {"llama_server": "needs a restart of the daemon"}


WRONG = [
    ("max_quue = 3", "line 1, column 1: unknown setting 'max_quue'; did you mean 'max_queue'"),
    ("memory_budget = 0", "line 1, column 1: memory_budget: Input should be greater than 0"),
    ("keep_alive = = 1", "line 1, column 14"),
    (
        "\n[models.smol]\ncontxt-size = 512",
        "line 3, column 1: unknown setting 'contxt-size'; did you mean 'context-size'",
    ),
    ("[models.smol]\ncontext-size = 4096", "line 2, column 1: context-size 4096 is beyond the 2048"),
    ("[models.smol]\n\nruntime-flags = ['--nope']", "line 3, column 1: --nope is no knob"),
    ("[models.smol]\nfake = { bugdet = 1 }", "line 2, column 10: unknown setting 'fake.bugdet' for fake"),
    (
        "[models.away]\n[models.away.fak]\nx = 1",
        "line 2, column 14: unknown setting 'fak'; did you mean 'fake'",
    ),
    ("[models.smol]\nbackend = 'nope'", "line 2, column 1: there is no backend 'nope'"),
    ("[models.'A B']", "line 1, column 10"),
    ("[backends.fake]\n\nthread = 3", "line 3, column 1: unknown setting 'thread' for fake; did you mean 'threads'"),
    ("[backends]\nfake = { threads = 0 }", "line 2, column 10: threads: Input should be greater"),
    ("[backends.fakes]\nthreads = 3", "line 1, column 11: there is no backend 'fakes'; did you mean 'fake'"),
]


async def test_a_wrong_file_is_named_and_the_running_configuration_stays(
    start_daemon: StartDaemon, config: Path, subtests: pytest.Subtests
) -> None:
    config.write_text("[models.smol]\ncontext-size = 512")
    daemon = await start_daemon(models={"smol": 0}, listen="")
    for text, words in WRONG:
        with subtests.test(text=text):
            config.write_text(text)
            status, body = await reload(daemon)
            assert (status, body["error"]["code"]) == (400, "bad_request")
            assert str(config) in body["error"]["message"]
            assert words in body["error"]["message"]
            assert "the running configuration stays" in body["error"]["message"]
    await chat(daemon.unix)
    (runner,) = await runners(daemon)
    assert runner["context_size"] == 512


@pytest.mark.parametrize(("text", "words"), WRONG)
async def test_a_wrong_file_stops_the_start(start_daemon: StartDaemon, config: Path, text: str, words: str) -> None:
    config.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        await start_daemon(models={"smol": 0}, listen="")
    assert words in caught.value.message


async def test_the_signal_does_the_same(start_daemon: StartDaemon, config: Path) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    config.write_text("[models.smol]\ncontext-size = 256")
    os.kill(os.getpid(), signal.SIGHUP)
    assert b"next load" in await event(daemon, b"configure")
    async with daemon.unix.get(CONFIGURE) as answer:
        assert answer.status == 200
    assert not daemon.task.done()


async def test_flags_in_the_file_are_the_fields_that_they_set(start_daemon: StartDaemon, config: Path) -> None:
    config.write_text("[models.smol]\nraw-runtime-flags = '--ctx-size 256 --tokens=3'")
    daemon = await start_daemon(models={"smol": 0}, listen="")
    await chat(daemon.unix)
    (runner,) = await runners(daemon)
    assert runner["context_size"] == 256
