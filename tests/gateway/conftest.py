"""The proxy is tested on the event loop that it is made for."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


_OVER_TLS = (
    *(
        "test_dialects",
        "test_engine_faults",
        "test_flow",
        "test_lanes",
        "test_leaving",
        "test_limits",
        "test_observers",
        "test_request_limits",
    ),
    "test_inference_head",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`kind` is the lane under test: inference; inference after something else on the same connection; over TLS.
    A test with kinds of its own keeps them."""
    own = [mark for mark in metafunc.definition.iter_markers("parametrize") if "kind" in mark.args[0]]
    if "kind" in metafunc.fixturenames and not own:
        over_tls = metafunc.module.__name__.rpartition(".")[2] in _OVER_TLS
        metafunc.parametrize("kind", ["fast", "aiohttp", "tls"] if over_tls else ["fast", "aiohttp"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


# libuv opens two pipes for the whole process with its first loop: before any test looks at what is open.
uvloop.new_event_loop().close()
