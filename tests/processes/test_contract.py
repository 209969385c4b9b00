"""The contract, kept by the two backends of the test suite."""

import pytest

from modelrunner.testing import BackendContract
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
