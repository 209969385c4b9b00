"""Every llama.cpp engine that is here, with a real model, run as the daemon runs it."""

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from modelrunner.engine.localrunner import LocalRunner
from modelrunner.engine.questions import work_done
from modelrunner.errors import BackendExited, BadRequest
from modelrunner.store import Store
from modelrunner.testing import BackendContract, running
from modelrunner.types import Adapter, Bundle, Mode, RunSpec
from modelrunner_llamacpp import LlamaCppBackend
from modelrunner_llamacpp.engines import limited_threads
from tests.models import lora, predicting, random_llama
from tests.models.prompts import MESSAGES, PARIS
from tests.waiting import HUNG

pytestmark = pytest.mark.engine


@pytest.fixture
def spec(smollm2: Bundle, tmp_path: Path) -> RunSpec:
    return RunSpec(smollm2.model_id, smollm2, Mode.COMPLETION, 512, 2)


@pytest.fixture
def backend(real_backend: LlamaCppBackend) -> LlamaCppBackend:
    return real_backend


@pytest.fixture
def own_server(backend: LlamaCppBackend) -> None:
    if "llama-cpp-python" in backend.version():
        pytest.skip("only llama.cpp's own server can do this")


class TestLlamaCpp(BackendContract):
    """The fixtures above are what it takes."""


@asynccontextmanager
async def serving(backend: LlamaCppBackend, spec: RunSpec, stop_grace: float = 5.0) -> AsyncIterator[LocalRunner]:
    async with running(backend, spec, 60, stop_grace=stop_grace) as (runner, _):
        yield runner


async def ask(runner: LocalRunner, path: str, **body: Any) -> tuple[int, Any]:
    status, answer = await runner.upstream.fetch("POST", path, json.dumps(body).encode(), timeout=HUNG)
    return status, json.loads(answer)


async def test_chat(backend: LlamaCppBackend, spec: RunSpec) -> None:
    async with serving(backend, spec) as runner:
        status, answer = await ask(runner, "/v1/chat/completions", messages=MESSAGES, temperature=0, max_tokens=16)
    assert status == 200
    assert PARIS in answer["choices"][0]["message"]["content"]


async def test_stream(backend: LlamaCppBackend, spec: RunSpec) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 16, "stream": True}
    async with serving(backend, spec) as runner:
        sent = json.dumps(body).encode()
        status, raw = await runner.upstream.fetch("POST", "/v1/chat/completions", sent, timeout=HUNG)
    events = [line.removeprefix("data: ") for line in raw.decode().splitlines() if line.startswith("data: ")]
    assert (status, events[-1]) == (200, "[DONE]")
    deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert len(deltas) > 3
    assert PARIS in "".join(delta.get("content") or "" for delta in deltas)


async def test_what_leaks_or_changes_the_engine_is_off(
    backend: LlamaCppBackend, spec: RunSpec, own_server: None
) -> None:
    async with serving(backend, spec) as runner:
        slots, _ = await runner.upstream.fetch("GET", "/slots", timeout=HUNG)
        props, _ = await ask(runner, "/props", x=1)
        page, _ = await runner.upstream.fetch("GET", "/", timeout=HUNG)
        metrics, text = await runner.upstream.fetch("GET", "/metrics", timeout=HUNG)
    assert slots >= 400
    assert props >= 400
    assert page == 404
    assert metrics == 200
    assert b"llamacpp:" in text


@pytest.mark.parametrize("own", ["", "7"])
async def test_its_threads_leave_the_processors_to_others(
    backend: LlamaCppBackend, spec: RunSpec, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless whoever started the daemon said how long they are to wait for each other."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if own:
        monkeypatch.setenv("GOMP_SPINCOUNT", own)
    async with serving(backend, spec) as runner:
        assert psutil.Process(runner.pid).environ()["GOMP_SPINCOUNT"] in ((own,) if own else ("300", "3000"))


async def test_each_core_has_a_thread_that_stays_there(
    backend: LlamaCppBackend, spec: RunSpec, own_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But threads that are fewer than the cores stay free: those of all engines would share the first ones. So do all
    where whoever started the daemon says so."""
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    if limited_threads() is not None:
        pytest.skip("the daemon may not use all cores of this machine")

    async def places(spec: RunSpec) -> set[frozenset[int]]:
        async with serving(backend, spec) as runner:
            assert (await ask(runner, "/v1/completions", prompt="Hello", max_tokens=4))[0] == 200
            return {frozenset(os.sched_getaffinity(thread.id)) for thread in psutil.Process(runner.pid).threads()}

    cores = psutil.cpu_count(logical=False) or 1
    assert min(cores, 2) <= len(await places(spec)) <= cores  # llama.cpp leaves the slow cores of some processors alone
    anywhere = {frozenset(os.sched_getaffinity(0))}
    assert await places(replace(spec, flags=("--threads", "1"))) == anywhere
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    assert await places(spec) == anywhere
    monkeypatch.delenv("OMP_PROC_BIND")
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0")
    assert await places(spec) == {frozenset({0})}


async def test_the_work_that_it_counts_grows(backend: LlamaCppBackend, spec: RunSpec, own_server: None) -> None:
    async with serving(backend, spec) as runner:
        before = await work_done(runner.endpoint, runner.api)
        await ask(runner, "/v1/completions", prompt="Hello", max_tokens=4)
        after = await work_done(runner.endpoint, runner.api)
    assert before is not None
    assert after is not None
    assert after >= before + 4


async def test_a_request_that_is_broken_off_frees_its_slot(
    backend: LlamaCppBackend, spec: RunSpec, own_server: None
) -> None:
    """With one slot and a generation without end, the next request is answered only if the first one was ended."""
    endless = {"prompt": "Once upon a time", "n_predict": -1, "ignore_eos": True, "stream": True}
    request = json.dumps(endless).encode()
    async with serving(backend, replace(spec, parallel=1, context_size=8192)) as runner:
        reader, writer = await asyncio.open_unix_connection(str(runner.endpoint.path))
        head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request)}\r\n\r\n"
        writer.write(head.encode() + request)
        await reader.readuntil(b"data: ")
        writer.close()
        async with asyncio.timeout(HUNG):
            status, _ = await ask(runner, "/v1/completions", prompt="Hello", max_tokens=1)
        assert status == 200


async def test_one_sequence_may_use_the_whole_context(
    backend: LlamaCppBackend, spec: RunSpec, own_server: None
) -> None:
    async with serving(backend, replace(spec, parallel=4)) as runner:
        fits, answer = await ask(runner, "/v1/completions", prompt=" word" * 450, max_tokens=1)
        too_long, error = await ask(runner, "/v1/completions", prompt=" word" * 600, max_tokens=1)
    assert (fits, answer["usage"]["prompt_tokens"]) == (200, 450)
    assert (too_long, error["error"]["type"]) == (400, "exceed_context_size_error")


async def test_embeddings_of_a_causal_model(backend: LlamaCppBackend, spec: RunSpec, own_server: None) -> None:
    """One vector for each text, longer than a batch too."""
    run = replace(spec, mode=Mode.EMBEDDING, context_size=512)
    texts = ["The cat sleeps.", "A cat is asleep.", " word" * 400]
    async with serving(backend, run) as runner:
        status, answer = await ask(runner, "/v1/embeddings", input=texts)
        too_long, error = await ask(runner, "/v1/embeddings", input=" word" * 800)
    assert status == 200
    vectors = [entry["embedding"] for entry in answer["data"]]
    assert all(math.isclose(sum(x * x for x in vector), 1, rel_tol=1e-3) for vector in vectors)
    near, far = (sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors[1:])
    assert near > far
    assert (too_long, error["error"]["type"]) == (400, "exceed_context_size_error")


async def test_embeddings_of_an_encoder_up_to_the_whole_context(
    backend: LlamaCppBackend, spec: RunSpec, tiny_bert: Callable[[bool], Bundle], own_server: None
) -> None:
    bundle = tiny_bert(False)
    run = replace(spec, bundle=bundle, mode=Mode.EMBEDDING, context_size=512, parallel=4)
    async with serving(backend, run) as runner:
        status, answer = await ask(runner, "/v1/embeddings", input=["the cat", "word " * 505])
        too_long, error = await ask(runner, "/v1/embeddings", input="word " * 600)
        chat, refused = await ask(runner, "/v1/chat/completions", messages=MESSAGES, max_tokens=1)
    assert status == 200
    assert answer["usage"]["prompt_tokens"] > 507
    # The proxy tells the client's faults among the engine's 500s by these words.
    assert (too_long, "too large to process" in error["error"]["message"]) == (500, True)
    assert (chat, "does not support logits" in refused["error"]["message"]) == (500, True)


async def test_reranking(
    backend: LlamaCppBackend, spec: RunSpec, tiny_bert: Callable[[bool], Bundle], own_server: None
) -> None:
    run = replace(spec, bundle=tiny_bert(True), mode=Mode.RERANKING)
    async with serving(backend, run) as runner:
        status, answer = await ask(runner, "/v1/rerank", query="cat", documents=["the cat", "dog", "word"])
    assert status == 200
    assert sorted(result["index"] for result in answer["results"]) == [0, 1, 2]


async def test_embeddings_need_their_mode(backend: LlamaCppBackend, spec: RunSpec, own_server: None) -> None:
    async with serving(backend, spec) as runner:
        status, answer = await ask(runner, "/v1/embeddings", input="Hello")
    assert status == 501
    assert "--embeddings" in answer["error"]["message"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--temp", "0.5", "--top-k", "20", "--seed", "-1", "--samplers", "top_k;temperature"),
        ("-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on", "-b", "256", "-ub", "128", "--no-mmap"),
        ("--no-warmup", "--swa-full", "--no-repack", "-ngl", "0", "-sm", "none", "--numa", "distribute"),
        ("--rope-scaling", "yarn", "--rope-scale", "2", "--yarn-orig-ctx", "8192", "--reasoning", "off"),
        ("--chat-template", "chatml", "--mirostat", "2", "--cache-ram", "16", "--no-context-shift", "-ts", "1,1"),
    ],
)
async def test_flags_are_taken_by_the_engine(
    backend: LlamaCppBackend, spec: RunSpec, flags: tuple[str, ...], own_server: None
) -> None:
    backend.check_flags(flags, spec.mode)
    async with serving(backend, replace(spec, flags=flags)) as runner:
        status, _ = await ask(runner, "/v1/completions", prompt="Hello", max_tokens=1)
    assert status == 200


async def test_the_models_own_heads_draft(backend: LlamaCppBackend, own_server: None, tmp_path: Path) -> None:
    """The answers are those of the model alone, and the memory is what is counted: the heads' cache of 16 MiB."""
    store = Store(tmp_path / "data")
    store.create({"model.gguf": store.ingest(predicting.write(store.partial / "model.gguf"))}, "test/predicting")
    bundle = store.bundle("test/predicting")
    plain = RunSpec(bundle.model_id, bundle, Mode.COMPLETION, 65_536, 1, ("--batch-size", "64"))
    found = []
    for run in (plain, replace(plain, mtp=True)):
        backend.check(run)
        estimate = await backend.required_memory(run)
        async with serving(backend, run) as runner:
            measured = await runner.memory()
            _, answer = await ask(runner, "/v1/completions", prompt="Hello", temperature=0, max_tokens=30)
        assert measured is not None
        found.append((answer["choices"][0]["text"], answer["timings"].get("draft_n", 0), estimate.ram, measured.ram))
    (alone, none, *before), (text, drafted, *after) = found
    assert (text, none) == (alone, 0)
    assert drafted > 0
    assert after[1] - before[1] == pytest.approx(after[0] - before[0], rel=0.2)


async def test_a_head_that_was_trained_for_the_model_drafts(
    backend: LlamaCppBackend, own_server: None, tmp_path: Path
) -> None:
    store = Store(tmp_path / "data")
    for name, write in (("model", random_llama.write), ("head", predicting.write_head)):
        store.create({"model.gguf": store.ingest(write(store.partial / f"{name}.gguf"))}, f"test/{name}")
    bundle, head = store.bundle("test/model"), store.bundle("test/head")
    answers = []
    for draft in (None, head):
        run = RunSpec(bundle.model_id, bundle, Mode.COMPLETION, 512, 1, draft=draft)
        backend.check(run)
        async with serving(backend, run) as runner:
            _, answer = await ask(runner, "/v1/completions", prompt="Hello", temperature=0, max_tokens=30)
        answers.append(answer)
    plain, drafted = answers
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert drafted["timings"]["draft_n"] > 0


async def test_the_estimate_is_near_what_is_used(backend: LlamaCppBackend, spec: RunSpec, own_server: None) -> None:
    """After a load; the wheel's process holds a Python too."""
    run = replace(spec, context_size=4096, parallel=4)
    estimate = await backend.required_memory(run)
    async with serving(backend, run) as runner:
        measured = await runner.memory()
    assert measured is not None
    assert measured.ram == pytest.approx(estimate.ram, rel=0.2)


async def test_a_damaged_model_is_explained(backend: LlamaCppBackend, spec: RunSpec, tmp_path: Path) -> None:
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(spec.bundle.model_file.read_bytes()[: 50 << 20])
    bundle = replace(spec.bundle, files={"model.gguf": torn})
    with pytest.raises(BackendExited) as caught:
        async with serving(backend, replace(spec, bundle=bundle)):
            pass
    assert "pull it again" in caught.value.message


async def test_llama_cpp_python_says_what_it_cannot_do(backend: LlamaCppBackend, spec: RunSpec) -> None:
    if "llama-cpp-python" not in backend.version():
        pytest.skip("the other engines can")
    with pytest.raises(BadRequest, match="--swa-full"):
        async with serving(backend, replace(spec, flags=("--swa-full",))):
            pass


async def test_adapters_templates_and_overrides_reach_the_engine(
    backend: LlamaCppBackend, spec: RunSpec, own_server: None, tmp_path: Path
) -> None:
    odd = Adapter("odd", lora.write_gguf(tmp_path / "odd.gguf"), 1.0, 1)
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ messages[0].content | upper }}")
    files = {**spec.bundle.files, "chat_template.jinja": template}
    changed = replace(
        spec,
        bundle=replace(spec.bundle, files=files, adapters=(odd,)),
        flags=("--n-cpu-moe", "2", "-ot", "blk.3.*=CPU"),
    )
    answers = []
    for run in (spec, changed):
        async with serving(backend, run) as runner:
            _, answer = await ask(runner, "/v1/completions", prompt="Once upon a", temperature=0, max_tokens=12)
            answers.append(answer["choices"][0]["text"])
            _, prompt = await ask(runner, "/apply-template", messages=[{"role": "user", "content": "hello"}])
    assert answers[0] != answers[1]
    assert prompt["prompt"] == "HELLO"
