"""Groups of models, and the hours of the day in which pins and preloads hold."""

import asyncio
import json
from collections import Counter
from datetime import datetime
from pathlib import Path

import pytest

from modelrunner.daemon.parts import build
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.store import Store
from modelrunner.types import Hours
from tests.api.conftest import Daemon, StartDaemon, make_settings
from tests.api.test_reload import reload
from tests.api.test_serving import chat, runners
from tests.fakes import FakeBackend
from tests.store.samples import add_model
from tests.waiting import HUNG

MODELS = {"smol": 0, "other": 1, "third": 2}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


async def come(daemon: Daemon, kind: str, *models: str) -> list[str]:
    """Waits until there was an event of this kind for each of the models, from the daemon's start on. Returns the
    events until then."""
    left, seen = Counter(models), []
    async with asyncio.timeout(HUNG), daemon.unix.get("/engines/events", params={"since": "0"}) as feed:
        async for line in feed.content:
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                seen.append(f"{event['event']} {event['model']}")
                left -= Counter([event["model"]] if event["event"] == kind else [])
            if not left:
                return seen
    raise AssertionError(f"{left} did not come")


async def test_one_model_of_a_group_brings_the_others(start_daemon: StartDaemon, config: Path) -> None:
    config.write_text('[groups.both]\nmodels = ["smol", "third"]\npin = true\n')
    daemon = await start_daemon(models=MODELS, listen="")
    await chat(daemon.unix, model="third")
    await come(daemon, "ready", "third", "smol")
    assert {r["model_name"]: r["pinned"] for r in await runners(daemon)} == {"smol": True, "third": True}


async def test_an_outsider_leaves_for_a_group(start_daemon: StartDaemon, config: Path) -> None:
    """There is room for two."""
    tables = "".join([f"[models.{name}]\nruntime-flags = ['--allocate=40']\n" for name in MODELS])
    config.write_text(f'memory_budget = "130MiB"\n[groups.both]\nmodels = ["smol", "third"]\n{tables}')
    daemon = await start_daemon(models=MODELS, listen="")
    await chat(daemon.unix, model="other")
    await chat(daemon.unix, model="smol")
    assert "evict other" in await come(daemon, "ready", "third")
    assert {r["model_name"] for r in await runners(daemon) if r["state"] == "ready"} == {"smol", "third"}


async def test_no_member_of_a_group_leaves_for_another(start_daemon: StartDaemon, config: Path) -> None:
    """There is room for one. The model that is not here is tried again once what came before was looked at."""
    group = '[groups.both]\nmodels = ["smol", "third"]\n[models.absent]\npreload = true\n'
    config.write_text(f'memory_budget = "66MiB"\n{group}')
    daemon = await start_daemon(models=MODELS, listen="")
    await chat(daemon.unix, model="smol")
    await come(daemon, "refuse", "absent")
    async with daemon.unix.post("/engines/_configure", json={"model": "smol", "keep_alive": "1h"}) as answer:
        assert answer.status == 202
    await come(daemon, "refuse", "absent", "absent")  # the ready model came before that
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "group both"))
    assert not [event for event in await come(daemon, "refuse", "absent", "absent") if event.endswith("third")]


async def test_a_slow_group_keeps_no_other_waiting(start_daemon: StartDaemon, config: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    config.write_text(
        '[groups.slow]\nmodels = ["smol", "third"]\n[groups.quick]\nmodels = ["other", "fourth"]\n'
        f"[models.third]\nruntime-flags = ['--gate={gate}']\n"
    )
    daemon = await start_daemon(models={**MODELS, "fourth": 3}, listen="")
    await chat(daemon.unix, model="smol")
    await come(daemon, "load", "third")
    await chat(daemon.unix, model="other")
    assert "ready third" not in await come(daemon, "ready", "fourth")
    gate.touch()
    await come(daemon, "ready", "third")


async def test_a_models_own_table_wins_over_its_groups(start_daemon: StartDaemon, config: Path) -> None:
    config.write_text('[groups.both]\nmodels = ["smol", "third"]\npin = true\n[models.smol]\npin = false\nparallel = 1')
    daemon = await start_daemon(models=MODELS, listen="")
    await chat(daemon.unix, model="smol")
    await come(daemon, "ready", "third")
    assert {r["model_name"]: r["pinned"] for r in await runners(daemon)} == {"smol": False, "third": True}


WRONG = [
    ('[groups.a]\nmodels = ["smol"]\n[groups.b]\nmodels = ["smol"]', "smol is in the groups a and b: a model can be"),
    (
        '[groups.a]\nmodels = ["smol"]\nhours = "7-8"',
        "line 3, column 1: groups.a.hours: '7-8' are no hours: write HH:MM",
    ),
    ("[groups.a]\nmodels = []", "line 2, column 1: groups.a.models"),
    ('[groups.a]\nmodels = ["A B"]', "line 2, column 1"),
    ('[groups.a]\nmodels = ["smol"]\npin = "yes"', "line 3, column 1: groups.a.pin"),
    ("[groups.a]\nmodel = []", "unknown setting 'groups.a.model'"),
    ('[models.smol]\nhours = "25:00-26:00"', "line 2, column 1: '25:00-26:00' are no hours"),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
async def test_a_wrong_group_changes_nothing(start_daemon: StartDaemon, config: Path, text: str, said: str) -> None:
    daemon = await start_daemon(models={"smol": 0}, listen="")
    config.write_text(text)
    status, body = await reload(daemon)
    assert status == 400
    assert said in body["error"]["message"]


TOO_MUCH = [
    ('[groups.three]\nmodels = ["smol", "other", "third"]', "line 1, column 9"),
    ("[models.smol]\npin = true\n[models.other]\npreload = true\n[models.third]\npin = true", "line 1, column 1"),
]


@pytest.mark.parametrize(("text", "place"), TOO_MUCH)
async def test_what_never_fits_together_is_refused(
    start_daemon: StartDaemon, config: Path, text: str, place: str
) -> None:
    limit = 'memory_budget = "130MiB"\n'
    config.write_text(limit)
    daemon = await start_daemon(models=MODELS, listen="")
    config.write_text(f"{limit}{text}\n")
    for dry in (True, False):
        status, body = await reload(daemon, dry_run=dry)
        assert status == 400
        assert "other and smol and third need 192MiB together, and there are 130MiB" in body["error"]["message"]
    hours = text.replace("[models.third]", 'hours = "07:00-09:00"\n[models.third]\nhours = "09:00-07:00"')
    config.write_text(f"{limit}{hours}\n")
    assert (await reload(daemon))[0] == (200 if hours != text else 400)


async def test_pins_and_preloads_follow_the_hours(tmp_path: Path, config: Path) -> None:
    config.write_text('[groups.night]\nmodels = ["smol"]\npin = true\npreload = true\nhours = "22:00-06:30"\n')
    settings = make_settings(tmp_path)
    settings.data_dir.mkdir()
    settings.runtime_dir.mkdir(mode=0o700)
    add_model(Store(settings.data_dir), "smol", 0)
    made = build(settings, BackendRegistry({"fake": FakeBackend(tmp_path)}))
    clock = [datetime(2026, 11, 27, 21, 59)]
    made.resolver.now = lambda: clock[0]
    running = asyncio.create_task(made.preloader.run())

    async def at(hour: int, minute: int, pinned: list[bool]) -> None:
        clock[0] = datetime(2026, 11, 27, hour, minute)
        made.scheduler.events.emit("configure", reason="the clock is looked at after an event, else every few seconds")
        async with asyncio.timeout(HUNG):
            while [runner.pinned for runner in made.scheduler.runners() if runner.state == "ready"] != pinned:
                assert not running.done()
                await asyncio.sleep(0)

    assert made.resolver.preloads() == []
    await at(22, 0, [True])
    await at(6, 30, [False])
    await at(0, 0, [True])
    await made.scheduler.close(0.0)
    await running


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("07:00-19:30", ("07:00", "19:29"), ("06:59", "19:30", "00:00")),
        ("22:00-06:30", ("22:00", "23:59", "00:00", "06:29"), ("06:30", "21:59")),
        ("00:00-24:00", ("00:00", "23:59"), ()),
        ("22:00-24:00", ("22:00", "23:59"), ("00:00", "21:59")),
    ],
)
def test_hours(text: str, inside: tuple[str, ...], outside: tuple[str, ...]) -> None:
    def minute(time: str) -> int:
        return int(time[:2]) * 60 + int(time[3:])

    assert all(Hours.parse(text).hold(minute(time)) for time in inside)
    assert not any(Hours.parse(text).hold(minute(time)) for time in outside)
