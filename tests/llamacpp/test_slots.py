"""Prompt caches that survive an unload: with llama.cpp's own servers and real models, run as the daemon runs them."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelrunner.backend import BackendContext
from modelrunner.engine.localrunner import LocalRunner
from modelrunner.engine.questions import work_done
from modelrunner.testing import running
from modelrunner.types import Bundle, Mode, RunSpec
from modelrunner_llamacpp import LlamaCppBackend, args
from modelrunner_llamacpp.engines import Engine, EngineKind
from modelrunner_llamacpp.slots import can_be_kept, key_of
from tests.llamacpp.models import GEMMA3, SMOLLM2, bundle
from tests.llamacpp.models import spec as spec_of
from tests.waiting import HUNG

Make = Callable[..., LlamaCppBackend]


@pytest.fixture
def spec(smollm2: Bundle, tmp_path: Path) -> RunSpec:
    return RunSpec(smollm2.model_id, smollm2, Mode.COMPLETION, 2048, 2)


@pytest.fixture
def make(real_backend: LlamaCppBackend, tmp_path: Path) -> Make:
    """A backend as after a restart of the daemon, with the state that the one before left."""
    if "llama-cpp-python" in real_backend.version():
        pytest.skip("only llama.cpp's own server can save")
    (tmp_path / "state").mkdir()

    def make(**settings: Any) -> LlamaCppBackend:
        context: BackendContext = real_backend.context
        state = tmp_path / "state" / "llama.cpp"
        settings = {**context.settings, **settings}
        return LlamaCppBackend(replace(context, settings=settings, state=state))

    return make


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[], list[Path]]:
    """What lies on disk, the last used first."""
    return lambda: sorted((tmp_path / "state").rglob("*.slot"), key=lambda path: path.name, reverse=True)


@asynccontextmanager
async def serving(backend: LlamaCppBackend, spec: RunSpec, stop_grace: float = 5.0) -> AsyncIterator[LocalRunner]:
    async with running(backend, spec, 60, stop_grace=stop_grace) as (runner, _):
        yield runner


def long_text(word: str) -> str:
    """About 60 tokens."""
    return " ".join(f"{word}{number}" for number in range(20))


async def go_on(runner: LocalRunner, text: str) -> tuple[str, int, int]:
    """What the model makes of `text`; how many tokens that was, and how many of them were not computed again."""
    body = {"prompt": text, "max_tokens": 4, "temperature": 0}
    status, raw = await runner.upstream.fetch("POST", "/v1/completions", json.dumps(body).encode(), timeout=HUNG)
    answer = json.loads(raw)
    assert status == 200, answer
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return text + answer["choices"][0]["text"], answer["usage"]["prompt_tokens"], cached


async def talk(backend: LlamaCppBackend, spec: RunSpec, *texts: str) -> list[tuple[str, int, int]]:
    """One run of the model with these prompts in turn."""
    async with serving(backend, spec) as runner:
        return [await go_on(runner, text) for text in texts]


@pytest.mark.engine
async def test_a_conversation_goes_on_after_an_unload(make: Make, spec: RunSpec, saved: Any) -> None:
    [(text, before, cached)] = await talk(make(), spec, long_text("river"))
    assert cached == 0
    assert [path.stat().st_mode & 0o777 for path in saved()] == [0o600]
    for _ in range(2):
        [(text, tokens, cached)] = await talk(make(), spec, text + " and then")
        assert before <= cached < tokens
        before = tokens
        assert len(saved()) == 1, "the older state is part of the newer one"


@pytest.mark.engine
async def test_each_slot_s_prompt_comes_back_also_from_a_run_that_did_not_use_it(
    make: Make, spec: RunSpec, saved: Any
) -> None:
    prompts = [long_text("river"), long_text("mountain")]
    told = await talk(make(), spec, *prompts, "Too short to be kept")
    assert len(saved()) == 2 - (spec.parallel == 2), "the short one took a slot"
    again = replace(spec, parallel=4)
    await talk(make(), again, *prompts)
    await talk(make(), again)
    assert len(saved()) == 2
    results = await talk(make(), again, *(text for text, _, _ in told[:2]))
    assert all(cached >= 50 for _, _, cached in results)


@pytest.mark.engine
async def test_short_questions_do_not_cost_a_conversation_its_place(make: Make, spec: RunSpec, saved: Any) -> None:
    """Three in two slots: in the process the last of them takes the conversation's place, on disk it does not."""
    [(text, before, _)] = await talk(make(), spec, long_text("river") * 6)
    assert before >= 256
    await talk(make(), spec, *map(long_text, ("mountain", "desert", "forest")))
    assert len(saved()) == 2
    [(_, tokens, cached)] = await talk(make(), spec, text + " and then")
    assert before <= cached < tokens


@pytest.mark.engine
async def test_nothing_is_restored_into_another_context_or_kept_where_nobody_wants_it(
    make: Make, spec: RunSpec, saved: Any
) -> None:
    text = long_text("river")
    await talk(make(), replace(spec, options={"save_slots": False}), text)
    await talk(make(slot_cache=0), spec, text)
    await talk(make(slot_tokens=200), spec, text)
    assert saved() == []
    await talk(make(), spec, text)
    [(_, _, cached)] = await talk(make(), replace(spec, context_size=1024), text)
    assert (cached, len(saved())) == (0, 2)


@pytest.mark.engine
@pytest.mark.parametrize("where", [0, 8, 1000])
async def test_a_damaged_file_is_ignored_and_removed(make: Make, spec: RunSpec, saved: Any, where: int) -> None:
    """In its magic, in its count of tokens, or in the shape of the keys, which only the engine can see."""
    [(text, _, _)] = await talk(make(), spec, long_text("river"))
    [file] = saved()
    data = bytearray(file.read_bytes())
    data[where : where + 100] = b"\x7f" * 100
    file.write_bytes(data)
    async with serving(make(), spec) as runner:
        assert saved() == []
        _, _, cached = await go_on(runner, text)
    assert cached == 0
    assert len(saved()) == 1


@pytest.mark.engine
async def test_the_bound_on_disk(make: Make, spec: RunSpec, saved: Any) -> None:
    await talk(make(), spec, long_text("river"), long_text("mountain"))
    sizes = [path.stat().st_size for path in saved()]
    kept = saved()[0]
    make(slot_cache=sum(sizes) - 1)
    assert saved() == [kept]


@pytest.mark.engine
async def test_a_sliding_window_is_saved_only_where_that_helps(
    make: Make, gemma3: Bundle, spec: RunSpec, saved: Any
) -> None:
    """Without the whole cache the engine says that it restored, and computes everything again."""
    run = replace(spec, bundle=gemma3, model_id=gemma3.model_id)
    await talk(make(), run, long_text("river"))
    assert saved() == []
    full = replace(run, flags=("--swa-full",))
    [(text, before, _)] = await talk(make(), full, long_text("river") * 12)
    [(_, tokens, cached)] = await talk(make(), full, text + " and then")
    assert before > 512, "more than the window"
    assert before <= cached < tokens


@pytest.mark.engine
async def test_a_prompt_cache_in_memory_does_not_take_the_prompts_away(make: Make, spec: RunSpec, saved: Any) -> None:
    prompts = [long_text("river"), long_text("mountain")]
    told = await talk(make(prompt_cache="64MiB"), spec, *prompts)
    assert len(saved()) == 2
    results = await talk(make(prompt_cache="64MiB"), spec, *(text for text, _, _ in told))
    assert all(cached >= 50 for _, _, cached in results)


@pytest.mark.engine
async def test_a_stopped_engine_does_not_hold_up_its_end(make: Make, spec: RunSpec) -> None:
    async with asyncio.timeout(HUNG), serving(make(), spec, stop_grace=0.5) as runner:
        assert runner.pid is not None
        os.kill(runner.pid, signal.SIGSTOP)


@pytest.mark.engine
async def test_a_slot_at_work_is_left_alone(
    make: Make, spec: RunSpec, saved: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the daemon ends and cuts what still runs."""
    endless = {"prompt": long_text("river"), "max_tokens": -1, "ignore_eos": True, "stream": True}
    backend = make()
    async with serving(backend, spec, stop_grace=3.0) as runner:
        await go_on(runner, long_text("mountain"))
        fetch = runner.upstream.fetch("POST", "/v1/completions", json.dumps(endless).encode(), timeout=HUNG)
        task = asyncio.create_task(fetch)
        computed = await work_done(runner.endpoint, runner.api) or 0.0
        while (await work_done(runner.endpoint, runner.api) or 0.0) < computed + 5:  # the prompt is done, tokens come
            assert not task.done()
    assert "was not done" not in caplog.text, "who waits for it takes the whole grace, and the runner says so"
    assert len(saved()) == 1
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.engine
async def test_a_removed_model_leaves_nothing(make: Make, spec: RunSpec, tmp_path: Path) -> None:
    backend = make()
    slots = tmp_path / "state" / "llama.cpp" / "slots"
    await talk(backend, spec, long_text("river"))
    assert sum(path.stat().st_size for path in slots.rglob("*")) > 1 << 20
    await backend.forget(spec.model_id)
    assert list(slots.iterdir()) == []


ENGINE = Engine(EngineKind.NATIVE, Path("/bin/sh"), "1")


@pytest.mark.parametrize(
    ("run", "engine", "kept"),
    [
        (spec_of(bundle(SMOLLM2)), ENGINE, True),
        (spec_of(bundle(SMOLLM2)), replace(ENGINE, kind=EngineKind.WHEEL), True),
        (spec_of(bundle(SMOLLM2)), replace(ENGINE, kind=EngineKind.PYTHON), False),
        (spec_of(bundle(SMOLLM2), mode=Mode.EMBEDDING), ENGINE, False),
        (spec_of(bundle(SMOLLM2), mode=Mode.RERANKING), ENGINE, False),
        (spec_of(bundle(SMOLLM2), draft=bundle(SMOLLM2)), ENGINE, False),
        (spec_of(bundle(SMOLLM2), "--no-cache-prompt"), ENGINE, False),
        (spec_of(bundle(GEMMA3)), ENGINE, False),
        (spec_of(bundle(GEMMA3), "--swa-full"), ENGINE, True),
    ],
)
def test_what_can_be_kept(run: RunSpec, engine: Engine, kept: bool) -> None:
    assert can_be_kept(run, engine, args.effective(run)) is kept


def test_whatever_changes_is_another_key(tmp_path: Path) -> None:
    run = spec_of(bundle(SMOLLM2))
    program = tmp_path / "llama-server"
    program.touch()
    built_anew = tmp_path / "new"
    built_anew.touch()
    os.utime(built_anew, (1, 1))
    engine = replace(ENGINE, program=program)
    runs = [run, replace(run, context_size=512)]
    runs += [replace(run, flags=flags) for flags in (("-ctk", "q8_0"), ("-ctv", "q8_0"), ("--swa-full",))]
    keys = [key_of(engine, args.effective(one)) for one in runs]
    engines = [
        replace(engine, version="2"),
        replace(engine, kind=EngineKind.WHEEL),
        replace(engine, program=built_anew),
    ]
    keys += [key_of(other, args.effective(run)) for other in engines]
    assert len(set(keys)) == len(keys)


def test_a_sequence_is_kept_beside_any_number_of_others(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.touch()
    run, engine = spec_of(bundle(SMOLLM2)), replace(ENGINE, program=program)
    one, four = args.effective(run, cache_ram=64), args.effective(replace(run, parallel=4))
    assert key_of(engine, one) == key_of(engine, four)
