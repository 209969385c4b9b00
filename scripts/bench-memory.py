"""What engines are predicted to need and what they hold: the models of a data directory in several ways to run them,
with the engines that the cache has; contexts above 2,048 tokens with the compiled one only, since filling them takes a
minute. Prints the rows of the tables in docs/memory.md, in MiB.

`before`: predicted from the header of the file; `asked`: the figure of the engine itself, if it has one; `after`:
predicted after a load was measured; `full`: measured after every sequence was given a whole context, the figure that
the three predict, with their errors.
Usage: bench-memory.py [--data DIRECTORY] [--engines native,wheel] [--rows REGEX] [--longest TOKENS]
Without `--longest` rows of up to 2,048 tokens in all sequences: minutes. With `--longest 8192` all, more than ten
minutes on two cores.
"""

import argparse
import asyncio
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from single import backends, serving, store_of, tested_models

from modelrunner.engine.runner import Runner
from modelrunner.scheduler import Ledger
from modelrunner.types import Bundle, Mode, RequiredMemory, RunSpec
from modelrunner_llamacpp import LlamaCppBackend
from modelrunner_llamacpp.engines import EngineKind

MIB = 1 << 20
LEAST = 16 * MIB  # smaller models are lost in what the program needs
LONG = 2048  # tokens of all sequences; more are computed with one engine only


@dataclass(frozen=True)
class Case:
    """A way to run a model: `flags` are llama.cpp's; with `drafts` the model drafts for itself."""

    context: int
    parallel: int
    flags: tuple[str, ...] = ()
    mode: Mode = Mode.COMPLETION
    drafts: bool = False

    def __str__(self) -> str:
        said = [f"{self.context} / {self.parallel}", *([" ".join(self.flags)] if self.flags else [])]
        return ", ".join([*said, *(["embeddings"] * (self.mode is Mode.EMBEDDING)), *(["drafts"] * self.drafts)])


SMALL_CACHE = ("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0")
CASES = (
    *(Case(512, 1), Case(512, 4), Case(2048, 1), Case(768, 3)),
    Case(512, 4, ("-b", "512", "-ub", "512")),
    Case(512, 4, ("--load-mode", "none")),
    *(Case(2048, 1, drafts=True), Case(512, 4, drafts=True)),
    Case(1024, 1, mode=Mode.EMBEDDING),
    *(Case(1024, 4, SMALL_CACHE), Case(1024, 4, ("--swa-full",)), Case(1024, 4, ("-fa", "off"))),
    *(Case(2048, 4), Case(1024, 8), Case(8192, 1)),
)
ENCODER_CASES = tuple(Case(512, parallel, mode=Mode.EMBEDDING) for parallel in (1, 4, 8))


def cases(bundle: Bundle, kind: EngineKind, longest: int) -> Iterator[Case]:
    """Those that say something about this model."""
    chats = "completion" in bundle.capabilities
    slides = any(name.endswith(".sliding_window") for name in bundle.header.metadata)
    for case in CASES if chats else ENCODER_CASES:
        tokens = case.context * (case.parallel if chats else 1)
        known = tokens <= longest and case.context <= (bundle.context_length or longest)
        if known and (slides or case.flags != ("--swa-full",)) and (kind is EngineKind.NATIVE or tokens <= LONG):
            yield case


def spec_of(bundle: Bundle, case: Case) -> RunSpec:
    draft = bundle if case.drafts else None
    return RunSpec(bundle.model_id, bundle, case.mode, case.context, case.parallel, case.flags, draft)


async def post(socket: Path, path: str, fields: dict[str, object]) -> None:
    body = json.dumps(fields).encode()
    reader, writer = await asyncio.open_unix_connection(str(socket))
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        answer = await reader.read()
    finally:
        writer.close()
    if b" 200 " not in answer.split(b"\r\n")[0] + b" ":
        raise SystemExit(f"{path}: {answer[-500:]!r}")


async def fill(socket: Path, spec: RunSpec) -> None:
    """Fills the context of every sequence at the same time, as conversations of three turns: the checkpoints of each
    turn stay. An encoder gets as many inputs as long as its context."""
    chat = spec.mode is Mode.COMPLETION
    path, field = ("/v1/completions", "prompt") if chat else ("/v1/embeddings", "input")
    for left in (96, 56, 16):
        length = spec.context_size - left
        prompts = [[1000 + 7 * sequence] * length for sequence in range(spec.parallel)]
        await asyncio.gather(*(post(socket, path, {field: prompt, "max_tokens": 8}) for prompt in prompts))


async def held(runner: Runner) -> RequiredMemory:
    found = await runner.memory()
    assert found is not None
    return found


async def row(name: str, backend: LlamaCppBackend, spec: RunSpec, folder: Path) -> None:
    ledger = Ledger()
    before = await ledger.required(backend, spec)
    async with serving(backend, spec, folder / "run/engine.sock") as runner:
        loaded = await held(runner)
        after = await ledger.record(backend, spec, loaded, fresh=True)
        await fill(folder / "run/engine.sock", spec)
        full = (await held(runner)).ram

    def cell(figure: RequiredMemory | None) -> str:
        return "" if figure is None else f"{figure.ram / MIB:.0f} ({figure.ram / full - 1:+.0%})"

    figures = [f"{loaded.ram / MIB:.0f}", f"{full / MIB:.0f}", cell(before), cell(after)]
    print(f"| {name} | {' | '.join(figures)} |", flush=True)


async def run(arguments: argparse.Namespace, folder: Path) -> None:
    store = store_of(arguments.data, folder)
    for kind, backend in backends(folder, arguments.engines):
        print(f"\n| {kind} | loaded | full | before | after |\n|---|---|---|---|---|")
        for model in store.list():
            bundle = store.bundle(model.id)
            name = next(iter(bundle.references), model.id)
            if bundle.format not in backend.formats or bundle.size < LEAST:
                continue
            for case in cases(bundle, kind, arguments.longest):
                if arguments.rows.search(f"{name} {case}"):
                    await row(f"{name} {case}", backend, spec_of(bundle, case), folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=tested_models())
    parser.add_argument("--engines", type=lambda text: text.split(","), default=[EngineKind.NATIVE, EngineKind.WHEEL])
    parser.add_argument("--rows", type=re.compile, default=re.compile(""), help="only those that it is found in")
    parser.add_argument("--longest", type=int, default=LONG, help="no context of more tokens is filled")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(run(arguments, Path(name)))


if __name__ == "__main__":
    main()
