from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from modelrunner.engine.localrunner import LocalRunner
from tests.cluster.machines import Cluster


@pytest.fixture
def not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate stays, whatever Python needs on this machine."""

    async def nothing(runner: LocalRunner) -> None: ...

    monkeypatch.setattr(LocalRunner, "memory", nothing)


@pytest.fixture
async def cluster(tmp_path: Path, not_measured: None) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    await made.start()
    await made.ready()
    yield made
    await made.close()
