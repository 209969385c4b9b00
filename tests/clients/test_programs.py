"""Clients that live in environments of their own (scripts/install-clients): each is a program that uses its client as
docs/clients.md says, and prints what it got."""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest

from modelrunner.config.locations import Locations
from tests.clients.conftest import StopsTheEngine
from tests.clients.questions import CITIES, CITY, SHOWN, STORY
from tests.e2e.conftest import MINILM, SMOLLM2
from tests.e2e.daemons import Daemon
from tests.models.prompts import MESSAGES, PARIS, QUESTION, SYSTEM
from tests.waiting import HUNG

PROGRAMS = Path(__file__).parent / "programs"


def installed(registry: str, name: str) -> Path:
    """The folder that scripts/install-clients made for a client. Skips the test without it."""
    lines = (line.split()[:3] for line in (PROGRAMS / "versions").read_text().splitlines())
    version = next(version for kind, client, version in lines if (kind, client.partition("[")[0]) == (registry, name))
    folder = Locations.find().cache / "clients" / f"{registry}-{name}-{version}"
    if not (folder / "ready").exists():
        pytest.skip(f"no {folder}: scripts/install-clients")
    return folder


def run(command: list[str | Path], base: str, model: str = SMOLLM2) -> dict[str, Any]:
    """What a program prints for the daemon at `base`."""
    arguments = [base, model, MINILM, json.dumps(MESSAGES)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=HUNG, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_langchain(base: str, stops_the_engine: StopsTheEngine) -> None:
    """It has no list of models."""
    with stops_the_engine():
        found = run([installed("pypi", "langchain-openai") / "bin" / "python", PROGRAMS / "langchain_client.py"], base)
    check(found, "NotFoundError")


def test_litellm(base: str, stops_the_engine: StopsTheEngine) -> None:
    with stops_the_engine():
        found = run([installed("pypi", "litellm") / "bin" / "python", PROGRAMS / "litellm_client.py"], base)
    check(found, "NotFoundError")
    assert {SMOLLM2, MINILM} <= {model.removeprefix("openai/") for model in found["models"]}


@pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK is here")
def test_the_jdks_client_with_its_default_settings(base: str) -> None:
    assert run(["java", PROGRAMS / "JdkClient.java"], base) == {"statuses": [200, 200]}


@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("ai_sdk", {"ai": "ai", "@ai-sdk/openai": "@ai-sdk/openai"}),
        ("genkit", {"genkit": "genkitx-ollama", "genkitx-ollama": "genkitx-ollama"}),
    ],
)
def test_javascript_frameworks(base: str, tmp_path: Path, name: str, packages: dict[str, str]) -> None:
    """The second turn of AI SDK's own provider, and genkit's answers. `packages`: what the program imports, and the
    client with which it was installed."""
    for package, client in packages.items():
        link = tmp_path / "node_modules" / package
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(installed("npm", client) / "node_modules" / package)
    program = shutil.copy(PROGRAMS / f"{name}_client.mjs", tmp_path)
    shown = run(["node", program], base)
    assert PARIS in shown["chat"]
    assert name == "genkit" or len(shown["stream"]) > 5
    assert shown.get("embeddings", [384]) == [384]


def test_langchains_ollama(base: str) -> None:
    """Its embedding of a text that is longer than the model's window."""
    shown = run(
        [installed("pypi", "langchain-ollama") / "bin" / "python", PROGRAMS / "langchain_ollama_client.py"], base
    )
    assert PARIS in shown["chat"]
    assert PARIS in "".join(shown["stream"])
    assert shown["embeddings"] == [384, 384]


def test_mem0(base: str, daemon: Daemon) -> None:
    """Its memories, found by their embeddings; and a new one, for which its prompt of 8,643 tokens is cut to a window
    of 1,024. What so small a model draws from it does not matter."""
    made = daemon.post("/api/create", {"model": "short", "from": SMOLLM2, "parameters": {"num_ctx": 1024}})
    assert made.status_code == 200, made.text
    shown = run([installed("pypi", "mem0ai") / "bin" / "python", PROGRAMS / "mem0_client.py"], base, "short")
    assert shown["found"][0] == "I live in Paris."
    assert shown["drawn"] == ["results"]


@pytest.mark.parametrize(("name", "error"), [("openai", "NotFoundError"), ("ollama", "ResponseError 404")])
def test_javascript_clients(base: str, stops_the_engine: StopsTheEngine, tmp_path: Path, name: str, error: str) -> None:
    modules, program = installed("npm", name) / "node_modules", f"{name}_client.mjs"
    node = shutil.which("node")
    assert node, "npm was there, and node is not"
    shutil.copy(PROGRAMS / program, tmp_path)
    (tmp_path / "node_modules").symlink_to(modules)
    with stops_the_engine():
        found = run([node, tmp_path / program], base)
    check(found, error)
    assert PARIS in found.get("response", PARIS)
    assert {SMOLLM2, MINILM} <= {model.removesuffix(":latest") for model in found["models"]}  # the tag of Ollama
    assert found.get("left", "AbortError") == "AbortError"


def check(found: dict[str, Any], error: str) -> None:
    """What every program prints."""
    assert PARIS in found["chat"]
    assert PARIS in "".join(found["stream"])
    assert len(found["stream"]) > 5
    assert found["structured"]["city"] in CITIES
    assert found["tools"] > SHOWN
    assert found["embeddings"] == [384, 384]
    assert found["error"] == error


class Llm:
    """Simon Willison's command line, with a model of its `extra-openai-models.yaml`, and another that is not here. It
    lists the models of that file, and has no embeddings of such models."""

    def __init__(self, base: str, folder: Path) -> None:
        self.python = installed("pypi", "llm") / "bin" / "python"
        self.environment = os.environ | {"LLM_USER_PATH": str(folder)}
        abilities = f"  api_base: {base}/v1\n  supports_schema: true\n  supports_tools: true\n"
        models = [f"- model_id: {id}\n  model_name: {name!r}\n{abilities}" for id, name in self.models.items()]
        (folder / "extra-openai-models.yaml").write_text("".join(models))

    models: ClassVar[dict[str, str]] = {"here": SMOLLM2, "gone": "nope"}

    def command(self, *options: str, model: str = "here") -> list[str]:
        always = ("-m", model, "-o", "temperature", "0", "-s", SYSTEM, "--key", "none")
        return [str(self.python), "-m", "llm", "prompt", *always, *options]

    def ask(self, *options: str, model: str = "here") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(*options, model=model),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=HUNG,
            check=False,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture
def llm(base: str, tmp_path: Path) -> Llm:
    return Llm(base, tmp_path)


def test_llm(llm: Llm) -> None:
    for options in ((), ("--no-stream",)):
        done = llm.ask(*options, QUESTION)
        assert PARIS in done.stdout, done.stderr
    structured = llm.ask("--schema", json.dumps(CITY), QUESTION)
    assert json.loads(structured.stdout)["city"] in CITIES, structured.stderr
    few = ("-u", "-o", "max_tokens", "4", "--no-stream", QUESTION)
    tool = ("--functions", "def weather(city: str) -> str:\n    'of a city'\n    return city")
    without, shown = (re.search(r"([\d,]+) input", llm.ask(*options).stderr) for options in (few, (*tool, *few)))
    assert without
    assert shown
    assert int(shown[1]) > int(without[1]) + SHOWN
    refused = llm.ask(QUESTION, model="gone")
    assert refused.returncode == 1
    assert "not here" in refused.stderr


def test_llm_that_is_interrupted(llm: Llm, stops_the_engine: StopsTheEngine) -> None:
    command = llm.command("-o", "max_tokens", "4000", STORY)
    with stops_the_engine(), subprocess.Popen(command, env=llm.environment, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.read(1)
        running.send_signal(signal.SIGINT)
