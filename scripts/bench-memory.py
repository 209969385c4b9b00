"""What engines are predicted to need and what they hold: every model of a data directory in several contexts, with
every engine that the cache has. Prints the rows of the table in docs/memory.md, in MiB.

`before`: predicted from the file's header; `dry run`: with the engine asked, where it can say; `after`: predicted once
a run was measured right after its load; `full`: measured after every sequence was given its part of the context, the
figure that the three predict, with their errors. Usage: bench-memory.py [--data DIRECTORY] [--contexts 512,2048,8192]
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from modelrunner import BackendContext, Bundle, Endpoint, Mode, ProcessOptions, RunSpec
from modelrunner.locations import Locations
from modelrunner.runner import Runner
from modelrunner.scheduler import Ledger
from modelrunner.scheduler.runners import measure
from modelrunner.store import Store
from modelrunner.types import RequiredMemory, RunnerKey
from modelrunner_llamacpp import LlamaCppBackend, engines
from modelrunner_llamacpp.engines import Kind

MIB = 1 << 20
PARALLEL = (1, 4)


def backends(folder: Path) -> Iterator[tuple[Kind, LlamaCppBackend]]:
    """One for each kind of engine in the cache."""
    cache = Locations.find().cache
    for kind in (Kind.WHEEL, Kind.NATIVE):
        links = folder / kind
        links.mkdir()
        context = BackendContext(links, cache, folder, {})
        for entry in cache.glob(f"llama.cpp-{kind}-*/"):
            if engines.usable(entry, kind):
                engines.link(context, kind).symlink_to(entry)
                yield kind, LlamaCppBackend(context)
                break


def store_of(data: Path, folder: Path) -> Store:
    """A copy by hard links: the directory may be a daemon's."""
    ignore = shutil.ignore_patterns("daemon.lock", "logs", "state")
    shutil.copytree(data, folder / "data", copy_function=os.link, ignore=ignore)
    return Store(folder / "data")


def spec_of(bundle: Bundle, context: int, parallel: int, log: Path) -> RunSpec:
    mode = Mode.COMPLETION if "completion" in bundle.capabilities else Mode.EMBEDDING
    return RunSpec(bundle.model_id, bundle, mode, context, parallel, ProcessOptions(log))


@asynccontextmanager
async def serving(backend: LlamaCppBackend, spec: RunSpec, socket: Path) -> AsyncIterator[Runner]:
    key = RunnerKey(backend.name, spec.model_id, spec.mode)
    runner = Runner(backend, spec, key, id="bench", endpoint=Endpoint(path=socket))
    changed = asyncio.Event()
    task = asyncio.create_task(runner.run(changed.set))
    try:
        while runner.ready_at is None:
            if task.done():
                await task
            await changed.wait()
            changed.clear()
        yield runner
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


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
    """Gives every sequence its part of the context at the same time, as conversations of three turns: the checkpoints
    of each turn stay. An encoder gets as many inputs as long as its context."""
    chat = spec.mode is Mode.COMPLETION
    path, field = ("/v1/completions", "prompt") if chat else ("/v1/embeddings", "input")
    for left in (96, 56, 16):
        length = spec.context_size // (spec.parallel if chat else 1) - left
        prompts = [[1000 + 7 * sequence] * length for sequence in range(spec.parallel)]
        await asyncio.gather(*(post(socket, path, {field: prompt, "max_tokens": 8}) for prompt in prompts))


async def held(runner: Runner) -> RequiredMemory:
    found = await measure(runner)
    assert found is not None
    return found


async def row(kind: Kind, backend: LlamaCppBackend, spec: RunSpec, folder: Path) -> None:
    ledger = Ledger()
    before = await ledger.required(backend, spec)
    told = await backend.dry_run(spec)
    async with serving(backend, spec, folder / "engine.sock") as runner:
        loaded = await held(runner)
        after = ledger.record(backend, spec, loaded, fresh=True)
        await fill(folder / "engine.sock", spec)
        full = (await held(runner)).ram

    def cell(figure: RequiredMemory | None) -> str:
        return "" if figure is None else f"{figure.ram / MIB:.0f} ({figure.ram / full - 1:+.0%})"

    what = f"{spec.bundle.references[0]} {spec.context_size} / {spec.parallel}, {kind}"
    figures = [cell(before), cell(told), f"{loaded.ram / MIB:.0f}", cell(after), f"{full / MIB:.0f}"]
    print(f"| {what} | {' | '.join(figures)} |", flush=True)


async def run(arguments: argparse.Namespace, folder: Path) -> None:
    store = store_of(arguments.data, folder)
    print("| model, context / parallel, engine | before | dry run | loaded | after | full |\n|---|---|---|---|---|---|")
    for kind, backend in backends(folder):
        for model in store.list():
            bundle = store.bundle(model.id)
            if bundle.format not in backend.formats:
                continue
            for context in arguments.contexts:
                for parallel in PARALLEL:
                    if context <= (bundle.context_length or context):
                        await row(kind, backend, spec_of(bundle, context, parallel, folder / "engine.log"), folder)


def tested_models() -> Path:
    """The newest of the tests' own data directories."""
    found = sorted(Locations.find().cache.glob("test-models-*/complete"))
    return found[-1].parent / "data" if found else Locations.find().data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=tested_models())
    parser.add_argument("--contexts", type=lambda text: [int(n) for n in text.split(",")], default=[512, 2048, 8192])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(run(arguments, Path(name)))


if __name__ == "__main__":
    sys.exit(main())
