"""The operations below the routes, as another front end drives them: without a listener, a request or a wire struct."""

import asyncio
from pathlib import Path

import pytest

from modelrunner.daemon.logs import engine_log
from modelrunner.daemon.parts import Parts, build, make_reloader
from modelrunner.errors import ModelNotFound
from modelrunner.gateway.access import Access
from modelrunner.gateway.request.pipeline import Pipeline
from modelrunner.http.limits import Limits
from modelrunner.models.abilities import Abilities
from modelrunner.models.health import HealthVerdict
from modelrunner.models.orders import PullOrder
from modelrunner.models.reload import Effect
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.progress import WorkProgress
from modelrunner.pull import PullResult
from modelrunner.scheduler import Fitting, HealthState, Phase
from modelrunner.store import RemoveResult
from modelrunner.telemetry.accesslog import AccessLog
from modelrunner.types import Mode
from tests.api.conftest import make_settings
from tests.fakes import FakeBackend
from tests.store.samples import write_gguf


class Another(FakeBackend):
    """Comes first by its name, and not by its priority."""

    name = "another"

    def priority(self, bundle: object) -> float:
        return -1.0


def parts(folder: Path) -> Parts:
    settings = make_settings(folder)
    settings.data_dir.mkdir(exist_ok=True)
    settings.runtime_dir.mkdir(mode=0o700, exist_ok=True)
    backends = [Another(folder), FakeBackend(folder)]
    return build(settings, BackendRegistry({backend.name: backend for backend in backends}))


async def package(made: Parts, folder: Path, name: str) -> PullResult:
    file = folder / "model.gguf"
    write_gguf(file)
    steps: list[WorkProgress] = []
    pulled = await made.library.pull(PullOrder(file.as_uri(), name), steps.append)
    assert {step.phase for step in steps} >= {"copying", "storing"}
    return pulled


async def test_a_models_whole_life(tmp_path: Path) -> None:
    made = parts(tmp_path)
    pulled = await package(made, tmp_path, "smol")
    assert (await package(made, tmp_path, "mine")).name == "mine"
    (model,) = made.library
    assert model.size > (tmp_path / "model.gguf").stat().st_size  # bytes, with its configuration
    assert (model.id, model.tags) == (pulled.id, ["smol", "mine"])
    assert await made.library.listed([model]) == [(model, Abilities("fake", 2048, ("completion",)))]

    shown = await made.configurator.change("mine", {"context-size": 512})
    assert shown.effective is not None
    assert (shown.effective["context-size"], shown.revision) == (512, 1)
    assert (await made.explainer.fit("mine")).forecast.fits is Fitting.NOW
    with pytest.raises(ModelNotFound):
        engine_log(tmp_path / "data_dir" / "logs", model.id)
    assert await made.preloader.load("mine") == "smol"
    (runner,) = made.scheduler.runners()
    assert (runner.state, runner.context_size, runner.keep_alive.seconds) == (Phase.READY, 512, 300.0)
    assert (runner.last_used or 0) - runner.started_at >= 0
    (ready,) = [event for event in made.scheduler.events.recent() if event.event == "ready"]
    assert runner.started_at <= ready.time

    log = engine_log(tmp_path / "data_dir" / "logs", model.id)
    assert b"".join([piece async for piece in made.scheduler.log(runner.id, None, None)]) == log.read_bytes() != b""
    assert made.health_check.health() is HealthState.READY
    assert await made.health_check.verdict() == HealthVerdict(HealthState.READY, is_ready=True, reason="")
    unreachable = await made.health_check.verdict(trouble="the socket is gone")
    assert unreachable == HealthVerdict(HealthState.ERROR, is_ready=False, reason="the socket is gone")
    ending = await made.health_check.verdict(ending=True)
    assert (ending.health, ending.is_ready) == (HealthState.SHUTTING_DOWN, False)

    assert (await made.residency.pin("mine", pin=True)).state == "ready"
    assert made.scheduler.runners()[0].pinned
    assert (await made.residency.pause("mine")).state == "stopped"
    assert (await made.explainer.why("mine")).waiting_for == "resume"
    made.residency.resume("mine")
    assert (await made.disk.usage()).models[0].size == model.size

    assert await made.library.remove("mine") == RemoveResult(("mine",))
    assert await made.library.remove("smol") == RemoveResult(("smol",), model.id)
    with pytest.raises(ModelNotFound):
        made.library.get("smol")
    assert list(made.configurations.settings) == []
    await made.scheduler.close(0.0)


async def test_downloads_are_bounded_while_somebody_waits_for_an_answer(tmp_path: Path) -> None:
    made = parts(tmp_path)
    await package(made, tmp_path, "smol")
    limits = [made.transfers.limit]
    with await made.scheduler.acquire(made.resolver(None, "smol", Mode.COMPLETION)):
        limits.append(made.transfers.limit)
    limits.append(made.transfers.limit)
    assert [limit is None for limit in limits] == [True, False, True]
    await made.scheduler.close(0.0)


async def test_two_changes_at_once_never_share_a_revision(tmp_path: Path) -> None:
    made = parts(tmp_path)
    await package(made, tmp_path, "smol")
    change = made.configurator.change
    changes = [change("smol", {"context-size": 512 + n}) for n in range(4)]
    done = await asyncio.gather(*changes, return_exceptions=True)
    revisions = [shown.revision for shown in done if not isinstance(shown, BaseException)]
    assert revisions, done
    later = await change("smol", {"context-size": 1024})
    assert later.revision not in revisions
    assert later.revision > max(revisions)
    await made.scheduler.close(0.0)


async def test_what_a_reload_would_do_is_a_value(tmp_path: Path) -> None:
    made = parts(tmp_path)
    await package(made, tmp_path, "smol")
    pipeline = Pipeline(made.on_demand, made.scheduler, Access([]), Limits())
    access_log = AccessLog(tmp_path / "access.log", pipeline.observers)
    reloader = make_reloader(make_settings(tmp_path), made, pipeline, access_log, 0)
    (tmp_path / "config.toml").write_text("max_queue = 3\n[models.smol]\nparallel = 2")
    of_daemon, of_model = await reloader.reload(dry_run=True)
    assert (of_daemon.name, of_daemon.after, of_daemon.effect) == ("max_queue", 3, Effect.AT_ONCE)
    assert (of_model.name, of_model.before, of_model.after) == ("smol", {}, {"parallel": 2})
    assert of_model.effect is Effect.NEXT_LOAD
    assert made.configurations.settings.of(made.library.get("smol").id).parallel is None
    await reloader.reload()
    assert made.configurations.settings.of(made.library.get("smol").id).parallel == 2
    await made.scheduler.close(0.0)
