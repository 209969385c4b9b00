"""A plug-in that misbehaves while llama.cpp serves a real model: no answer of llama.cpp's is lost, cut or later.

Time is told by the same requests before and after, in the same run. With `-s` the figures are printed."""

import asyncio
import json
import os
import shutil
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from modelrunner.store import Store
from modelrunner_llamacpp import LlamaCppBackend
from tests.api.conftest import make_settings
from tests.e2e.conftest import SMOLLM2, prepared
from tests.llamacpp.conftest import real_backend
from tests.plugins.beside import Daemon, beside
from tests.plugins.rogue import FAULTS, HARMLESS_FOR_RUNS, released
from tests.store.samples import add_model

__all__ = ["prepared", "real_backend"]
pytestmark = pytest.mark.engine
TOKENS = 8
LEAST = 12
HELD = 10.0
"""Seconds for which the plug-in may keep its caller: as many as some `LEAST` answers take on a slow machine."""


def name_for(fault: str) -> str:
    """Each misbehaviour has a model of its own: what a model needs is not asked again once it was measured."""
    return fault.replace(" ", "-")


@pytest.fixture
async def daemon(real_backend: LlamaCppBackend, prepared: Path, tmp_path: Path) -> AsyncIterator[Daemon]:
    settings = make_settings(tmp_path, listen="")
    shutil.copytree(
        prepared, settings.data_dir, copy_function=os.link, ignore=shutil.ignore_patterns("daemon.lock", "logs")
    )
    store = Store(settings.data_dir)
    for seed, fault in enumerate(FAULTS):
        add_model(store, name_for(fault), seed)
    async with beside(real_backend, settings, limit=HELD) as daemon:
        yield daemon


async def told(daemon: Daemon, number: int) -> None:
    """One whole answer, streamed or plain."""
    messages = [{"role": "user", "content": f"{number}: tell me of the sea."}]
    fields: dict[str, Any] = {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    if number % 2:
        status, answer = await daemon.chat("/v1", SMOLLM2, **fields)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == TOKENS
        return
    body = fields | {"model": SMOLLM2, "stream": True, "stream_options": {"include_usage": True}}
    async with daemon.session.post("/v1/chat/completions", json=body) as streamed:
        events = [line.removeprefix("data: ") for line in (await streamed.text()).splitlines() if line]
    assert streamed.status == 200, events
    assert events[-1] == "[DONE]", events[-1]
    assert json.loads(events[-2])["usage"]["completion_tokens"] == TOKENS


async def steady(daemon: Daemon, until: "asyncio.Task[object] | None" = None) -> list[float]:
    """Seconds of each of `LEAST` answers, one after the other, and of those until the end of `until`."""
    waits: list[float] = []
    while len(waits) < LEAST or (until is not None and not until.done()):
        began = time.monotonic()
        await told(daemon, len(waits))
        waits.append(time.monotonic() - began)
    return waits


async def provoke(daemon: Daemon, fault: str) -> None:
    """Asks for what meets the fault: a model of the plug-in's, and what looks at all backends."""
    daemon.rogue.fault = fault
    status, answer = await daemon.chat("/engines/a-rogue/v1", name_for(fault))
    if fault in HARMLESS_FOR_RUNS:
        assert status == 200, answer
    else:
        assert status in (412, 502), answer
        assert "a-rogue" in answer["error"]["message"]
    for path in ("/engines/status", "/engines/df", "/engines/ps", "/v1/models"):
        async with daemon.session.get(path) as looked:
            assert looked.status == 200, path
    async with daemon.session.post("/engines/unload", json={"backend": "a-rogue"}) as unloaded:
        assert unloaded.status == 200


async def recovered(daemon: Daemon) -> None:
    """The plug-in behaves again, and its thread is free."""
    daemon.rogue.fault = ""
    released.set()
    while True:
        async with daemon.session.get("/engines/status") as answer:
            if (await answer.json())["a-rogue"].startswith("Running"):
                break
    released.clear()


def figures(waits: list[float]) -> str:
    p99 = sorted(waits)[int(len(waits) * 0.99)]
    return f"{len(waits):4} answers, median {1000 * statistics.median(waits):6.1f} ms, p99 {1000 * p99:6.1f} ms"


@pytest.mark.parametrize("real_backend", ["wheel"], indirect=True)
async def test_no_answer_of_llama_cpp_is_lost_or_later(daemon: Daemon) -> None:
    """In each interval with a misbehaviour the mean answer takes at most thrice that of the slower quiet interval
    beside it. A plug-in that held llama.cpp up as long as its own caller would add `HELD` seconds to one interval."""
    await told(daemon, 0)
    quiet = [await steady(daemon)]
    beside_faults: list[float] = []
    for fault in FAULTS:
        waits = await steady(daemon, provoking := asyncio.create_task(provoke(daemon, fault)))
        await provoking
        await recovered(daemon)
        quiet.append(await steady(daemon))
        beside_faults += waits
        print(f"{fault:20} {figures(waits)}")
        assert statistics.mean(waits) <= 3 * max(map(statistics.mean, quiet[-2:])), fault
    print(f"{'quiet':20} {figures([wait for waits in quiet for wait in waits])}")
    print(f"{'any fault':20} {figures(beside_faults)}")
