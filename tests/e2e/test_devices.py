"""llama.cpp on devices of 2 GiB each, which the processor plays (Mesa's llvmpipe, Vulkan), the engine's own or each of
a `ggml-rpc-server`: placements, evictions and deaths of a real engine. The first run compiles shaders for a minute;
they stay in the cache."""

import json
import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from modelrunner.config.locations import Locations
from modelrunner_llamacpp.engines import EngineKind
from tests.e2e.conftest import StartDaemon, cached_engine
from tests.e2e.daemons import Daemon, command_line, until
from tests.hindsight import fewest_loads
from tests.models import random_llama
from tests.models.random_llama import Sizes
from tests.ports import reserved_port

HALF_GIB = 1 << 29
# Layers of the made models. With a context of 32,768 tokens each layer takes 64 MiB of cache and a little more: of the
# 1.8 GiB that a device may give, these take 0.7, 1.2 and 1.6 GiB, and the last one more than one device has.
LAYERS = {"small": 4, "middle": 11, "large": 17, "split": 30}


@pytest.fixture(scope="module", autouse=True)
def engine() -> None:
    """That of the other files is not asked for."""


def write(file: Path, layers: int, number: int) -> Path:
    """Models of one size have other files, since names of the same files share a runner: the `number` is one of words
    that no text has."""
    shape = Sizes(512, 512, layers, heads=8, kv_heads=8, context=98_304, vocabulary=200 + number)
    return random_llama.write(file, shape)


@pytest.fixture(params=["own", pytest.param("rpc", marks=pytest.mark.nightly)])
def means(request: pytest.FixtureRequest) -> str:
    """Whose the devices are: the engine's, or those of servers."""
    kind: str = request.param
    return kind


@pytest.fixture
def start(means: str, make_daemon: StartDaemon, tmp_path: Path) -> Iterator[Any]:
    """Starts a daemon with so many devices, and models by name, each of a size in `LAYERS`."""
    programs = cached_engine(EngineKind.NATIVE, vulkan=True) / "bin"
    started: list[Daemon] = []
    servers: list[subprocess.Popen[bytes]] = []
    ports = ExitStack()

    def serve() -> str:
        """Starts a server with one device."""
        port = ports.enter_context(reserved_port())
        environment = os.environ | {"GGML_VK_VISIBLE_DEVICES": "0", "MESA_SHADER_CACHE_DIR": str(shaders)}
        command = [str(programs / "ggml-rpc-server"), "-p", str(port)]
        servers.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        until(lambda: answers(port))
        return f"127.0.0.1:{port}"

    def begin(devices: int, **models: str) -> Daemon:
        daemon = make_daemon(None, models=False)
        config = f'[backends."llama.cpp"]\nllama_server = "{programs}/llama-server"\n'
        if means == "own":
            daemon.environment["GGML_VK_VISIBLE_DEVICES"] = ",".join(["0"] * devices)
        else:
            config += f"rpc = {json.dumps([serve() for _ in range(devices)])}\n"
        daemon.data.parent.joinpath("config.toml").write_text(config)
        daemon.start()
        started.append(daemon)
        for number, (name, size) in enumerate(models.items()):
            file = write(tmp_path / f"{name}.gguf", LAYERS[size], number)
            assert daemon.run("package", "--gguf", str(file), name).returncode == 0
            assert daemon.run("configure", name, "--context-size", "32768", "--parallel", "1").returncode == 0
        return daemon

    shaders = Locations.find().cache / "llama.cpp-shaders"
    yield begin
    for daemon in started:
        daemon.stop()
    for server in servers:
        server.kill()
        server.wait()
    ports.close()


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def ask(daemon: Daemon, model: str) -> str:
    """Returns in which way the model ran, "" for the whole of it."""
    answer = daemon.post("/v1/completions", {"model": model, "prompt": "th", "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    way: str = answer.headers.get("X-Modelrunner-Variant", "")
    return way


def places(daemon: Daemon) -> dict[str, list[int]]:
    """Returns the devices on which each loaded model counts."""
    return {
        runner["model_name"]: [number for number, size in enumerate(runner["memory"]["estimated"]["vram"]) if size]
        for runner in daemon.runners()
    }


def loads(daemon: Daemon) -> list[str]:
    lines = daemon.get("/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith('modelrunner_events_total{event="load"')]
    return [line.split('model="')[1].split('"')[0] for line in counts for _ in range(int(float(line.split()[-1])))]


def options(daemon: Daemon, model: str) -> list[str]:
    [pid] = [runner["pid"] for runner in daemon.runners() if runner["model_name"] == model]
    return command_line(psutil.Process(pid)).split()


def test_two_models_stand_side_by_side_and_a_third_takes_the_place_of_the_one_not_used(start: Any) -> None:
    daemon = start(2, a="middle", b="middle", c="middle")
    for number in range(60):
        assert ask(daemon, "ab"[number % 2]) == ""
    assert sorted(loads(daemon)) == ["a", "b"]
    assert sorted(places(daemon).values()) == [[0], [1]]
    assert "on device" in daemon.run("fit", "c").stdout
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(ask, daemon, "c")
        while not third.done():
            ask(daemon, "a")
        assert third.result() == ""
    assert sorted(places(daemon)) == ["a", "c"]
    assert sorted(places(daemon).values()) == [[0], [1]]


def test_a_model_computes_on_the_device_that_somebody_chose(start: Any, means: str) -> None:
    daemon = start(2, a="small", b="small")
    assert daemon.run("configure", "a", "--set", "llamacpp.devices=[1]").returncode == 0
    ask(daemon, "a")
    assert places(daemon) == {"a": [1]}
    words = options(daemon, "a")
    assert words[words.index("--device") + 1] == ("Vulkan1" if means == "own" else "RPC0")  # of the server that it uses
    assert "device 1" in daemon.run("ps").stdout
    for wrong in ("llamacpp.devices=[2]", "llamacpp.main-device=5"):
        assert daemon.run("configure", "b", "--set", wrong).returncode == 0
        refused = daemon.post("/v1/completions", {"model": "b", "prompt": "th"})
        assert (refused.status_code, "devices 0 to 1" in refused.text) == (400, True)
        assert daemon.run("configure", "b", "--set", f"{wrong.split('=')[0]}=null").returncode == 0
    assert places(daemon) == {"a": [1]}


def test_a_model_larger_than_a_device_is_split(start: Any, means: str) -> None:
    daemon = start(2, a="split")
    assert ask(daemon, "a") == ""
    assert places(daemon) == {"a": [0, 1]}
    words = options(daemon, "a")
    assert words[words.index("--device") + 1] == ("Vulkan0,Vulkan1" if means == "own" else "RPC0,RPC1")
    assert sum(map(int, words[words.index("--tensor-split") + 1].split(","))) == LAYERS["split"] + 1


def test_a_model_larger_than_all_devices_computes_on_the_processor_too(start: Any) -> None:
    daemon = start(2, b="split")
    assert daemon.run("configure", "b", "--context-size", "98304").returncode == 0
    way = ask(daemon, "b")
    assert way.endswith(f"of {LAYERS['split']} layers on the GPU")
    assert 0 < int(way.split()[0]) < LAYERS["split"]
    assert list(places(daemon)) == ["b"]


def test_an_engine_that_is_killed_frees_its_device(start: Any) -> None:
    daemon = start(1, a="middle", b="middle")
    ask(daemon, "a")
    [runner] = daemon.runners()
    os.kill(runner["pid"], signal.SIGKILL)
    until(lambda: not daemon.runners())
    assert ask(daemon, "b") == ""
    assert places(daemon) == {"b": [0]}


@pytest.mark.parametrize("means", ["own"], indirect=True)
def test_an_allocation_that_fails_for_real_leads_to_another_device(start: Any, tmp_path: Path) -> None:
    """Device 0 has less memory than it says: an engine that uses it may have no more than it needs to begin."""
    daemon = start(2, a="middle")
    assert daemon.run("configure", "a", "--set", "llamacpp.devices=[1]").returncode == 0
    ask(daemon, "a")
    [runner] = daemon.runners()
    size = psutil.Process(runner["pid"]).memory_info().vms
    program = daemon.data.parent / "llama-server"
    real = cached_engine(EngineKind.NATIVE, vulkan=True) / "bin/llama-server"
    program.write_text(f"""#!/bin/sh
case "$*" in *"--device Vulkan0"*) ulimit -v {size - HALF_GIB >> 10} ;; esac
exec {real} "$@"
""")
    program.chmod(0o755)
    daemon.stop()
    daemon.data.parent.joinpath("config.toml").write_text(f'[backends."llama.cpp"]\nllama_server = "{program}"\n')
    daemon.start(sandbox="off")  # a script may start no other program there
    assert daemon.run("configure", "a", "--set", "llamacpp.devices=null").returncode == 0
    assert ask(daemon, "a") == ""
    assert places(daemon) == {"a": [1]}
    tries = len(loads(daemon))
    assert tries > 1
    assert daemon.run("unload", "a").returncode == 0
    ask(daemon, "a")
    assert (places(daemon), len(loads(daemon))) == ({"a": [1]}, tries + 1), "the next start knows it"


@pytest.mark.parametrize("means", [pytest.param("rpc", marks=pytest.mark.nightly)], indirect=True)
def test_the_plan_goes_on_without_a_server_that_ended(start: Any) -> None:
    daemon = start(1, a="small")
    assert ask(daemon, "a") == ""
    for server in psutil.Process().children():
        if server.name() == "ggml-rpc-server":
            server.kill()
    lost = daemon.post("/v1/completions", {"model": "a", "prompt": "th", "max_tokens": 1})
    assert (lost.status_code, "`ggml-rpc-server`" in lost.text) == (502, True)
    until(lambda: "(RPC0 of llama.cpp): not used, it does not answer" in daemon.run("status").stdout)
    assert ask(daemon, "a") == f"0 of {LAYERS['small']} layers on the GPU"


@pytest.mark.nightly
@pytest.mark.parametrize("means", ["own"], indirect=True)
def test_six_models_on_four_devices_load_little_more_often_than_in_hindsight(start: Any) -> None:
    """Not on servers: Mesa's driver ends one now and then when many engines follow one another on it."""
    daemon = start(4, **dict.fromkeys("abcdef", "middle"))
    chance = random.Random(6)
    asked = chance.choices("abcdef", [1 / rank for rank in range(1, 7)], k=80)
    for model in asked:
        before = set(places(daemon))
        assert ask(daemon, model) == ""
        there = set(places(daemon))
        gone = before - there
        assert there - before == {model} - before
        assert len(gone) == (model not in before and len(before) == 4), "one goes, once every device is full"
    done, fewest = len(loads(daemon)), fewest_loads(asked, 4)
    print(f"{done} loads for {len(asked)} requests, in hindsight {fewest}")
    assert done <= 30, "which one goes depends on the time that loads take; by chance it is 20, rarely 26"
