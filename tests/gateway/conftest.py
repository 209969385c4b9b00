"""The proxy is tested on the event loop that it is made for."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(params=["fast", "aiohttp"])
def kind(request: pytest.FixtureRequest) -> str:
    """The lane under test."""
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


# libuv opens two pipes for the whole process with its first loop: before any test looks at what is open.
uvloop.new_event_loop().close()
