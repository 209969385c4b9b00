"""The test models that were converted to GGUF, against what numpy makes of the original weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modelrunner.store import Store
from modelrunner.types import Bundle, Mode, RunSpec
from modelrunner_llamacpp import LlamaCppBackend
from tests.llamacpp.test_real import ask, own_server, serving
from tests.models.oracle import Bert
from tests.models.prepare import MINILM, MINILM_SAFETENSORS, RERANKER, RERANKER_SAFETENSORS

__all__ = ["own_server"]
pytestmark = pytest.mark.engine


@pytest.fixture
def backend(real_backend: LlamaCppBackend) -> LlamaCppBackend:
    return real_backend


def spec(bundle: Bundle, mode: Mode, folder: Path) -> RunSpec:
    return RunSpec(bundle.model_id, bundle, mode, 256, 1)


async def test_embeddings(backend: LlamaCppBackend, models: Store, tmp_path: Path, own_server: None) -> None:
    texts = ["the capital of france is paris", "unbelievable tokenization of words"]
    oracle = Bert(models.bundle(MINILM_SAFETENSORS).directory)
    run = replace(spec(models.bundle(MINILM), Mode.EMBEDDING, tmp_path), parallel=2)
    async with serving(backend, run) as runner:
        _, answer = await ask(runner, "/v1/embeddings", input=texts)
    for text, entry in zip(texts, answer["data"], strict=True):
        assert np.dot(oracle.embed(text), entry["embedding"]) > 0.9999


async def test_scores(backend: LlamaCppBackend, models: Store, tmp_path: Path, own_server: None) -> None:
    documents = ["the cat", "dog", "word sleeps the dog"]
    oracle = Bert(models.bundle(RERANKER_SAFETENSORS).directory)
    async with serving(backend, spec(models.bundle(RERANKER), Mode.RERANKING, tmp_path)) as runner:
        _, answer = await ask(runner, "/v1/rerank", query="cat", documents=documents)
    scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert [scores[n] for n in range(3)] == pytest.approx([oracle.score("cat", d) for d in documents], abs=0.02)
