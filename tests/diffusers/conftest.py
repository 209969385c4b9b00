"""The real diffusers, where the cache has it (scripts/install-engine diffusers), with a model of random weights that is
made here."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelrunner.sdk.packages import interpreter
from modelrunner.store import foreignformats
from modelrunner_diffusers.model import FORMAT
from tests.e2e.conftest import StartDaemon, make_daemon, no_process_left
from tests.e2e.daemons import Daemon
from tests.whisper.conftest import cached

__all__ = ["make_daemon", "no_process_left"]
_MAKER = Path(__file__).with_name("make_pipeline.py")


@pytest.fixture
def known_format() -> Iterator[None]:
    """The store reads the format of the backend, as it does in a daemon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(foreignformats._formats, FORMAT.format, FORMAT)
        yield


@pytest.fixture(scope="session")
def installed() -> Path:
    return cached("diffusers")


@pytest.fixture(scope="session")
def tiny(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of 110,000 random weights, which draws 64x64 pixels."""
    folder = tmp_path_factory.mktemp("pipeline")
    subprocess.run([interpreter(installed), _MAKER, folder], check=True, capture_output=True)
    return folder / "tiny"


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory without models."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def daemon(make_daemon: StartDaemon, installed: Path, tiny: Path) -> Daemon:
    """One for the tests of a module, on both listeners, with the model under the name `tiny`."""
    daemon = make_daemon(None)
    engines = daemon.data / "engines"
    engines.mkdir(exist_ok=True)
    (engines / "diffusers").symlink_to(installed)
    daemon.start(listen="127.0.0.1:0", telemetry="true")
    done = daemon.run("package", "--safetensors-dir", str(tiny), "tiny")
    assert done.returncode == 0, done.stderr
    return daemon
