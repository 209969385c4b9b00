"""Quantizes models with `llama-quantize`, which a native build puts beside llama-server (tools/quantize of llama.cpp),
or by the library of llama-cpp-python. The wheel's library does not export llama.cpp's function for it."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace

from modelrunner.sdk import (
    BackendExited,
    BackendUnavailable,
    BadRequest,
    InstallProgress,
    ProgressCallback,
    QuantizeSpec,
    Sandbox,
    run,
    scrubbed_environment,
)
from modelrunner_llamacpp import environment
from modelrunner_llamacpp.engines import Engine, EngineKind

# The types of quantize.cpp that need no importance matrix.
TYPES = (
    *("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_0", "Q4_1", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS"),
    *("Q5_0", "Q5_1", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0", "F16", "BF16", "F32"),
)
_QUANTIZE = environment.INSIDE / "modelrunner_quantize.py"
_STEP = re.compile(r"\[ *([0-9]+)/ *([0-9]+)\] +([A-Za-z0-9_.]{1,80})")


class TensorCounter:
    """The observer of the tool. It reports each tensor that the tool begins (`llama_model_quantize_impl` of
    llama-quant.cpp)."""

    def __init__(self, progress: ProgressCallback) -> None:
        self._progress = progress

    def started(self, pid: int, sandbox: Sandbox) -> None: ...

    def output(self, line: str) -> None:
        if match := _STEP.match(line):
            self._progress(InstallProgress(match[3], int(match[1]), int(match[2])))


async def quantize(engine: Engine, spec: QuantizeSpec, threads: int | None, progress: ProgressCallback) -> None:
    """Quantizes a model with the tool of `engine`. Raises `BadRequest` for an unknown type, `BackendUnavailable` if the
    engine lacks the tool, `BackendExited` if the tool fails."""
    words = command(engine, spec, threads)
    options = replace(spec.process, observer=TensorCounter(progress))
    try:
        await run(words, env=scrubbed_environment(), options=options, permissions=environment.permissions(engine))
    except BackendExited as ended:
        if ended.returncode != 0:
            raise


def command(engine: Engine, spec: QuantizeSpec, threads: int | None) -> Sequence[str]:
    """Returns the command line. Without `threads` the tool uses all processors."""
    if spec.type not in TYPES:
        raise BadRequest(f"llama.cpp cannot quantize to {spec.type} here, only to {', '.join(TYPES)}", param="type")
    model, target = str(spec.bundle.model_file), str(spec.target)
    program = engine.program.with_name("llama-quantize")
    if engine.kind is EngineKind.PYTHON:
        return [str(engine.program), "-I", str(_QUANTIZE), model, target, spec.type, str(threads or 0)]
    if engine.kind is EngineKind.NATIVE and os.access(program, os.X_OK):
        return [str(program), "--allow-requantize", model, target, spec.type, *([str(threads)] if threads else [])]
    raise BackendUnavailable(
        f"the engine that is here ({engine}) has no tool to quantize: `modelrunner install --build llama.cpp` builds"
        " one that has"
    )
