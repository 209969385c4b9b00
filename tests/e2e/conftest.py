"""Daemons with real engines and real models. Models are made once for each machine, in the cache."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from modelrunner.config.locations import Locations
from tests.conftest import living_children
from tests.e2e.daemons import Daemon, environment
from tests.models import prepare
from tests.models.prepare import GEMMA3, MINILM, PREPARED, SMOLLM2

__all__ = ["GEMMA3", "MINILM", "PREPARED", "SMOLLM2"]
BUILDS = {"wheel": [], "native": ["--build"]}
ENGINES = ["wheel", pytest.param("native", marks=pytest.mark.nightly)]

_NOT_MODELS = shutil.ignore_patterns("daemon.lock", "logs", "state")

StartDaemon = Callable[..., Daemon]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def prepared() -> Path:
    """A data directory with the models, in the cache."""
    return prepare.prepared()


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Every engine that is there: from its wheel, and compiled."""
    kind: str = request.param
    cache = Locations.find().cache
    if not list(cache.glob(f"llama.cpp-{kind}-*/engine.json")):
        pytest.skip(f"no {kind} engine in {cache}: scripts/install-engine {' '.join(BUILDS[kind])}")
    return kind


@pytest.fixture(scope="session")
def no_process_left() -> Iterator[None]:
    """Daemons serve several tests, and their engines come and go: after the last daemon there is no child."""
    before = living_children()
    yield
    left = {pid: what for pid, what in living_children().items() if pid not in before}
    assert not left


@pytest.fixture(autouse=True)
def nothing_left(no_process_left: None) -> None:
    """Instead of the check after every test, for these."""


@pytest.fixture(scope="module")
def make_daemon(no_process_left: None, prepared: Path) -> Iterator[Callable[..., Daemon]]:
    """Makes daemons (not started) with the models, and an engine unless `engine` is None; all end with the module."""
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="e2e")))
        made: list[Daemon] = []

        def make(engine: str | None = "wheel", *, models: bool = True) -> Daemon:
            home = folder / str(len(made))
            home.mkdir()
            if models:  # names of the same files: nothing in a store is ever changed in place
                shutil.copytree(prepared, home / "data", copy_function=os.link, ignore=_NOT_MODELS)
            daemon = Daemon(home / "data", home / "run" / "modelrunner.sock", environment(home / "data", home / "run"))
            made.append(daemon)
            ends.callback(daemon.stop)
            if engine is not None:
                installed = daemon.run("install", "llama.cpp", *BUILDS[engine])
                assert installed.returncode == 0, installed.stderr
                assert daemon.run("shutdown").returncode == 0
            return daemon

        yield make


@pytest.fixture(scope="module")
def daemon(make_daemon: StartDaemon, engine: str) -> Daemon:
    """One for the tests of a module, on both listeners, for each engine."""
    daemon = make_daemon(engine)
    daemon.start(listen="127.0.0.1:0")
    return daemon
