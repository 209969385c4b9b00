"""The contract, kept by the two backends of the test suite."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from modelrunner import testing
from modelrunner.backend import BackendStatus
from modelrunner.errors import BackendFaulty
from modelrunner.testing import BackendContract
from modelrunner.types import RequiredMemory, RunSpec
from tests.fakes import FakeBackend, FakeTcpBackend, fake_spec


class TestFakeBackend(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path):
        return FakeBackend(tmp_path)

    @pytest.fixture
    def spec(self, tmp_path):
        return fake_spec(tmp_path)


class TestFakeTcpBackend(TestFakeBackend):
    @pytest.fixture
    def backend(self, tmp_path):
        return FakeTcpBackend(tmp_path)


class Faulty(FakeBackend):
    """A plug-in that breaks its contract in the way of `fault`."""

    fault = ""

    def status(self) -> BackendStatus:
        if self.fault == "status raises":
            raise RuntimeError("no status today")
        return super().status()

    async def disk_usage(self) -> int:
        if self.fault == "disk usage raises":
            raise RuntimeError("no figure today")
        return await super().disk_usage()

    async def required_memory(self, spec: RunSpec) -> Any:
        match self.fault:
            case "nothing":
                return None
            case "negative":
                return RequiredMemory(-5_000_000_000)
            case "a float":
                return RequiredMemory(1.5e9)  # type: ignore[arg-type]
            case "hangs":
                await asyncio.Event().wait()
            case "blocks":
                released.wait(600)
        return await super().required_memory(spec)


released = threading.Event()
FAULTS = ["status raises", "disk usage raises", "nothing", "negative", "a float", "hangs", "blocks"]


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_contract_finds_a_faulty_plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(testing, "WORK_LIMIT", 0.2)
    backend = Faulty(tmp_path)
    backend.fault = fault
    released.clear()
    try:
        with pytest.raises((BackendFaulty, AssertionError, TimeoutError)):
            await BackendContract().test_each_call_gives_in_time_what_it_promises(backend, fake_spec(tmp_path))
    finally:
        released.set()
