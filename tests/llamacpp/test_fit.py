"""What llama-fit-params is asked and how its answer is read."""

from dataclasses import replace
from pathlib import Path

import pytest

from modelrunner.types import RequiredMemory
from modelrunner_llamacpp import LlamaCppBackend, args, fit, memory
from modelrunner_llamacpp.engines import Engine, EngineKind
from modelrunner_llamacpp.fit import Row
from modelrunner_llamacpp.memory import MIB, PER_DEVICE
from tests.llamacpp.models import GEMMA3, SMOLLM2, bundle, spec

PROGRAM = Path("/engine/llama-fit-params")


def test_its_rows_are_found_among_its_log() -> None:
    lines = ["0.00.002 I llama_fit_params: printing estimated memory", "CUDA1 80 40 300 ", "Host 92 45 98 ", "warning"]
    assert fit.parse(lines) == [Row(1, 80 * MIB, 40 * MIB, 300 * MIB), Row(None, 92 * MIB, 45 * MIB, 98 * MIB)]


def test_it_is_asked_for_all_sequences() -> None:
    run = spec(bundle(SMOLLM2), "--swa-full", parallel=4)
    words = fit.command(PROGRAM, run.bundle, args.effective(run))
    assert words[words.index("--parallel") + 1] == "4"
    assert words[words.index("--ctx-size") + 1] == "8192"
    assert "--swa-full" in words


@pytest.mark.parametrize("parallel", [1, 4])
def test_what_it_says_of_the_cache_replaces_the_formula(parallel: int) -> None:
    """20 MiB more than the formula has."""
    run = spec(bundle(GEMMA3), parallel=parallel)
    options = args.effective(run)
    estimate = memory.required(run, EngineKind.NATIVE, options)
    told = [Row(None, memory.weights(run.bundle), parallel * 21 * MIB + 20 * MIB, 514 * MIB)]
    assert fit.corrected(estimate, told, run.bundle, options).ram == estimate.ram + 20 * MIB


def test_a_device_is_what_it_says_and_what_its_driver_keeps() -> None:
    run = spec(bundle(SMOLLM2))
    estimate = RequiredMemory(500 * MIB, (0, 1000 * MIB))
    rows = [Row(1, 900 * MIB, 300 * MIB, 100 * MIB), Row(None, 10 * MIB, 0, 5 * MIB)]
    told = fit.corrected(estimate, rows, run.bundle, args.effective(run))
    assert told == RequiredMemory(500 * MIB, (0, 1300 * MIB + PER_DEVICE))


async def test_an_engine_without_it_says_nothing(tmp_path: Path) -> None:
    run = spec(bundle(SMOLLM2))
    for engine in (
        Engine(EngineKind.WHEEL, tmp_path / "python", "1"),
        Engine(EngineKind.NATIVE, tmp_path / "llama-server", "1"),
    ):
        assert await fit.ask(engine, run.bundle, args.effective(run), tmp_path / "log") == []


async def test_one_that_fails_says_nothing(tmp_path: Path) -> None:
    program = tmp_path / "llama-fit-params"
    program.write_text("#!/bin/sh\necho 'Host 1 2 3 '\nexit 1\n")
    program.chmod(0o755)
    run, engine = spec(bundle(SMOLLM2)), Engine(EngineKind.NATIVE, tmp_path / "llama-server", "1")
    assert await fit.ask(engine, run.bundle, args.effective(run), tmp_path / "log") == []


@pytest.mark.engine
async def test_the_real_one_agrees_with_the_formula(real_backend: LlamaCppBackend, smollm2: object) -> None:
    run = replace(spec(bundle(SMOLLM2)), bundle=smollm2)  # type: ignore[arg-type]
    told = await real_backend.dry_run(run)
    if "native" not in real_backend.version():
        assert told is None
        return
    estimate = await real_backend.required_memory(run)
    if told is not None:  # a llama-server of somebody else's may have no llama-fit-params beside it
        assert told.ram == pytest.approx(estimate.ram, rel=0.03)
