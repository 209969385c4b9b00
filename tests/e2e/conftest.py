"""Daemons with real engines and real models. Models are made once for each machine, in the cache."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from modelrunner.backend import BackendContext
from modelrunner.config.locations import Locations
from modelrunner_llamacpp import engines
from modelrunner_llamacpp.engines import EngineKind
from tests.conftest import living_children
from tests.e2e.daemons import Daemon, environment
from tests.models import prepare
from tests.models.prepare import GEMMA3, MINILM, PREPARED, SMOLLM2

__all__ = ["GEMMA3", "MINILM", "PREPARED", "SMOLLM2"]
ENGINES = ["wheel", pytest.param("native", marks=pytest.mark.nightly)]

_NOT_MODELS = shutil.ignore_patterns("daemon.lock", "logs", "state")

StartDaemon = Callable[..., Daemon]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


def cached_engine(kind: EngineKind, *, vulkan: bool = False) -> Path:
    """The newest finished engine of a kind in the cache; a native one is for Vulkan, or it is not. Skips the test
    without one."""
    cache = Locations.find().cache
    found = {entry: engines.usable(entry, kind) for entry in cache.glob("llama.cpp-*")}
    entries = [entry for entry, engine in found.items() if engine and (engine.variant == "vulkan") is vulkan]
    if not entries:
        build = " --variant vulkan" if vulkan else " --build" if kind is EngineKind.NATIVE else ""
        pytest.skip(f"no {kind} engine in {cache}: scripts/install-engine{build}")
    return max(entries, key=lambda entry: entry.stat().st_mtime)


@pytest.fixture(scope="session")
def prepared() -> Path:
    """A data directory with the models, in the cache."""
    return prepare.prepared()


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Every engine that is there: from its wheel, and compiled."""
    cached_engine(EngineKind(request.param))
    return str(request.param)


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
                kind, place = EngineKind(engine), home / "data" / "engines"
                place.mkdir(parents=True, exist_ok=True)
                context = BackendContext(place, Locations.find().cache, home / "logs", {})
                engines.link(context, kind).symlink_to(cached_engine(kind))
            return daemon

        yield make


@pytest.fixture(scope="module")
def daemon(make_daemon: StartDaemon, engine: str) -> Daemon:
    """One for the tests of a module, on both listeners, for each engine."""
    daemon = make_daemon(engine)
    daemon.start(listen="127.0.0.1:0")
    return daemon
