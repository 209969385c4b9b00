"""A real Ray cluster on this machine: a head, nodes, and a daemon."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.waiting import HUNG


class Cluster:
    """The daemon's own budget is `memory`. The daemon, and the host of each node, have the `engines` of a
    configuration beside the known ones."""

    def __init__(self, folder: Path, memory: str = "64MiB", engines: str = "") -> None:
        self.folder = folder
        self.temporary = Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets are in it, so its path is short
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        cache = os.environ.get("MODELRUNNER_CACHE_DIR") or str(Path.home() / ".cache/modelrunner")
        self.socket = self.temporary / "run/modelrunner.sock"
        self.environ = os.environ | {
            "HOME": str(folder),
            "MODELRUNNER_CACHE_DIR": cache,
            "MODELRUNNER_CONFIG": str(folder / "head.toml"),
            "MODELRUNNER_DATA_DIR": str(folder / "head"),
            "MODELRUNNER_LISTEN": "",
            "MODELRUNNER_RUNTIME_DIR": str(self.socket.parent),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        table = f'[cluster]\nray_address = "{self.address}"\n'
        (folder / "head.toml").write_text(f'memory_budget = "{memory}"\n{table}{engines}')
        (folder / "node.toml").write_text(engines)

    def ray(self, *arguments: str, **variables: str) -> None:
        """Starts a node, whose processes go on in the background."""
        here = ["--node-ip-address", "127.0.0.1", "--num-cpus", "1", "--disable-usage-stats"]
        command = [str(Path(sys.executable).with_name("ray")), "start", "--temp-dir", str(self.temporary), *here]
        environ = self.environ | variables
        subprocess.run([*command, *arguments], env=environ, check=True, capture_output=True, timeout=4 * HUNG)

    def start(self) -> None:
        self.ray("--head", "--port", self.address.rpartition(":")[2], "--include-dashboard", "false")

    def join(self, name: str, *has: str, memory: str = "2GiB") -> None:
        """A node comes, whose host has that budget."""
        node = {
            "MODELRUNNER_CONFIG": str(self.folder / "node.toml"),
            "MODELRUNNER_DATA_DIR": str(self.folder / name),
            "MODELRUNNER_MEMORY_BUDGET": memory,
            "MODELRUNNER_RUNTIME_DIR": str(self.temporary / name),
        }
        self.ray("--address", self.address, "--node-name", name, *has, **node)

    def close(self) -> None:
        """Ends what it started, and no other Ray of the machine."""
        wait(lambda: not self._ended())
        shutil.rmtree(self.temporary)

    def _ended(self) -> int:
        """Kills our descendants, and returns how many there were. Ray's workers overwrite their environment."""
        ended = 0
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                mine = _environment(process, "HOME") == str(self.folder) or "ray::" in process.name()
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    ended += 1
        return ended

    def python(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, self.address, *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=self.environ, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

    def run(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "modelrunner", *arguments]
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=4 * HUNG
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def runners(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.run("ps", "--json"))
        return found

    def states(self) -> list[str]:
        return [host["state"] for host in json.loads(self.run("hosts", "list", "--json"))["hosts"]]

    def budget(self) -> int:
        """Bytes of main memory that our runners may have on the node."""
        [host] = json.loads(self.run("hosts", "list", "--json"))["hosts"]
        return int(host["budget"]["ram"])

    def processes(self) -> list[psutil.Process]:
        """What runs on the node for us."""
        mark = str(self.folder / "node")
        return [
            process
            for process in psutil.process_iter()
            if mark in _environment(process, "MODELRUNNER_DATA_DIR") and _is_ours(process)
        ]


def _environment(process: psutil.Process, name: str) -> str:
    try:
        return process.environ().get(name, "")
    except psutil.Error:
        return ""


def _is_ours(process: psutil.Process) -> bool:
    try:
        return "modelrunner" in process.cmdline()
    except psutil.Error:
        return False


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + 4 * HUNG
    while not until():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.2)
