"""Settings about devices that are not there, over HTTP, with engines that list made-up ones: a 400 with what there is,
and nobody leaves for a run that cannot start."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from modelrunner.backend import Backend, BackendContext
from modelrunner.store import Store
from modelrunner_llamacpp import LlamaCppBackend
from modelrunner_vllm import VllmBackend
from tests.api.conftest import Daemon, StartDaemon
from tests.fakes import FAKE_ENGINE
from tests.store.folders import add_folder, model_files

SHAPE = {
    "llama.block_count": 4,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
}
_LLAMA = f"""#!/bin/sh
case "$*" in
  *--version*) echo 'version: 11549 (abc)'; exit ;;
  *--list-devices*)
    echo "Available devices:"
    echo "  Vulkan0: llvmpipe (2048 MiB, 2048 MiB free)"
    echo "  Vulkan1: llvmpipe (2048 MiB, 2048 MiB free)"
    exit ;;
esac
while [ "$1" != --host ]; do shift; done
exec {sys.executable} {FAKE_ENGINE} --socket "$2"
"""
_TORCH = """#!/bin/sh
echo '[["0", "a card", 2147483648, 2147483648, "GPU-a"]]'
"""


def script(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


@pytest.fixture
async def daemon(start_daemon: StartDaemon, tmp_path: Path) -> Daemon:
    """llama.cpp has devices 0 and 1, vLLM one that is device 2 of the machine. The model `here` is loaded."""

    def context(name: str, **settings: object) -> BackendContext:
        return BackendContext(tmp_path / name, tmp_path / "cache", tmp_path / "logs", settings)

    program = script(tmp_path / "bin/llama-server", _LLAMA)
    script(tmp_path / "vllm/vllm/bin/python", _TORCH)
    (tmp_path / "vllm/vllm/engine.json").write_text(json.dumps({"kind": "cuda", "version": "1"}))
    backends: dict[str, Backend] = {
        "llama.cpp": LlamaCppBackend(context("llama.cpp", llama_server=str(program))),
        "vllm": VllmBackend(context("vllm")),
    }
    (tmp_path / "data_dir").mkdir()
    add_folder(Store(tmp_path / "data_dir"), "weights", model_files())
    daemon = await start_daemon(models={"here": 0, "asked": 1}, metadata=SHAPE, backends=backends, sandbox="off")
    assert (await ask(daemon, "here"))[0] == 200
    return daemon


async def ask(daemon: Daemon, model: str) -> tuple[int, str]:
    body = {"model": model, "prompt": "th", "max_tokens": 1}
    async with daemon.unix.post("/v1/completions", json=body) as answer:
        return answer.status, await answer.text()


async def configure(daemon: Daemon, model: str, **settings: Any) -> tuple[int, str]:
    body = {"model": model, **settings}
    async with daemon.unix.post("/engines/_configure", json=body) as answer:
        return answer.status, await answer.text()


async def loaded(daemon: Daemon) -> list[str]:
    async with daemon.unix.get("/engines/ps") as answer:
        return [runner["model_name"] for runner in await answer.json()]


@pytest.mark.parametrize(
    ("model", "settings", "param", "there"),
    [
        (
            "asked",
            {"llamacpp": {"devices": [7]}},
            "llamacpp.devices",
            "no device 7 for llama.cpp",
        ),
        ("asked", {"llamacpp": {"devices": [0, 2]}}, "llamacpp.devices", "devices 0 to 1"),  # 2 is vLLM's
        ("asked", {"llamacpp": {"main-device": 2}}, "llamacpp.devices", "devices 0 to 1"),
        ("asked", {"runtime-flags": ["--tensor-split", "1,1,1"]}, "runtime-flags", "devices 0 to 1"),
        ("asked", {"runtime-flags": ["--main-gpu", "2"]}, "runtime-flags", "devices 0 to 1"),
        ("weights", {"vllm": {"devices": [1]}}, "vllm.devices", "no device 1: vLLM has 1 here"),
        ("weights", {"vllm": {"tensor-parallel-size": 2}}, "vllm.tensor-parallel-size", "2 workers need a device each"),
    ],
)
async def test_a_device_that_is_not_there_is_a_mistake_and_nobody_leaves_for_it(
    model: str, settings: dict[str, Any], param: str, there: str, daemon: Daemon
) -> None:
    status, told = await configure(daemon, model, **settings)
    assert status == 202, told
    status, told = await ask(daemon, model)
    assert (status, json.loads(told)["error"]["param"]) == (400, param)
    assert there in told
    assert await loaded(daemon) == ["here"]


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"llamacpp": {"devices": [0, 0]}}, "llamacpp"),
        ({"llamacpp": {"devices": [0], "main-device": 1}}, "llamacpp"),
        ({"llamacpp": {"devices": ["Vulkan0"]}}, "llamacpp.devices"),
        ({"runtime-flags": ["--tensor-split", "1,x"]}, "runtime-flags"),
        ({"runtime-flags": ["--rpc", "10.0.0.2:50052"]}, "runtime-flags"),
    ],
)
async def test_what_can_be_right_nowhere_is_refused_at_once(
    settings: dict[str, Any], param: str, daemon: Daemon
) -> None:
    status, told = await configure(daemon, "asked", **settings)
    assert status == 400, told
    assert json.loads(told)["error"]["param"].startswith(param)
    assert (await ask(daemon, "asked"))[0] == 200


@pytest.mark.skipif(sys.platform == "darwin", reason="has Metal")
@pytest.mark.parametrize("variant", ["opencl", "metal", "rocm"])
async def test_a_variant_that_this_machine_cannot_run(
    variant: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    body = {"backend": "llama.cpp", "variant": variant}
    async with daemon.unix.post("/engines/install-backend", json=body) as answer:
        told = await answer.text()
    assert (answer.status, json.loads(told)["error"]["param"]) == (400, "variant")
    assert "cpu" in told
    assert await loaded(daemon) == ["here"]
