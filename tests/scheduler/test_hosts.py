"""Runners on another host: where a plan puts them, then real engines there that are reached by its interface alone."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from modelrunner.config.modelconfig import ModelConfiguration
from modelrunner.engine.localrunner import LocalRunner
from modelrunner.engine.receivers import Collector
from modelrunner.errors import BadRequest, EngineFailed, ModelNotFound
from modelrunner.models.runspecs import values_of
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.scheduler import Lease, LocalHost, MemoryProbe, Scheduler, Target
from modelrunner.types import KeepAlive, Mode, RequiredMemory, RunnerKey, RunSpec
from tests.fakes import FakeBackend
from tests.gateway.fakes import until
from tests.scheduler.hosts import Files, HostedRunner, SecondHost
from tests.store.samples import add_model
from tests.waiting import HUNG

MIB = 1 << 20
MODEL = 64 * MIB


class Pair:
    """This machine, and a host named b. Each has room for one model, or this one for none."""

    def __init__(self, folder: Path, here: int = 100 * MIB) -> None:
        self.folder = folder
        self.backend = FakeBackend(folder, memory=RequiredMemory(MODEL))
        self.files = Files(folder / "a")
        registry = BackendRegistry({"fake": self.backend})
        (folder / "a/run").mkdir()
        self.here = LocalHost(registry, lambda: folder / "a/run", folder / "a/logs", probe=MemoryProbe(here))
        self.b = SecondHost("b", folder / "b", registry, 100 * MIB)
        self.scheduler = Scheduler(registry, [self.here, self.b])

    def target(self, name: str, *flags: str) -> Target:
        if name not in (names := {ref for model in self.files.store.list() for ref in model.tags}):
            add_model(self.files.store, name, seed=len(names))
        bundle = self.files.store.bundle(name)
        key = RunnerKey("fake", bundle.model_id, Mode.COMPLETION)
        spec, api = self.files.specs.make(self.backend, bundle, ModelConfiguration(runtime_flags=flags), key.mode)
        return Target(key, spec, KeepAlive(300), api=api)

    async def lease(self, name: str) -> Lease:
        async with asyncio.timeout(HUNG):
            return await self.scheduler.acquire(self.target(name))


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    async def not_measured(runner: LocalRunner) -> None:
        """So that the estimate stays, whatever Python needs on this machine."""

    monkeypatch.setattr(LocalRunner, "memory", not_measured)
    pair = Pair(tmp_path)
    yield pair
    await pair.scheduler.close(0)
    assert not pair.b.open
    assert not list((tmp_path / "b/run").iterdir()), "nothing is left there"


@pytest.fixture
async def too_small(tmp_path: Path, pair: Pair) -> Pair:
    """With a machine here that has room for no model."""
    pair.here._probe.set_limits(10 * MIB, None)
    return pair


async def health(lease: Lease) -> int:
    return (await lease.runner.upstream.fetch("GET", "/health", timeout=HUNG))[0]


def pid_of(lease: Lease) -> int:
    assert lease.runner.process is not None
    return lease.runner.process.pid


async def test_a_model_that_fits_only_there_runs_there(too_small: Pair) -> None:
    pair = too_small
    with await pair.lease("one") as lease:
        assert await health(lease) == 200
        assert isinstance(lease.runner, HostedRunner)
        there = lease.runner.there
        assert there.spec.bundle.directory.is_relative_to(pair.folder / "b"), "its own copy of the files"
        assert replace(there.spec, bundle=lease.runner.spec.bundle) == lease.runner.spec, "the same values"
        with pytest.raises(OSError, match="without an answer"):
            await type(lease.runner.upstream)(replace(lease.runner.upstream.endpoint, headers=())).fetch(
                "GET", "/health", timeout=HUNG
            )
        log = b"".join([piece async for piece in pair.scheduler.log(lease.runner.id, None, None)])
        assert log == next((pair.folder / "b/logs").iterdir()).read_bytes() != b""
        assert not (pair.folder / "a/logs").exists()
    forecast = await pair.scheduler.diagnostics.fit(pair.target("two"))
    assert forecast.reason == "two fits on b once one is evicted"
    budget = pair.b.budget(())
    assert budget is not None
    assert (forecast.figures.budget.ram, forecast.figures.free.ram) == (budget.ram, budget.ram - MODEL)
    assert pair.scheduler.memory().used.ram == 0, "of this machine"


async def test_a_model_is_evicted_there_for_another(too_small: Pair) -> None:
    with await too_small.lease("one") as first:
        process = psutil.Process(pid_of(first))
    with await too_small.lease("two") as second:
        assert await health(second) == 200
        assert not process.is_running()
    assert [runner.model_name for runner in too_small.scheduler.runners()] == ["two"]


async def test_both_hosts_serve_without_a_switch(pair: Pair) -> None:
    for _ in range(3):
        for name in ("one", "two"):
            with await pair.lease(name) as lease:
                assert await health(lease) == 200
                assert isinstance(lease.runner, HostedRunner) is (name == "two")
    assert pair.backend.runs == 2


async def test_an_engine_that_crashes_there_is_explained_and_started_again(too_small: Pair) -> None:
    with await too_small.lease("one") as lease:
        os.kill(pid_of(lease), signal.SIGKILL)
        assert await lease.engine_ended(HUNG)
        assert "signal 9" in str(lease.runner.failure)
    with await too_small.lease("one") as lease:
        assert await health(lease) == 200
    assert too_small.backend.runs == 2


async def test_a_client_that_leaves_frees_its_place_there(too_small: Pair) -> None:
    lease, freed = await too_small.lease("one"), asyncio.Event()
    pool = lease.runner.upstream
    body = b'{"model": "one", "prompt": "x", "stream": true, "max_tokens": 1000000}'
    connection = pool.send(pool.request("POST", "/v1/completions", body), Collector())
    await until(lambda: connection.answered)
    lease.abandon(connection, freed.set)
    async with asyncio.timeout(HUNG):
        await freed.wait()
    await until(lambda: too_small.b.open == 0)
    assert not lease.slot.leases


async def test_a_host_that_vanishes_is_done_without(pair: Pair) -> None:
    first = await pair.lease("one")
    second = await pair.lease("two")
    assert isinstance(second.runner, HostedRunner)
    pair.b.gone.set()
    with pytest.raises(EngineFailed, match="its logs cannot be read"):
        pair.scheduler.log(second.runner.id, None, None)
    async with asyncio.timeout(HUNG):
        assert await second.engine_ended(HUNG)
    assert str(second.runner.failure) == "the host b does not answer any more, and its engines are lost"
    second.release()
    waiting = asyncio.create_task(pair.lease("two"))
    await until(lambda: pair.scheduler.waiting() != {})
    first.release()
    with await waiting as lease:
        assert isinstance(lease.runner, LocalRunner), "the plan goes on with the other"
        assert await health(lease) == 200


async def test_a_start_that_fails_there_is_answered_with_its_reason(too_small: Pair) -> None:
    target = too_small.target("one", "--crash", "fake::error: unknown architecture")
    with pytest.raises(EngineFailed, match="the fake engine threw up"):
        await too_small.scheduler.acquire(target)


def test_a_run_of_another_host_needs_its_files_here(tmp_path: Path, pair: Pair) -> None:
    sent = values_of(pair.target("one").spec)
    assert str(tmp_path).encode() not in sent, "no path"
    with pytest.raises(ModelNotFound):
        Files(tmp_path / "c").specs.opened(sent)
    with pytest.raises(BadRequest, match="no run"):
        pair.files.specs.opened(b'{"model_id": 1}')


async def test_hosts_that_change_all_the_time_are_looked_at_now_and_then(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the backend is asked once about those that are alike."""
    asked = 0
    required = pair.backend.required_memory

    async def counted(spec: RunSpec) -> RequiredMemory:
        nonlocal asked
        asked += 1
        return await required(spec)

    monkeypatch.setattr(pair.backend, "required_memory", counted)
    first, second = await pair.lease("first"), await pair.lease("second")
    assert asked == 2
    waiting = asyncio.create_task(pair.lease("third"))
    await until(lambda: asked == 3)
    for _ in range(200):
        pair.scheduler.hosts_changed()
        await asyncio.sleep(0)
    assert 3 < asked < 100
    first.release()
    (await waiting).release()
    second.release()


async def test_a_slow_estimate_of_one_model_delays_no_other(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first one, nor a later one; and what changes meanwhile has it made again."""
    asked: list[str] = []
    gate = asyncio.Event()
    slow, quick = pair.target("slow").model_id, pair.target("quick").model_id
    required = pair.backend.required_memory

    async def counted(spec: RunSpec) -> RequiredMemory:
        asked.append(spec.model_id)
        if spec.model_id == slow:
            await gate.wait()
        return await required(spec)

    monkeypatch.setattr(pair.backend, "required_memory", counted)
    leases = [await pair.lease("first"), await pair.lease("second")]
    waiting = [asyncio.create_task(pair.lease(name)) for name in ("slow", "quick")]
    await until(lambda: {slow, quick} <= set(asked))
    pair.scheduler.hosts_changed()
    await until(lambda: asked.count(quick) == 2)
    pair.scheduler.hosts_changed()
    await until(lambda: asked.count(quick) == 3)
    assert asked.count(slow) == 1
    gate.set()
    await until(lambda: asked.count(slow) == 2)
    for lease in leases:
        lease.release()
    for task in waiting:
        (await task).release()
