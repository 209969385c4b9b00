"""The real faster-whisper under the contract that every backend keeps."""

from pathlib import Path

import pytest

from modelrunner.backend import BackendContext
from modelrunner.store import Store
from modelrunner.testing import BackendContract, running
from modelrunner.types import Mode, RunSpec
from modelrunner_whisper import WhisperBackend
from tests.models.prepare import WHISPER
from tests.waiting import HUNG

pytestmark = pytest.mark.engine


@pytest.fixture
def backend(installed: Path, context: BackendContext) -> WhisperBackend:
    return _backend(installed, context)


def _backend(installed: Path, context: BackendContext) -> WhisperBackend:
    (context.engines / "whisper").symlink_to(installed)
    return WhisperBackend(context)


@pytest.fixture
def spec(prepared: Path) -> RunSpec:
    bundle = Store(prepared).bundle(WHISPER)
    return RunSpec(bundle.model_id, bundle, Mode("transcription"), 1500, 2)


class TestWhisper(BackendContract):
    """The fixtures of this module are what it takes."""

    async def test_the_estimate_of_a_load_is_near_what_is_measured(
        self, backend: WhisperBackend, spec: RunSpec
    ) -> None:
        """Without what requests take."""
        estimate = (await backend.required_memory(spec)).ram - backend.growth(spec).ram
        async with running(backend, spec, HUNG) as (runner, _):
            measured = await runner.memory()
        assert measured is not None
        assert measured.ram == pytest.approx(estimate, rel=0.25)
