"""What a run needs according to `llama-fit-params`, which a native build puts beside llama-server. The program reads
the model's header and allocates nothing (tools/fit-params of llama.cpp)."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from modelrunner.sdk import Bundle, RequiredMemory, RunSpec, programs
from modelrunner_llamacpp import LlamaCppBackend, args, engines, memory, repack
from modelrunner_llamacpp.kvcache import Shape
from modelrunner_llamacpp.memory import MIB

_ROW = re.compile(r"([A-Za-z]+)(\d*) (\d+) (\d+) (\d+) ?")
_TAKEN = (
    *("--ctx-size", "--parallel", "--batch-size", "--ubatch-size", "--cache-type-k", "--cache-type-v", "--flash-attn"),
    *("--n-gpu-layers", "--split-mode", "--main-gpu", "--tensor-split"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """The bytes on one device. `device` is None for main memory."""

    device: int | None
    model: int
    context: int
    compute: int


async def needed(backend: LlamaCppBackend, run: RunSpec) -> RequiredMemory:
    """Returns the backend's estimate, corrected by the program's figures. Requires a native build."""
    engine = engines.find(backend.context, backend.settings)
    assert engine is not None
    batch = 64 if engine.devices is False else None  # as the backend starts its engine (docs/memory.md)
    rearranged = repack.most(run.bundle.header.tensors, repack.features())
    options, lines = args.effective(run, batch=batch, rearranged=rearranged), list[str]()
    words = command(engine.program.with_name("llama-fit-params"), run.bundle, options)
    await programs.execute(words, log=backend.context.logs / "fit.log", on_line=lines.append)
    return corrected(await backend.required_memory(run), parse(lines), run.bundle, options, repack.features())


def command(program: Path, bundle: Bundle, options: Mapping[str, str]) -> list[str]:
    """Returns the command line that asks about a run with these options."""
    words = [str(program), "--model", str(bundle.model_file), "--fit-print", "on", "--offline"]
    for flag in _TAKEN:
        if flag in options:
            words += [flag, options[flag]]
    switches = {"--swa-full": "--swa-full", "--kv-offload": "--no-kv-offload"}
    given = {"--swa-full": "on", "--kv-offload": "off"}
    return words + [word for flag, word in switches.items() if options.get(flag) == given[flag]]


def parse(lines: Iterable[str]) -> list[Row]:
    """Returns the rows `NAME MODEL CONTEXT COMPUTE` (in MiB) among the lines."""
    found = []
    for line in lines:
        if match := _ROW.fullmatch(line):
            name, number, *sizes = match.groups()
            device = None if name == "Host" else int(number or 0)
            found.append(Row(device, *(int(size) * MIB for size in sizes)))
    return found


def corrected(
    estimate: RequiredMemory,
    rows: Iterable[Row],
    bundle: Bundle,
    options: Mapping[str, str],
    features: Collection[str],
) -> RequiredMemory:
    """Returns the estimate, corrected by the engine's figures for weights, caches and device buffers. Its figure for
    the buffers of the CPU is not used: most of them are never touched. Weights that the engine omits are those that it
    rearranges (repack.py); the estimate computes them from `features`."""
    parts = memory.tensor_sizes(bundle, Shape.of(options))
    ram, vram = estimate.ram, list(estimate.vram)
    for row in rows:
        if row.device is None and not any(vram):
            ram += row.context - sum(parts.caches)
            if memory.rearranges(options):
                ram += max(0, memory.weights(bundle) - row.model) - memory.held_twice(bundle, options, features)
        elif row.device is not None and row.device < len(vram):
            vram[row.device] = max(vram[row.device], row.model + row.context + row.compute + memory.PER_DEVICE)
    return replace(estimate, ram=ram, vram=tuple(vram))
