"""The real faster-whisper, where the cache has it (scripts/install-engine whisper), with real models of the package
index, and sentences that espeak-ng speaks."""

import shutil
import subprocess
import sys
import wave
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import modelrunner_whisper
from modelrunner.config.locations import Locations
from modelrunner.errors import ModelRunnerError
from modelrunner.sdk import enginecache
from modelrunner.store import foreignformats
from modelrunner_piper.model import FORMAT as VOICE
from modelrunner_whisper.model import FORMAT
from tests.e2e.conftest import StartDaemon, make_daemon, no_process_left
from tests.e2e.daemons import Daemon
from tests.models.prepare import prepared_sound

__all__ = ["make_daemon", "no_process_left"]

# The modules that run in the engine's environment know each other by these names.
sys.path += [str(Path(str(module.__file__)).with_name("inside")) for module in (modelrunner_whisper, enginecache)]
SENTENCES = ("Please open the window and close the door.", "We will meet again on Monday morning.")
PAUSE = 1.0  # seconds between them
_QUIET = 300  # of 32,768
_WORDS_A_MINUTE = 150


class Speech(NamedTuple):
    """A file in which both sentences are said; `times` are their beginnings and ends in seconds."""

    file: Path
    times: list[tuple[float, float]]


@pytest.fixture(scope="session")
def known_format() -> Iterator[None]:
    """The store reads the formats of the backends, as it does in a daemon."""
    before = dict(foreignformats._formats)
    for format in (FORMAT, VOICE):
        foreignformats.register(format)
    yield
    foreignformats._formats.clear()
    foreignformats._formats.update(before)


def cached(name: str) -> Path:
    """The newest finished engine of this name in the cache. Skips the test without one."""
    cache = Locations.find().cache
    entries = [entry for entry in cache.glob(f"{name}-*") if enginecache.read_marker(entry) is not None]
    if not entries:
        pytest.skip(f"no {name} in {cache}: scripts/install-engine {name}")
    return max(entries, key=lambda entry: entry.stat().st_mtime)


@pytest.fixture(scope="session")
def installed() -> Path:
    return cached("whisper")


@pytest.fixture(scope="session")
def prepared(known_format: None) -> Path:
    """A data directory with the models."""
    try:
        return prepared_sound()
    except ModelRunnerError as error:
        pytest.skip(f"no models of sound: {error.message}")


@pytest.fixture(scope="module")
def daemon(make_daemon: StartDaemon, installed: Path) -> Daemon:
    """One for the tests of a module, on both listeners."""
    daemon = make_daemon(None)
    engines = daemon.data / "engines"
    engines.mkdir(exist_ok=True)
    (engines / "whisper").symlink_to(installed)
    daemon.start(listen="127.0.0.1:0", telemetry="true")
    return daemon


@pytest.fixture(scope="session")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    if shutil.which("espeak-ng") is None:
        pytest.skip("no espeak-ng: scripts/install-programs")
    file, times, samples, rate = tmp_path_factory.mktemp("speech") / "talk.wav", [], array("h"), 22050
    for sentence in SENTENCES:
        said = _said(sentence)
        if samples:
            samples.extend([0] * round(PAUSE * rate))
        times.append((len(samples) / rate, (len(samples) + len(said)) / rate))
        samples += said
    with wave.open(str(file), "wb") as written:
        written.setparams((1, 2, rate, len(samples), "NONE", ""))
        written.writeframes(samples.tobytes())
    return Speech(file, times)


def _said(sentence: str) -> "array[int]":
    """The samples of a sentence, without the silence around it."""
    command = ["espeak-ng", "-v", "en", "-s", str(_WORDS_A_MINUTE), "--stdout", sentence]
    data = subprocess.run(command, capture_output=True, check=True).stdout[44:]  # behind the header of WAV
    samples = array("h", data[: len(data) // 2 * 2])
    loud = [place for place, sample in enumerate(samples) if abs(sample) > _QUIET]
    return samples[loud[0] : loud[-1]]
