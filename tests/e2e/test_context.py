"""What a request may have never depends on the others: each sequence has a context of its own."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import SMOLLM2
from tests.e2e.daemons import Daemon

CONTEXT = 256


@pytest.fixture
def narrow(daemon: Daemon) -> Daemon:
    """With the default of four sequences, of 256 tokens each."""
    assert daemon.run("configure", SMOLLM2, "--context-size", str(CONTEXT), "--restart").returncode == 0
    return daemon


def stream(daemon: Daemon, model: str, prompt: int, answer: int) -> tuple[str, int]:
    """How the stream ended, and how many tokens its answer had."""
    fields = {"model": model, "prompt": [1000 + answer] * prompt, "max_tokens": answer, "ignore_eos": True}
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    with daemon.client(timeout=600) as client:
        lines = client.post("/v1/completions", json=fields).text.split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert lines[-2] == "data: [DONE]", lines[-3:]
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    return reasons[-1], events[-1]["usage"]["completion_tokens"]


def all_end_well(daemon: Daemon, model: str) -> None:
    """Four streams that together have four times the window, and twelve of random lengths up to all of it."""
    numbers = random.Random(7)
    sizes = [(150, 100)] * 4
    for _ in range(12):
        prompt = numbers.randint(2, CONTEXT - 8)
        sizes.append((prompt, numbers.randint(1, CONTEXT - prompt)))
    with ThreadPoolExecutor(len(sizes)) as pool:
        ended = list(pool.map(lambda size: stream(daemon, model, *size), sizes))
    assert ended == [("length", answer) for _, answer in sizes]


def test_streams_that_fit_the_window_end_well_beside_each_other(narrow: Daemon) -> None:
    assert narrow.get(f"/v1/models/{SMOLLM2}").json()["context_window"] == CONTEXT
    all_end_well(narrow, SMOLLM2)
