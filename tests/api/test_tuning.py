"""What is measured to be faster on this machine, by whom, and where it is used."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from modelrunner.daemon.parts import Parts, build
from modelrunner.errors import BadRequest, EngineFailed
from modelrunner.models.tuner import Tuner
from modelrunner.models.tunings import Tunings
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.scheduler import Phase, RunnerView
from modelrunner.store import Store
from modelrunner.types import Launch, Mode, RequiredMemory, RunSpec
from modelrunner.wire import DraftStatus
from tests.api.conftest import StartDaemon, make_settings
from tests.fakes import FakeBackend
from tests.gateway.fakes import until
from tests.store.samples import add_model
from tests.waiting import HUNG

SLOW, FAST = ("--timings", "50"), ("--timings", "1000")
CHAT = {"model": "smol", "messages": [{"role": "user", "content": "a"}]}


class Tunable(FakeBackend):
    """Its engine is faster with drafts and with the flags `FAST`, and slower with others. `specs` are its runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SLOW)
        self.specs: list[RunSpec] = []
        self.release = "1"
        self.proposed = [("--timings", "30"), FAST]

    def version(self) -> str:
        return self.release

    def tunings(self, spec: RunSpec) -> Sequence[tuple[str, ...]]:
        return self.proposed

    async def run(self, spec: RunSpec, launch: Launch) -> NoReturn:
        self.specs.append(spec)
        faster = ("--timings", "200") if spec.ngram else ()
        await super().run(replace(spec, flags=(*faster, *spec.flags)), launch)


class World:
    """A daemon's parts without its listeners. `proposed` and `taken` are the drafts of each runner."""

    def __init__(self, folder: Path) -> None:
        self.backend = Tunable(folder)
        settings = make_settings(folder)
        settings.data_dir.mkdir()
        settings.runtime_dir.mkdir(mode=0o700)
        add_model(Store(settings.data_dir), "smol", 0)
        self.parts: Parts = build(settings, BackendRegistry({"fake": self.backend}))
        self.drafts = DraftStatus(0, 0)
        self.file = folder / "tunings.json"
        self.restart()

    def restart(self, *, alone: bool = True, **limits: float) -> None:
        """Measures from now on as after a start of the daemon, `alone` or with other hosts."""
        self.tunings = Tunings(self.file, alone=alone)
        self.tuner = Tuner(self.parts.setting_parts, self.tunings, self._told, idle=0.0, rounds=1, **limits)
        self.parts.specs._tunings = self.tunings

    async def _told(self, runners: Sequence[RunnerView]) -> Mapping[str, DraftStatus]:
        return {runner.id: self.drafts for runner in runners}

    async def load(self) -> RunSpec:
        """How the model runs for somebody who asks it now."""
        await self.parts.preloader.load("smol")
        return self.backend.specs[-1]

    def told(self) -> list[str]:
        return [event.reason for event in self.parts.scheduler.events.recent() if event.event == "tune"]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    await made.parts.scheduler.close(0.0)
    made.parts.registry.close()
    made.parts.store.close()


async def test_what_is_faster_is_kept_and_used_where_settings_are_auto(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    backend = Tunable(tmp_path)
    daemon = await start_daemon(models={"smol": 0}, backends={"fake": backend})

    async def post(path: str, body: dict[str, Any]) -> Any:
        async with daemon.unix.post(path, json=body) as answer:
            assert answer.status in (200, 202), await answer.text()
            return await answer.json()

    async def asked(**changes: Any) -> RunSpec:
        """How the model runs after the change."""
        await post("/engines/_configure", {"model": "smol", **changes})
        await post("/engines/unload", {"all": True})
        await post("/v1/chat/completions", CHAT)
        return backend.specs[-1]

    found = await post("/engines/tune", {"model": "smol"})
    assert [(trial["what"], trial["kept"]) for trial in found["trials"]] == [
        ("n-gram drafts", True),
        ("--timings 30", False),
        ("--timings 1000", True),
    ]
    assert [len(trial["texts"]) for trial in found["trials"]] == [5, 6, 6]
    assert (found["drafts"], found["flags"]) == (True, list(FAST))
    async with daemon.unix.get("/engines/ps") as answer:
        assert await answer.json() == []  # what was loaded only to be measured
    plain = await asked(speculative=None)
    assert (plain.ngram, plain.flags) == (False, ())
    drafting = await asked(speculative="auto")
    assert (drafting.ngram, drafting.flags) == (True, ())
    both = await asked(tune="auto")
    assert (both.ngram, both.flags) == (True, FAST)
    other = await asked(**{"runtime-flags": ["--timings", "500"]})  # nothing was measured with these
    assert (other.ngram, other.flags) == (False, ("--timings", "500"))
    await post("/engines/_configure", {"model": "smol", "runtime-flags": None})
    async with daemon.unix.post("/shutdown") as answer:
        assert answer.status == 202
    await daemon.task
    backend = Tunable(tmp_path)
    daemon = await start_daemon(backends={"fake": backend})
    assert (await asked()).flags == FAST
    backend.release = "2"
    async with daemon.unix.post("/engines/install-backend", json={"backend": "fake"}) as answer:
        assert answer.status == 200
        await answer.read()
    assert (await asked()).flags == ()


@pytest.mark.parametrize(
    ("model", "changes", "status", "words"),
    [
        ("nope", {}, 404, "nope"),
        ("smol", {"speculative": {"draft_model": "smol"}}, 400, "--draft-model default"),
    ],
)
async def test_what_cannot_be_measured(
    start_daemon: StartDaemon, model: str, changes: dict[str, Any], status: int, words: str
) -> None:
    daemon = await start_daemon(models={"smol": 0})
    async with daemon.unix.post("/engines/_configure", json={"model": "smol", **changes}) as answer:
        assert answer.status == 202
    async with daemon.unix.post("/engines/tune", json={"model": model}) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, words in error["message"]) == (status, True), error


async def test_an_idle_minute_measures_what_is_auto(world: World) -> None:
    await world.tuner.look()
    assert world.backend.specs == []
    await world.parts.configurator.change("smol", {"speculative": "auto", "tune": "auto"})
    await world.tuner.look()
    assert world.told() == ["the measuring begins", "faster with n-gram drafts, --timings 1000"]
    runs = len(world.backend.specs)
    await world.tuner.look()
    assert len(world.backend.specs) == runs
    found = await world.load()
    assert (found.ngram, found.flags) == (True, FAST)
    why = await world.parts.explainer.why("smol")
    assert "faster with n-gram drafts, --timings 1000" in [event.reason for event in why.events]


async def test_nothing_is_measured_while_somebody_asks_and_a_measuring_ends_for_them(world: World) -> None:
    await world.parts.configurator.change("smol", {"speculative": "auto"})
    await world.parts.resolver.prepare(None, "smol", Mode.COMPLETION)
    target = world.parts.resolver(None, "smol", Mode.COMPLETION)
    with await world.parts.scheduler.acquire(target, owner=""):
        await world.tuner.look()
    assert world.told() == []
    await world.parts.scheduler.unload(all=True)
    world.backend.knobs = ("--rate", "1")  # it would take minutes
    before = world.parts.scheduler.events.last
    measuring = asyncio.create_task(world.tuner.look())
    async with asyncio.timeout(HUNG):
        async for event in world.parts.scheduler.events.subscribe(before):
            if event is not None and event.event == "ready":
                break
        runs = len(world.backend.specs)
        with await world.parts.scheduler.acquire(target, owner=""):
            assert len(world.backend.specs) == runs  # the one that was measured answers
            await measuring
    assert world.told()[-1] == "ended before its end: somebody asked"
    assert not (await world.load()).ngram


async def test_a_model_that_cannot_be_measured_is_tried_once(world: World) -> None:
    await world.parts.configurator.change("smol", {"speculative": "auto"})
    world.backend.knobs = ("--status", "500")
    await world.tuner.look()
    assert "nothing was measured: smol gave no answer to measure (status 500)" in world.told()
    runs = len(world.backend.specs)
    await world.tuner.look()
    assert len(world.backend.specs) == runs
    world.backend.knobs = SLOW
    await world.parts.scheduler.unload(all=True)
    world.restart()  # the error may have passed
    await world.tuner.look()
    assert world.told()[-1].startswith("faster with n-gram drafts")
    runs = len(world.backend.specs)
    world.restart()
    await world.tuner.look()
    assert len(world.backend.specs) == runs


async def test_what_is_measured_here_holds_for_no_model_that_may_run_on_another_machine(world: World) -> None:
    world.restart(alone=False)
    await world.parts.configurator.change("smol", {"speculative": "auto"})
    await world.tuner.look()
    with pytest.raises(BadRequest, match="--hosts here"):
        await world.tuner.tune("smol")
    await world.parts.configurator.change("smol", {"hosts": ["here"]})
    await world.tuner.look()
    assert (await world.load()).ngram
    await world.parts.configurator.change("smol", {"hosts": None})
    await world.parts.scheduler.unload(all=True)
    assert not (await world.load()).ngram


async def test_a_change_with_which_the_engine_does_not_start_is_no_end_of_the_measuring(world: World) -> None:
    world.backend.proposed = [("--crash", "this cache needs flash attention"), FAST]
    done = await world.tuner.tune("smol")
    assert [(trial.what, trial.kept, bool(trial.texts)) for trial in done.trials] == [
        ("n-gram drafts", True, True),
        ("--crash this cache needs flash attention", False, False),
        ("--timings 1000", True, True),
    ]
    assert "this cache needs flash attention" in done.trials[1].fault


async def test_a_runner_that_was_only_tried_goes_after_an_error(world: World) -> None:
    world.backend.proposed = [("--status", "500")]
    with pytest.raises(EngineFailed, match="no answer to measure"):
        await world.tuner.tune("smol")
    assert "--status" in world.backend.specs[-1].flags
    assert {runner.state for runner in world.parts.scheduler.runners()} <= {Phase.DRAINING, Phase.STOPPING}


async def test_a_speed_that_the_engine_tells_in_one_way_alone_is_not_compared(world: World) -> None:
    world.backend.knobs = ()  # it tells no speeds, so that its answers are timed
    world.backend.proposed = [FAST]
    [_, trial] = (await world.tuner.tune("smol")).trials
    assert (trial.what, len(trial.texts)) == ("--timings 1000", 5)


async def test_a_measuring_that_takes_too_long_is_not_begun_again(world: World) -> None:
    await world.parts.configurator.change("smol", {"speculative": "auto"})
    world.restart(longest=0.0)
    for _ in range(2):
        await world.tuner.look()
    limit = "nothing was measured: it took longer than 0 s: `modelrunner bench smol --tune` has no limit"
    assert world.told() == [limit]
    assert not (await world.load()).ngram


async def test_a_result_is_in_use_though_its_client_left_while_it_was_stored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*args: Any, **kwargs: Any) -> None:
        storing.set()
        left.wait(HUNG)
        keep(*args, **kwargs)

    keep, storing, left = world.tunings.keep, threading.Event(), threading.Event()
    monkeypatch.setattr(world.tunings, "keep", slow)
    await world.parts.configurator.change("smol", {"speculative": "auto"})
    assert not (await world.load()).ngram
    world.backend.proposed = []
    measuring = asyncio.create_task(world.tuner.tune("smol"))
    assert await asyncio.to_thread(storing.wait, HUNG)
    measuring.cancel()
    await asyncio.gather(measuring, return_exceptions=True)
    left.set()
    await until(lambda: world.told()[-1] == "faster with n-gram drafts")
    await world.parts.scheduler.unload(all=True)
    assert (await world.load()).ngram


@pytest.mark.parametrize(("drafts", "stay"), [(DraftStatus(5000, 500), False), (DraftStatus(5000, 4000), True)])
async def test_drafts_that_are_not_taken_end(world: World, drafts: DraftStatus, stay: bool) -> None:
    await world.parts.configurator.change("smol", {"speculative": "auto"})
    await world.tuner.look()
    assert (await world.load()).ngram
    world.drafts = drafts
    await world.tuner.look()
    with contextlib.suppress(TimeoutError):
        await world.parts.scheduler.unload(all=True)
    assert (await world.load()).ngram is stay
    assert ("no drafts: 10% of 5000 were taken" in world.told()) is not stay


async def test_a_model_whose_estimate_fails_keeps_no_other_from_being_measured(world: World) -> None:
    add_model(world.parts.store, "other", 1)
    faulty, measured = world.parts.store.list()  # in the order in which they are measured
    for model in (faulty, measured):
        await world.parts.configurator.change(model.id, {"speculative": "auto"})
    required = world.backend.required_memory

    async def estimate(spec: RunSpec) -> RequiredMemory:
        if spec.model_id == faulty.id:
            raise KeyError("n_layers")
        return await required(spec)

    world.backend.required_memory = estimate  # type: ignore[method-assign]
    await world.tuner.look()
    assert world.told()[-1].startswith("faster with")


async def test_a_model_that_was_unloaded_was_asked_all_the_same(world: World) -> None:
    patient = Tuner(world.parts.setting_parts, world.tunings, world._told, idle=3600.0, rounds=1)
    await world.parts.configurator.change("smol", {"speculative": "auto"})
    await world.load()
    await world.parts.scheduler.unload(all=True)
    await patient.look()
    assert world.told() == []
