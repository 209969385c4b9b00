"""all-MiniLM-L6-v2, an encoder of 23 million parameters, as a GGUF file."""

import asyncio
from pathlib import Path

from modelrunner.pull import Puller
from modelrunner.store import Store
from tests.models import bert
from tests.models.prepare import MINILM_SAFETENSORS, ignore


def write_gguf(path: Path, scratch: Path) -> None:
    """Pulls the model into a store of its own in `scratch` and writes it to `path`."""
    store = Store(scratch / "minilm")
    asyncio.run(Puller(store).pull(MINILM_SAFETENSORS, ignore))
    bert.convert(store.bundle(MINILM_SAFETENSORS).directory, path)
