"""The real engines that are here, and the starter model."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from modelrunner.backend import BackendContext
from modelrunner.config.locations import Locations
from modelrunner.store import Store
from modelrunner.types import Bundle
from modelrunner_llamacpp import LlamaCppBackend, engines
from modelrunner_llamacpp.engines import EngineKind
from tests.e2e.conftest import GEMMA3, SMOLLM2, cached_engine, prepared
from tests.models import bert, tiny

__all__ = ["prepared"]


@pytest.fixture(scope="session")
def models(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    data = tmp_path_factory.mktemp("models") / "data"
    shutil.copytree(prepared, data, copy_function=os.link)
    return Store(data)


@pytest.fixture(scope="session")
def smollm2(models: Store) -> Bundle:
    return models.bundle(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3(models: Store) -> Bundle:
    return models.bundle(GEMMA3)


def _cached(context: BackendContext, kind: EngineKind) -> dict[str, Any]:
    engines.link(context, kind).symlink_to(cached_engine(kind))
    return {}


def _explicit(context: BackendContext) -> dict[str, Any]:
    named = os.environ.get("MODELRUNNER_LLAMA_SERVER") or shutil.which("llama-server")
    if named is None:
        pytest.skip("no llama-server on PATH or in MODELRUNNER_LLAMA_SERVER")
    return {"llama_server": named}


def llama_cpp_python() -> Path:
    """The Python with llama-cpp-python's server. Skips the test without it."""
    folder = Locations.find().cache / f"clients/pypi-{engines.SOURCE}-{engines.SOURCE_VERSION}"
    if not (folder / "ready").exists():
        pytest.skip(f"no {folder}: scripts/install-clients")
    return folder / "bin/python"


_HOW: dict[str, Callable[[BackendContext], dict[str, Any]]] = {
    "wheel": lambda context: _cached(context, EngineKind.WHEEL),
    "native": lambda context: _cached(context, EngineKind.NATIVE),
    "llama-server": _explicit,
    "llama-cpp-python": lambda context: {"python": str(llama_cpp_python())},
}


_ENGINES = [kind if kind == "wheel" else pytest.param(kind, marks=pytest.mark.nightly) for kind in _HOW]


@pytest.fixture(scope="module", params=_ENGINES)
def real_backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCppBackend]:
    """Every engine that is there, in turn. One on PATH is hidden from the others, which it would come before."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "engines").mkdir()
    context = BackendContext(folder / "engines", Locations.find().cache, folder / "logs", {})
    settings = _HOW[request.param](context)
    path = [entry for entry in os.environ["PATH"].split(os.pathsep) if not Path(entry, "llama-server").exists()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.pathsep.join(path))
        yield LlamaCppBackend(BackendContext(context.engines, context.cache, context.logs, settings))


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Bundle]:
    """An encoder for embeddings, or one that reranks, laid out by the store."""
    folder = tmp_path_factory.mktemp("encoders")
    store = Store(folder / "data")

    def make(reranks: bool) -> Bundle:
        file = store.partial / f"bert-{reranks}.gguf"
        bert.convert(tiny.write(folder / f"bert-{reranks}", reranks=reranks), file)
        name = f"test/bert-{'rerank' if reranks else 'embed'}"
        store.create({"model.gguf": store.ingest(file)}, name)
        return store.bundle(name)

    return make
