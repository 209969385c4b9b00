"""The real piper-tts under the contract that every backend keeps."""

from pathlib import Path

import pytest

from modelrunner.backend import BackendContext
from modelrunner.store import Store
from modelrunner.testing import BackendContract, running
from modelrunner.types import Mode, RunSpec
from modelrunner_piper import PiperBackend
from tests.models.prepare import PIPER
from tests.waiting import HUNG

pytestmark = pytest.mark.engine


@pytest.fixture
def backend(installed: Path, context: BackendContext) -> PiperBackend:
    (context.engines / "piper").symlink_to(installed)
    return PiperBackend(context)


@pytest.fixture
def spec(prepared: Path) -> RunSpec:
    bundle = Store(prepared).bundle(PIPER)
    return RunSpec(bundle.model_id, bundle, Mode("speech"), 4096, 2)


class TestPiper(BackendContract):
    """The fixtures of this module are what it takes."""

    async def test_the_estimate_of_a_load_is_near_what_is_measured(self, backend: PiperBackend, spec: RunSpec) -> None:
        """Without what requests take."""
        estimate = (await backend.required_memory(spec)).ram - backend.growth(spec).ram
        async with running(backend, spec, HUNG) as (runner, _):
            measured = await runner.memory()
        assert measured is not None
        assert measured.ram == pytest.approx(estimate, rel=0.35)
