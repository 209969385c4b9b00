"""What llama.cpp's runs take of each device, and how fast they are there: models of random weights in the sizes that
people use, run by a daemon of this script's own, each in several placements: with all layers on each device, in
parts over all of them, with some layers on the processor. Prints the table of docs/memory.md, in MiB (predicted /
measured) and tokens per second, then how often models are loaded that are asked in turn, and by a Zipf law.

A row of `fit` is what the daemon predicts before the first load, `ready` what it measures right after the load, and
`full` what it measures after the context of every sequence was filled. Speeds are the engine's own figures for one
prompt and one answer. The models that are asked in turn are as many as there are devices, and each takes most of the
room that is left of one; by a Zipf law there are two more.

Usage: bench-devices.py [--sizes 1B,8B] [--llama-server PROGRAM] [--rows REGEX] [--folder FOLDER]

Without a card Mesa's llvmpipe plays two: GGML_VK_VISIBLE_DEVICES=0,0 in the environment, --sizes tiny, and the program
of `modelrunner install llama.cpp --variant vulkan`.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.hindsight import fewest_loads
from tests.models import random_llama
from tests.models.random_llama import Sizes

MIB = 1 << 20
_LOADS = 'modelrunner_events_total{event="load"'
# Named after published models of that shape: Llama 3.2 1B, Llama 3.1 8B, Qwen 2.5 32B.
SIZES = {
    "tiny": Sizes(context=512),  # for devices that the processor plays
    "1B": Sizes(2048, 8192, 16, 32, 8, 131_072, 128_256, quantized=True),
    "8B": Sizes(4096, 14_336, 32, 32, 8, 131_072, 128_256, quantized=True),
    "32B": Sizes(5120, 27_648, 64, 40, 8, 131_072, 152_064, quantized=True),
}

# With 32,768 tokens it takes 1.2 of the `ROOM` that each device may give: two do not stand on one.
IN_TURN, TOKENS, ROOM = Sizes(512, 512, 11, 8, 8, 98_304), 32_768, 1843 * MIB
COLUMNS = (
    "model, context / sequences",
    "fit",
    "variant",
    "devices",
    "ready, predicted",
    "ready",
    "full",
    "load",
    "prompt",
    "answer",
)


@dataclass(frozen=True)
class Case:
    """A way to run a model: `layers` of it on devices (a share of all, None for as many as fit), on one of these
    `devices` (none for any)."""

    context: int
    parallel: int
    layers: float | None = None
    flags: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()

    def __str__(self) -> str:
        placed = [] if self.layers is None else [f"{self.layers:.0%} of the layers"]
        placed += [f"device {device}" for device in self.devices]
        return ", ".join(
            [f"{self.context} / {self.parallel}", *placed, *([" ".join(self.flags)] if self.flags else [])]
        )


CASES = (
    Case(8192, 1),
    Case(8192, 4),
    Case(32_768, 1),
    Case(8192, 1, flags=("-ub", "2048", "-b", "2048")),
    Case(8192, 1, flags=("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0")),
    Case(8192, 1, flags=("-fa", "off")),
    Case(8192, 1, layers=0.5),
    Case(8192, 1, layers=0.0),
)


def cases(devices: int) -> list[Case]:
    """Returns the cases of a machine with so many devices."""
    if devices < 2:
        return list(CASES)
    split = Case(8192, 1, flags=("--split-mode", "layer", "--tensor-split", ",".join(["1"] * devices)))
    return [*CASES, *[Case(8192, 1, devices=(device,)) for device in range(devices)], split]


class Daemon:
    """A daemon by its command line, whose first command starts it, and by its socket."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self("ls")
        transport = httpx.HTTPTransport(uds=self("status")["socket"])
        self._client = httpx.Client(transport=transport, base_url="http://localhost", timeout=600)

    def __call__(self, *words: str) -> Any:
        """Returns what the command prints with --json. Raises `SystemExit` if it fails."""
        done = self.run(*words, "--json")
        if done.returncode not in (0, 1) or not done.stdout.strip():
            raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "modelrunner", *words]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)

    def complete(self, model: str, prompt: str, tokens: int) -> dict[str, float]:
        """Returns llama.cpp's timings of a completion."""
        fields = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self._client.post("/v1/completions", json=fields)
        if answer.status_code != 200:
            raise SystemExit(f"{model}: {answer.text}")
        timings: dict[str, float] = answer.json()["timings"]
        return timings

    def loads(self) -> int:
        """Returns how often a runner was started."""
        lines = self._client.get("/metrics").text.splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(_LOADS))


@contextmanager
def serving(folder: Path, program: Path | None, settings: str = "") -> Iterator[Daemon]:
    """Runs a daemon with folders of its own, but for the cache of engines."""
    config = folder / "config.toml"
    engine = f'[backends."llama.cpp"]\nllama_server = "{program}"\n' if program else ""
    config.write_text(settings + engine, "utf-8")
    places = {"DATA_DIR": folder / "data", "RUNTIME_DIR": folder / "run", "CONFIG": config, "LISTEN": ""}
    daemon = Daemon(os.environ | {f"MODELRUNNER_{name}": str(value) for name, value in places.items()})
    try:
        yield daemon
    finally:
        daemon.run("shutdown")


def figures(memory: dict[str, Any] | None) -> str:
    return "" if memory is None else " + ".join(f"{size / MIB:.0f}" for size in (memory["ram"], *memory["vram"]))


def row(daemon: Daemon, name: str, sizes: Sizes, case: Case) -> None:
    layers = [] if case.layers is None else ["--gpu-layers", str(round(case.layers * (sizes.layers + 1)))]
    words = [
        "--context-size",
        str(case.context),
        "--parallel",
        str(case.parallel),
        "--runtime-flags",
        " ".join(case.flags),
    ]
    chosen = ["--set", f"llamacpp.devices={json.dumps(case.devices) if case.devices else 'null'}"]
    daemon("configure", name, *words, *layers, *chosen)
    fit = daemon("fit", name)
    began = time.monotonic()
    daemon("preload", name)
    seconds = time.monotonic() - began
    ready = status(daemon)
    prompt = daemon.complete(name, "th " * min(2000, case.context // 4), 4)
    answer = daemon.complete(name, "th ", 128)
    for number in range(case.parallel):
        daemon.complete(name, f"{number} " + "th " * (case.context // 2 - 200), 4)
    full = status(daemon)
    cells = [
        figures(fit["needed"]),
        ready["variant"],
        ", ".join(str(i) for i, size in enumerate(ready["memory"]["estimated"]["vram"]) if size) or "processor",
        figures(ready["memory"]["estimated"]),
        figures(ready["memory"]["measured"]),
        figures(full["memory"]["measured"]),
        f"{seconds:.1f} s",
        f"{prompt['prompt_per_second']:.0f}",
        f"{answer['predicted_per_second']:.1f}",
    ]
    print(f"| {name} {case} | {' | '.join(cells)} |", flush=True)
    daemon("unload", name)
    daemon("configure", name, "--gpu-layers", "default")


def status(daemon: Daemon) -> dict[str, Any]:
    """Returns the entry of `ps` of the only runner."""
    runner, *others = daemon("ps")
    assert not others
    entry: dict[str, Any] = runner
    return entry


def run(arguments: argparse.Namespace, folder: Path) -> None:
    files = {name: folder / f"{name}.gguf" for name in arguments.sizes}
    for name, file in files.items():
        if not file.exists():
            random_llama.write(file, SIZES[name])
    with serving(folder, arguments.llama_server) as daemon:
        if arguments.llama_server is None:
            daemon.run("install", "llama.cpp")
        devices = daemon("status")["devices"]
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
        for name, file in files.items():
            daemon("package", "--gguf", str(file), f"random/{name.lower()}")
            for case in cases(len(devices)):
                case = replace(case, context=min(case.context, SIZES[name].context))
                if arguments.rows.search(f"{name} {case}"):
                    row(daemon, f"random/{name.lower()}", SIZES[name], case)
    if devices and arguments.rows.search("in turn"):
        reserve = max(0, min(device["total"] for device in devices) - ROOM)
        settings = f"memory_budget = {psutil.virtual_memory().available * 9 // 10}\nmemory_reserve = {reserve}\n"
        with serving(folder, arguments.llama_server, settings) as daemon:
            in_turn(daemon, len(devices), folder)


def in_turn(daemon: Daemon, devices: int, folder: Path) -> None:
    """Asks models that take most of a device each, and prints how often they were loaded."""
    names = [f"turn{number}" for number in range(max(2, devices) + 2)]
    for number, name in enumerate(names):  # of other files each: names of the same files share a runner
        file = random_llama.write(folder / f"{name}.gguf", replace(IN_TURN, vocabulary=200 + number))
        daemon("package", "--gguf", str(file), name)
        daemon("configure", name, "--context-size", str(TOKENS), "--parallel", "1")
    by_chance = random.Random(6).choices(names, [1 / rank for rank in range(1, len(names) + 1)], k=80)
    for law, asked in (("in turn", names[: max(2, devices)] * (60 // max(2, devices))), ("by a Zipf law", by_chance)):
        daemon.run("unload", "--all")
        before, began = daemon.loads(), time.monotonic()
        for name in asked:
            daemon.complete(name, "th", 1)
        what = f"{len(set(asked))} models {law} on {devices} device{'s' if devices > 1 else ''}"
        took, loads = time.monotonic() - began, daemon.loads() - before
        least = fewest_loads(asked, devices)
        print(f"{what}: {len(asked)} requests in {took:.0f} s, {loads} loads (known ahead: {least})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: text.split(","), default=["1B", "8B"], help=", ".join(SIZES))
    parser.add_argument("--llama-server", type=Path, help="instead of the installed engine")
    parser.add_argument("--rows", type=re.compile, default=re.compile(""), help="only those that it is found in")
    parser.add_argument("--folder", type=Path, help="keeps the models from run to run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        run(arguments, folder)


if __name__ == "__main__":
    main()
