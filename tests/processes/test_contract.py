"""The contract, kept by the two backends of the test suite."""

from pathlib import Path

import pytest

from modelrunner import testing
from modelrunner.errors import BackendFaulty
from modelrunner.testing import BackendContract
from tests.fakes import FakeBackend, FakeTcpBackend, fake_spec
from tests.plugins.rogue import FAULTS, Rogue, released


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


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_contract_finds_a_faulty_plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(testing, "WORK_LIMIT", 0.2)
    monkeypatch.setattr(testing, "CALL_LIMIT", 0.2)
    backend = Rogue(tmp_path)
    backend.fault = fault
    released.clear()
    try:
        with pytest.raises((BackendFaulty, AssertionError, TimeoutError)):
            await BackendContract().test_each_call_gives_in_time_what_it_promises(backend, fake_spec(tmp_path))
    finally:
        released.set()
