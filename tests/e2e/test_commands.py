"""Servers of others, from the package index, as commands of the configuration file."""

import json
import os
import signal

import pytest

from modelrunner.config.locations import Locations
from modelrunner_llamacpp.engines import EngineKind
from tests.e2e.conftest import SMOLLM2, StartDaemon, cached_engine
from tests.e2e.daemons import Daemon, until
from tests.models.prepare import SMOLLM2_SAFETENSORS
from tests.models.prompts import PARIS


def llama_server() -> str:
    program = cached_engine(EngineKind.NATIVE, vulkan=True) / "bin/llama-server"
    words = [str(program), "-m", "{model}", "--host", "{host}", "--port", "{port}", "-c", "{context}"]
    return f'command = {json.dumps([*words, "--alias", "{name}"])}\nenvironment = {{ LLAMA_API_KEY = "{{key}}" }}\n'


def mlx_server() -> str:
    folder = Locations.find().cache / "clients/pypi-mlx-lm-0.32.2"
    if not (folder / "ready").exists():
        pytest.skip(f"no {folder}: scripts/install-clients --all")
    words = [str(folder / "bin/mlx_lm.server"), "--model", "{folder}", "--host", "{host}", "--port", "{port}"]
    return (
        f'command = {json.dumps(words)}\nformats = ["safetensors"]\nmodel-name = "default_model"\n'
        'endpoints = { "/v1/chat/completions" = "chat", "/v1/completions" = "completion" }\n'
    )


def configured(make_daemon: StartDaemon, table: str, model: str) -> Daemon:
    daemon = make_daemon(None)
    daemon.data.parent.joinpath("config.toml").write_text(f"[engines.mine]\n{table}")
    daemon.start()
    assert daemon.run("configure", model, "--backend", "mine").returncode == 0
    return daemon


def serves_and_comes_back(daemon: Daemon, model: str) -> None:
    answer = daemon.chat(model, max_tokens=24)
    assert answer.status_code == 200, answer.text
    assert PARIS in answer.json()["choices"][0]["message"]["content"]
    streamed = daemon.chat(model, max_tokens=24, stream=True).text.splitlines()
    events = [line.removeprefix("data: ") for line in streamed if line.startswith("data: ")]
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert PARIS in "".join(choice["delta"].get("content") or "" for choice in choices)
    assert events[-1] == "[DONE]"
    [runner] = daemon.runners()
    assert (runner["backend_name"], runner["state"]) == ("mine", "ready")
    os.kill(runner["pid"], signal.SIGKILL)
    until(lambda: all(each["pid"] != runner["pid"] for each in daemon.runners()))
    assert daemon.chat(model, max_tokens=1).status_code == 200
    assert daemon.chat(model, messages="no list").status_code == 400
    assert daemon.run("unload", "--all").returncode == 0
    assert daemon.runners() == []


def test_llama_server_serves_by_a_table_and_comes_back(make_daemon: StartDaemon) -> None:
    serves_and_comes_back(configured(make_daemon, llama_server(), SMOLLM2), SMOLLM2)


@pytest.mark.nightly
def test_mlx_serves_by_a_table_and_comes_back(make_daemon: StartDaemon) -> None:
    serves_and_comes_back(configured(make_daemon, mlx_server(), SMOLLM2_SAFETENSORS), SMOLLM2_SAFETENSORS)
