"""Clients as their users install them, against a daemon with the real llama.cpp."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import SMOLLM2, StartDaemon, make_daemon, no_process_left, nothing_left, prepared
from tests.e2e.daemons import Daemon, until
from tests.models.prompts import TOOLS

__all__ = ["make_daemon", "no_process_left", "nothing_left", "prepared"]

StopsTheEngine = Callable[[], AbstractContextManager[None]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="module")
def daemon(make_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    """One for the tests of a module, on both listeners. Its SmolLM2 has a chat template with tools."""
    daemon = make_daemon()
    daemon.start(listen="127.0.0.1:0", telemetry="true")
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TOOLS)
    given = daemon.run("configure", SMOLLM2, "--chat-template", str(template))
    assert given.returncode == 0, given.stderr
    return daemon


@pytest.fixture
def base(daemon: Daemon) -> str:
    """The daemon's address on TCP."""
    found: str = daemon.get("/version").json()["listen"]
    return found


@pytest.fixture
def stops_the_engine(daemon: Daemon) -> StopsTheEngine:
    """A block in which a client leaves one stream: the daemon saw it leave (499), and the engine works no more."""

    def left() -> int:
        return len(daemon.get("/engines/requests?status=499").json())

    @contextmanager
    def block() -> Iterator[None]:
        before = left()
        yield
        until(lambda: left() == before + 1)
        until(lambda: not any(runner["in_use"] for runner in daemon.runners()))

    return block
