"""A server of others, made from the package index, as a command of the configuration file."""

import json
import os
import signal

from modelrunner_llamacpp.engines import EngineKind
from tests.e2e.conftest import SMOLLM2, StartDaemon, cached_engine
from tests.e2e.daemons import until
from tests.models.prompts import PARIS


def test_llama_server_serves_by_a_table_and_comes_back(make_daemon: StartDaemon) -> None:
    program = cached_engine(EngineKind.NATIVE, vulkan=True) / "bin/llama-server"
    words = [str(program), "-m", "{model}", "--host", "{host}", "--port", "{port}", "-c", "{context}"]
    daemon = make_daemon(None)
    daemon.data.parent.joinpath("config.toml").write_text(
        f"[engines.mine]\ncommand = {json.dumps([*words, '--alias', '{name}'])}\n"
        'environment = { LLAMA_API_KEY = "{key}" }\n'
    )
    daemon.start()
    assert daemon.run("configure", SMOLLM2, "--backend", "mine").returncode == 0
    answer = daemon.chat(SMOLLM2, max_tokens=24)
    assert answer.status_code == 200, answer.text
    assert PARIS in answer.json()["choices"][0]["message"]["content"]
    streamed = daemon.chat(SMOLLM2, max_tokens=24, stream=True).text.splitlines()
    events = [line.removeprefix("data: ") for line in streamed if line.startswith("data: ")]
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert PARIS in "".join(choice["delta"].get("content") or "" for choice in choices)
    assert events[-1] == "[DONE]"
    [runner] = daemon.runners()
    assert (runner["backend_name"], runner["state"]) == ("mine", "ready")
    os.kill(runner["pid"], signal.SIGKILL)
    until(lambda: all(each["pid"] != runner["pid"] for each in daemon.runners()))
    assert daemon.chat(SMOLLM2, max_tokens=1).status_code == 200
    assert daemon.chat(SMOLLM2, messages="no list").status_code == 400
    assert daemon.run("unload", "--all").returncode == 0
    assert daemon.runners() == []
