"""A plug-in that misbehaves beside a backend that serves: the requests of the other are neither lost nor held up, and
those who ask for the plug-in's models are told its name."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from modelrunner.store import Store
from tests.api.conftest import make_settings
from tests.fakes import FakeBackend
from tests.plugins.beside import Daemon, beside
from tests.plugins.rogue import FAULTS, HARMLESS_FOR_RUNS
from tests.store.samples import add_model


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    settings = make_settings(tmp_path, listen="")
    settings.data_dir.mkdir()
    store = Store(settings.data_dir)
    for seed, name in enumerate(("good", "bad", "new")):
        add_model(store, name, seed)
    async with beside(FakeBackend(tmp_path), settings, limit=4.0) as daemon:
        yield daemon


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_request_of_another_backend_is_lost_or_waits_for_it(daemon: Daemon, fault: str) -> None:
    """While the plug-in keeps its caller waiting, the other backend answers one request after the other."""
    assert (await daemon.chat("/v1", "good"))[0] == 200
    daemon.rogue.fault = fault
    asked = asyncio.create_task(daemon.chat("/engines/a-rogue/v1", "bad"))
    answered = 0
    while not asked.done() or answered < 5:
        assert (await daemon.chat("/v1", "good"))[0] == 200
        answered += 1
    status, answer = await asked
    if fault in HARMLESS_FOR_RUNS:
        assert status == 200
    else:
        assert status in (412, 502)
        assert "rogue" in answer["error"]["message"]
    assert (await daemon.chat("/v1", "new"))[0] == 200  # one whose backend is yet to be chosen


@pytest.mark.parametrize("fault", FAULTS)
async def test_commands_that_look_at_all_backends_go_on(daemon: Daemon, fault: str) -> None:
    daemon.rogue.fault = fault
    for path in ("/engines/status", "/engines/df", "/engines/ps", "/models", "/v1/models", "/version", "/ready"):
        async with daemon.session.get(path) as answer:
            assert answer.status == 200, path
    async with daemon.session.get("/engines/status") as answer:
        statuses = await answer.json()
    assert statuses["fake"].startswith("Running")
    if fault.startswith("status"):
        assert "rogue" in statuses["a-rogue"]
