"""The scheduler with the runners that it makes by default: real processes of the fake engine."""

import asyncio
import platform
from pathlib import Path

import psutil
import pytest

from modelrunner.engine.localrunner import LocalRunner
from modelrunner.errors import BackingOff, EngineFailed
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.scheduler import Ledger, LocalHost, MemoryProbe, Scheduler, Target
from modelrunner.types import KeepAlive, RequiredMemory
from tests.fakes import FakeBackend, FakeTcpBackend, fake_key, fake_spec, of_code
from tests.waiting import HUNG

MIB = 1 << 20


def make(folder: Path, backend: FakeBackend) -> Scheduler:
    registry = BackendRegistry({backend.name: backend})
    host = LocalHost(registry, lambda: folder, folder / "logs", probe=MemoryProbe(100 * MIB))
    return Scheduler(registry, [host], ledger=Ledger(folder / "memory.json"))


def target(folder: Path, backend: FakeBackend, name: str, *flags: str) -> Target:
    spec = fake_spec(folder, *flags, name=name)
    return Target(fake_key(spec, backend), spec, KeepAlive(300))


@pytest.mark.parametrize("kind", [FakeBackend, FakeTcpBackend])
async def test_two_models_take_turns_under_a_budget_for_one(
    kind: type[FakeBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def not_measured(runner: LocalRunner) -> None:
        """So that the estimate stays, whatever Python needs on this machine."""

    monkeypatch.setattr(LocalRunner, "memory", not_measured)
    backend = kind(tmp_path, memory=RequiredMemory(64 * MIB))
    scheduler = make(tmp_path, backend)
    seen: set[int] = set()
    for name in ("one", "two", "one"):
        with await scheduler.acquire(target(tmp_path, backend, name)) as lease:
            assert (await lease.runner.upstream.fetch("GET", "/health", timeout=HUNG))[0] == 200
            assert [r.model_name for r in scheduler.runners()] == [f"docker.io/ai/{name}:latest"]
            assert str(scheduler.runners()[0].endpoint).startswith("http://" if backend.uses_tcp else "unix://")
            assert not [pid for pid in seen if psutil.pid_exists(pid)], "the one before is gone"
            assert lease.runner.process is not None
            seen.add(lease.runner.process.pid)
    assert len(seen) == backend.runs == 3
    await scheduler.close(0)
    assert scheduler.runners() == []


async def test_what_a_process_holds_is_measured_and_remembered(tmp_path: Path) -> None:
    backend = FakeBackend(tmp_path, memory=RequiredMemory(90 * MIB))
    scheduler = make(tmp_path, backend)
    wanted = target(tmp_path, backend, "one", "--allocate", "40")
    with await scheduler.acquire(wanted):
        async with asyncio.timeout(HUNG):
            while (measured := scheduler.runners()[0].memory.measured) is None:  # noqa: ASYNC110 - a thread measures
                await asyncio.sleep(0.01)
    assert 40 * MIB < measured.ram < 80 * MIB
    assert scheduler.memory().used.ram == measured.ram
    await scheduler.close(0)
    assert (
        await Ledger(tmp_path / "memory.json").required(backend, wanted.spec, platform.machine())
    ).ram >= measured.ram


@of_code("it explains the engine's words")
async def test_an_engine_that_cannot_start_says_why_to_all_and_rests(tmp_path: Path) -> None:
    backend = FakeBackend(tmp_path)
    scheduler = make(tmp_path, backend)
    wanted = target(tmp_path, backend, "one", "--crash", "fake::error: unknown architecture")
    errors = await asyncio.gather(*(scheduler.acquire(wanted) for _ in range(20)), return_exceptions=True)
    assert all(isinstance(e, EngineFailed) and "the fake engine threw up" in e.message for e in errors)
    with pytest.raises(BackingOff, match="threw up"):
        await scheduler.acquire(wanted)
    assert backend.runs == 1
    await scheduler.close(0)
