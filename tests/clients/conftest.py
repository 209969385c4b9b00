"""Clients as their users install them, against a daemon with the real llama.cpp."""

from pathlib import Path

import pytest

from tests.e2e.conftest import StartDaemon, make_daemon, no_process_left, nothing_left, prepared
from tests.e2e.daemons import Daemon

__all__ = ["make_daemon", "no_process_left", "nothing_left", "prepared"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="module")
def daemon(make_daemon: StartDaemon) -> Daemon:
    """One for the tests of a module, on both listeners."""
    daemon = make_daemon()
    daemon.start(listen="127.0.0.1:0")
    return daemon


@pytest.fixture
def base(daemon: Daemon) -> str:
    """The daemon's address on TCP."""
    found: str = daemon.get("/version").json()["listen"]
    return found
