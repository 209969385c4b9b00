"""A daemon with hosts, each a process of its own as on a cluster, with the double of Ray and engines of the tests."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.daemons import Daemon, environment, until
from tests.fakes import FAKE_ENGINE
from tests.pull.models import gguf

DOUBLE = Path(__file__).parent / "ray_double"
OVER_HOSTS = Path(__file__).parent / "over_hosts"
PYTHON = os.path.realpath(sys.executable)
WORDS = 8


def engine_table(*more: str) -> str:
    """A table of the configuration: the engine `mine`, which says `WORDS` words, 40 in a second."""
    engine = [PYTHON, str(FAKE_ENGINE), "--host", "{host}", "--port", "{port}", "--model", "{name}"]
    command = json.dumps([*engine, "--rate", "40", "--tokens", str(WORDS), *more])
    endpoints = '{ "/v1/chat/completions" = "chat" }'
    return f'[engines.mine]\ncommand = {command}\nendpoints = {endpoints}\nmemory = "64MiB"\n'


class Network:
    """A network of its own for a node, at `address`. `cut` drops all packets between it and the head."""

    def __init__(self, number: int) -> None:
        self._name, self._link = f"mr-{os.getpid()}-{number}", f"mr{os.getpid()}h{number}"[-15:]
        first = 4 * (
            (2 * os.getpid() + number) % (1 << 14)
        )  # so that runs at the same time, and what one left, do not meet
        here, self.address = [f"10.213.{last >> 8}.{last & 255}" for last in (first + 1, first + 2)]
        self.inside = ["ip", "netns", "exec", self._name]
        _do("ip", "netns", "add", self._name)
        _do("ip", "link", "add", self._link, "type", "veth", "peer", "name", "there", "netns", self._name)
        _do("ip", "address", "add", f"{here}/30", "dev", self._link)
        _do("ip", "link", "set", self._link, "up")
        _do(*self.inside, "ip", "address", "add", f"{self.address}/30", "dev", "there")
        for device in ("there", "lo"):
            _do(*self.inside, "ip", "link", "set", device, "up")

    def cut(self, cut: bool) -> None:
        for chain, way in (("INPUT", "-i"), ("OUTPUT", "-o")):
            _do(*self.inside, "iptables", "-A" if cut else "-D", chain, way, "there", "-j", "DROP")

    def close(self) -> None:
        _do("ip", "netns", "del", self._name)

    @staticmethod
    def is_possible() -> bool:
        tools = all(shutil.which(tool) for tool in ("ip", "iptables"))
        return tools and os.geteuid() == 0 and subprocess.run(["unshare", "-n", "true"], check=False).returncode == 0


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Rig:
    """The head has no room for a model; each node has room for one of the `models`. Nodes that are `apart` have
    networks of their own; they look for the head's models at the same path with `shared`."""

    def __init__(
        self,
        folder: Path,
        nodes: tuple[str, ...] = ("b", "c"),
        models: tuple[str, ...] = ("m", "n"),
        *,
        apart: bool = False,
        shared: bool = False,
    ) -> None:
        self.folder, self.models = folder, models
        self.networks = {name: Network(number) for number, name in enumerate(nodes)} if apart else {}
        self.ray = folder / "ray"
        self.ray.mkdir()
        self.tag = f"tag-of-{folder.name}-{os.getpid()}"
        self._short = tempfile.TemporaryDirectory(prefix="mr-")  # paths of sockets are short
        table = f'[cluster]\nray_address = "127.0.0.1:1"\nshared = {str(shared).lower()}'
        self.configure("1MiB", table, folder / "config.toml")
        self.configure("100MiB", "", folder / "host.toml")
        self.nodes: dict[str, dict[str, Any]] = {}
        self._joined = 0
        for name in nodes:
            self.join(name)
        variables = environment(folder / "head", Path(self._short.name) / "head")
        paths = [str(DOUBLE), str(OVER_HOSTS), str(Path(__file__).parents[2])]
        variables |= {"PYTHONPATH": os.pathsep.join(paths), "FAKE_RAY": str(self.ray), "ENGINES_TAG": self.tag}
        self.head = Daemon(folder / "head", Path(self._short.name) / "head/modelrunner.sock", variables)

    def configure(self, budget: str, more: str, file: Path) -> None:
        engine = engine_table("--only-for", self.tag)
        file.write_text(f'memory_budget = "{budget}"\nlisten = ""\n{engine}{more}\n')

    def join(self, name: str, command: Sequence[str] = ()) -> None:
        """A node comes, or comes back; its programs are started by the `command`."""
        self._joined += 1
        here = environment(self.folder / name, Path(self._short.name) / name)
        variables = {key: value for key, value in here.items() if key.startswith("MODELRUNNER_")}
        variables["MODELRUNNER_CONFIG"] = str(self.folder / "host.toml")
        network = self.networks.get(name)
        place = {
            "address": network.address if network else "127.0.0.1",
            "command": network.inside if network else [*command],
        }
        self.nodes[f"node{self._joined}"] = {"name": name, "alive": True, "environment": variables, **place}
        self._write()

    def die(self, name: str) -> None:
        """Ray tells that the node is gone."""
        for node in self.nodes.values():
            if node["name"] == name:
                node["alive"] = False
        self._write()

    def _write(self) -> None:
        new = self.ray / "new"
        new.write_text(json.dumps(self.nodes))
        new.rename(self.ray / "nodes.json")

    def start(self) -> None:
        self.head.start()
        until(lambda: self.states() == {node["name"]: "ready" for node in self.nodes.values()})

    def add_models(self) -> None:
        for seed, name in enumerate(self.models):
            file = self.folder / f"{name}.gguf"
            file.write_bytes(gguf(seed=seed))
            made = self.head.post("/models/create", {"from": file.as_uri(), "name": name})
            assert "success: " in made.text, made.text

    def states(self) -> dict[str, str]:
        return {host["name"]: host["state"] for host in self.head.get("/hosts").json()["hosts"]}

    def ask(self, model: str, engine: str = "mine", **fields: Any) -> Any:
        body = {"model": model, "messages": [{"role": "user", "content": "x"}], **fields}
        return self.head.post(f"/engines/{engine}/v1/chat/completions", body)

    def engines(self) -> list[psutil.Process]:
        """All that live, wherever they are."""
        return [process for process in psutil.process_iter() if self.tag in _words(process)]

    def host(self, name: str) -> psutil.Process | None:
        """The process of the host on that node."""
        return next((p for p in self._of(name) if "host" in _words(p)[-2:]), None)

    def actor(self, name: str) -> psutil.Process | None:
        return next((p for p in self._of(name) if "-c" in _words(p)), None)

    def members(self) -> psutil.Process | None:
        """The process that asks Ray."""
        below = self.head.descendants()
        return next((p for p in below if "modelrunner.cluster.raymembers" in _words(p)), None)

    def _of(self, name: str) -> Iterator[psutil.Process]:
        place = str(self.folder / name)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("MODELRUNNER_DATA_DIR") == place:
                    yield process

    def close(self) -> None:
        """Ends everything. Fails if something is left."""
        if self.head.process is not None:
            self.head.stop()
        until(lambda: not self.engines() and not [p for node in self.nodes.values() for p in self._of(node["name"])])
        for network in self.networks.values():
            network.close()
        while ending := [process for process in psutil.Process().children() if not _words(process)]:
            for process in ending:  # whose parents were killed
                process.wait()
        self._short.cleanup()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    except psutil.Error:
        return []


def killed(process: psutil.Process | None, how: int = signal.SIGKILL) -> bool:
    """True if it was there to be killed."""
    if process is None:
        return False
    with suppress(psutil.Error):
        process.send_signal(how)
        return True
    return False
