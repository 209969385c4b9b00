"""The real piper-tts, where the cache has it (scripts/install-engine piper), with a real voice of the package index."""

from pathlib import Path

import pytest

from tests.e2e.conftest import StartDaemon, make_daemon, no_process_left
from tests.e2e.daemons import Daemon
from tests.whisper.conftest import cached, known_format, prepared

__all__ = ["known_format", "make_daemon", "no_process_left", "prepared"]


@pytest.fixture(scope="session")
def installed() -> Path:
    return cached("piper")


@pytest.fixture(scope="module")
def daemon(make_daemon: StartDaemon, installed: Path) -> Daemon:
    """One for the tests of a module, on both listeners, that speaks and, where it can, hears."""
    daemon = make_daemon(None)
    engines = daemon.data / "engines"
    engines.mkdir(exist_ok=True)
    (engines / "piper").symlink_to(installed)
    (engines / "whisper").symlink_to(cached("whisper"))
    daemon.start(listen="127.0.0.1:0", telemetry="true")
    return daemon
