from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from modelrunner.store import Store
from tests.pull.hub import Hub


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "data")


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with Hub().running() as hub:
        yield hub
