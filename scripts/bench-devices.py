"""What llama.cpp's runs take of each device, and how fast they are there: models of random weights in the sizes that
people use, run by a daemon of this script's own, each in several placements. Prints the table of docs/memory.md, in MiB
(predicted / measured) and tokens per second.

A row of `fit` is what the daemon predicts before the first load, `ready` what it measures right after the load, and
`full` what it measures after the context of every sequence was filled. Speeds are the engine's own figures for one
prompt and one answer.

Usage: bench-devices.py [--sizes 1B,8B] [--llama-server PROGRAM] [--rows REGEX] [--folder FOLDER]
"""

import argparse
import json
import os
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

from tests.models import random_llama
from tests.models.random_llama import Sizes

MIB = 1 << 20
# Named after published models of that shape: Llama 3.2 1B, Llama 3.1 8B, Qwen 2.5 32B.
SIZES = {
    "tiny": Sizes(),
    "1B": Sizes(2048, 8192, 16, 32, 8, 131_072, 128_256, quantized=True),
    "8B": Sizes(4096, 14_336, 32, 32, 8, 131_072, 128_256, quantized=True),
    "32B": Sizes(5120, 27_648, 64, 40, 8, 131_072, 152_064, quantized=True),
}

COLUMNS = ("model, context / sequences", "fit", "variant", "predicted", "ready", "full", "load", "prompt", "answer")


@dataclass(frozen=True)
class Case:
    """A way to run a model: `layers` of it on devices (a share of all, None for as many as fit)."""

    context: int
    parallel: int
    layers: float | None = None
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        placed = [] if self.layers is None else [f"{self.layers:.0%} of the layers"]
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


@contextmanager
def serving(folder: Path, program: Path | None) -> Iterator[Daemon]:
    """Runs a daemon with folders of its own, but for the cache of engines."""
    config = folder / "config.toml"
    config.write_text(f'[backends."llama.cpp"]\nllama_server = "{program}"\n' if program else "", "utf-8")
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
    daemon("configure", name, *words, *layers)
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
        print(
            "| model, context / sequences | fit | variant | ready, predicted | ready | full | load | prompt | answer |"
        )
        print("|---|---|---|---|---|---|---|---|---|", flush=True)
        for name, file in files.items():
            daemon("package", "--gguf", str(file), f"random/{name.lower()}")
            for case in CASES:
                case = replace(case, context=min(case.context, SIZES[name].context))
                if arguments.rows.search(f"{name} {case}"):
                    row(daemon, f"random/{name.lower()}", SIZES[name], case)


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
