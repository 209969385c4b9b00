"""The real vLLM, where the cache has it (scripts/install-engine vllm), and models in safetensors."""

from collections.abc import Callable
from pathlib import Path

import pytest

from modelrunner.backend import BackendContext
from modelrunner.config.locations import Locations
from modelrunner.store import Store
from modelrunner.types import Bundle, Mode, RunSpec
from modelrunner_vllm import VllmBackend, engines
from tests.e2e.conftest import make_daemon, no_process_left, prepared
from tests.models.prepare import SMOLLM2_SAFETENSORS

__all__ = ["make_daemon", "no_process_left", "prepared"]


@pytest.fixture(scope="session")
def installed() -> Path:
    """The newest finished engine in the cache."""
    cache = Locations.find().cache
    entries = [entry for entry in cache.glob("vllm-c*-*") if engines.usable(entry)]
    if not entries:
        pytest.skip(f"no vLLM in {cache}: scripts/install-engine vllm")
    return max(entries, key=lambda entry: entry.stat().st_mtime)


@pytest.fixture
def backend(installed: Path, tmp_path: Path) -> VllmBackend:
    context = BackendContext(tmp_path / "engines", installed.parent, tmp_path / "logs", {})
    context.engines.mkdir()
    engines.link(context).symlink_to(installed)
    return VllmBackend(context)


@pytest.fixture(scope="session")
def bundle_of(prepared: Path) -> Callable[[str], Bundle]:
    return Store(prepared).bundle


@pytest.fixture
def spec(bundle_of: Callable[[str], Bundle], tmp_path: Path) -> RunSpec:
    bundle = bundle_of(SMOLLM2_SAFETENSORS)
    return RunSpec(bundle.model_id, bundle, Mode.COMPLETION, 512, 4)
