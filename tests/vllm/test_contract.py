"""The real vLLM under the contract that every backend keeps, and what its processes leave when one of them dies."""

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from modelrunner.engine.questions import work_done
from modelrunner.errors import BackendExited, BackendUnavailable, BadRequest
from modelrunner.testing import BackendContract, alive, running, tree
from modelrunner.types import Bundle, Mode, RunSpec
from modelrunner_vllm import VllmBackend
from tests.e2e.daemons import command_line
from tests.models.prepare import MINILM_SAFETENSORS
from tests.vllm.sharedmemory import shared_memory_of
from tests.waiting import HUNG

pytestmark = pytest.mark.engine
LIMIT = 300.0  # seconds


class TestVllm(BackendContract):
    """The fixtures of conftest.py are what it takes."""

    load_limit = LIMIT


def named(processes: list[psutil.Process], name: str) -> psutil.Process:
    return next(process for process in processes if name in command_line(process))


async def test_a_worker_that_computes_is_seen_to_until_it_dies_and_the_others_follow(
    backend: VllmBackend, spec: RunSpec, tmp_path: Path
) -> None:
    """Prompts of fifteen pieces, of which none gives a token before the last: yet each is counted, as cache in use.
    An engine that computes on every processor answers seldom, or not in time, so of one prompt few are seen."""
    pieces = replace(spec, context_size=2048, flags=("--max-num-batched-tokens", "128"))
    async with running(backend, pieces, LIMIT) as (runner, task):
        shares: set[float] = set()
        async with asyncio.timeout(LIMIT):
            for number in itertools.count():
                text = b"%d: %b" % (number, b"word " * 1900)
                prompt = b'{"model": "%b", "prompt": "%b", "max_tokens": 1}' % (spec.model_id.encode(), text)
                request = asyncio.create_task(runner.upstream.fetch("POST", "/v1/completions", prompt, timeout=LIMIT))
                while not request.done():
                    with contextlib.suppress(TimeoutError):
                        figure = await work_done(runner.endpoint, runner.api)
                        assert figure is not None
                        shares.add(round(figure % 1, 3))
                assert (await request)[0] == 200
                if len(shares) > 4:
                    break
        assert shared_memory_of(tmp_path / "engines")
        processes = await asyncio.to_thread(tree, runner)
        os.kill(named(processes, "VLLM::Worker").pid, signal.SIGKILL)
        async with asyncio.timeout(HUNG):
            with pytest.raises(BackendExited):
                await task
        assert not alive(processes)
    assert not shared_memory_of(tmp_path / "engines")


async def test_embeddings_their_memory_and_the_work_that_is_counted(
    backend: VllmBackend, spec: RunSpec, bundle_of: Callable[[str], Bundle]
) -> None:
    bundle = bundle_of(MINILM_SAFETENSORS)
    run = replace(spec, model_id=bundle.model_id, bundle=bundle, mode=Mode.EMBEDDING, context_size=256)
    estimate = await backend.required_memory(run)
    async with running(backend, run, LIMIT) as (runner, _):
        stages = runner.stage
        body = b'{"model": "%b", "input": ["the cat sleeps", "a cat is asleep", "stock prices"]}'
        sent = body % bundle.references[0].encode()
        idle = await work_done(runner.endpoint, runner.api)
        status, answer = await runner.upstream.fetch("POST", "/v1/embeddings", sent, timeout=HUNG)
        worked = await work_done(runner.endpoint, runner.api)
        measured = await runner.memory()
    assert (status, stages) == (200, "")
    assert answer.count(b'"embedding":[') == 3
    assert None is not idle != worked
    assert measured is not None
    assert measured.ram == pytest.approx(estimate.ram, rel=0.25)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"context_size": 99_999}, "99999 is beyond"),
        ({"options": {"hf-overrides": {"architectures": ["NoSuchForCausalLM"]}}}, "architecture"),
        ({"options": {"tensor-parallel-size": 2}}, "tensor-parallel-size"),
    ],
)
async def test_a_start_that_fails_is_explained(
    backend: VllmBackend, spec: RunSpec, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    with pytest.raises(BackendExited, match=said):
        async with running(backend, replace(spec, **change), LIMIT):  # type: ignore[arg-type]
            pass
    assert not shared_memory_of(tmp_path / "engines")


async def test_a_ray_cluster_that_is_not_there(backend: VllmBackend, spec: RunSpec) -> None:
    options = {"executor": "ray", "ray-address": "127.0.0.1:1"}
    with pytest.raises(BackendUnavailable, match=r"Ray cluster at 127\.0\.0\.1:1 cannot be reached"):
        async with running(backend, replace(spec, options=options), LIMIT):
            pass


def test_what_the_model_cannot_do_is_refused_before_it_starts(backend: VllmBackend, spec: RunSpec) -> None:
    backend.check(spec)
    for change in ({"context_size": 99_999}, {"options": {"sleep": 1}}):
        with pytest.raises(BadRequest):
            backend.check(replace(spec, **change))
