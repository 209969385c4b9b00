"""The real diffusers under the contract that every backend keeps."""

import shutil
from pathlib import Path

import pytest

from modelrunner.backend import BackendContext
from modelrunner.store import Store
from modelrunner.testing import BackendContract, running
from modelrunner.types import Mode, RunSpec
from modelrunner_diffusers import DiffusersBackend
from tests.waiting import HUNG

pytestmark = pytest.mark.engine


@pytest.fixture
def backend(installed: Path, context: BackendContext) -> DiffusersBackend:
    (context.engines / "diffusers").symlink_to(installed)
    return DiffusersBackend(context)


@pytest.fixture
def spec(known_format: None, tiny: Path, tmp_path: Path) -> RunSpec:
    store, blobs = Store(tmp_path / "models"), {}
    for number, path in enumerate(each for each in tiny.rglob("*") if each.is_file()):
        copy = store.partial / str(number)
        shutil.copyfile(path, copy)
        blobs[str(path.relative_to(tiny))] = store.ingest(copy)
    bundle = store.bundle(store.create(blobs, "tiny").id)
    return RunSpec(bundle.model_id, bundle, Mode("image-generation"), 77, 1)


class TestDiffusers(BackendContract):
    """The fixtures of this module are what it takes."""

    async def test_the_estimate_of_a_load_is_near_what_is_measured(
        self, backend: DiffusersBackend, spec: RunSpec
    ) -> None:
        """Without what requests take."""
        estimate = (await backend.required_memory(spec)).ram - backend.growth(spec).ram
        async with running(backend, spec, HUNG) as (runner, _):
            measured = await runner.memory()
        assert measured is not None
        assert measured.ram == pytest.approx(estimate, rel=0.35)
