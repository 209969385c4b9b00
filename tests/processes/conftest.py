"""The loop that the daemon uses; for the process alone, which meets the loop most closely, plain asyncio's as well."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories = {"uvloop": uvloop.new_event_loop}
    return factories | ({"asyncio": asyncio.new_event_loop} if item.path.name == "test_process.py" else {})
