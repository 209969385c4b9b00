"""Clients that live in environments of their own (scripts/install-clients): each is a program that uses its client as
docs/clients.md says, and prints what it got."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from modelrunner.config.locations import Locations
from tests.e2e.conftest import MINILM, SMOLLM2
from tests.e2e.daemons import Daemon, until
from tests.waiting import HUNG

PROGRAMS = Path(__file__).parent / "programs"
PARIS = "The capital of France is Paris."


def installed(registry: str, name: str) -> Path:
    """The folder that scripts/install-clients made for a client. Skips the test without it."""
    lines = (line.split() for line in (PROGRAMS / "versions").read_text().splitlines())
    version = next(version for kind, client, version in lines if (kind, client.partition("[")[0]) == (registry, name))
    folder = Locations.find().cache / "clients" / f"{registry}-{name}-{version}"
    if not (folder / "ready").exists():
        pytest.skip(f"no {folder}: scripts/install-clients")
    return folder


def run(command: list[str | Path], base: str) -> dict[str, Any]:
    """What a program prints for the daemon at `base`."""
    arguments = [base, SMOLLM2, MINILM]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=HUNG, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_langchain(base: str) -> None:
    found = run([installed("pypi", "langchain-openai") / "bin" / "python", PROGRAMS / "langchain_client.py"], base)
    assert PARIS in found["chat"]
    assert PARIS in "".join(found["stream"])
    assert len(found["stream"]) > 5
    assert found["structured"]["city"] in ("Paris", "Rome")
    assert found["embeddings"] == [384, 384]
    assert found["error"] == "NotFoundError"


def test_litellm(daemon: Daemon, base: str) -> None:
    found = run([installed("pypi", "litellm") / "bin" / "python", PROGRAMS / "litellm_client.py"], base)
    assert PARIS in found["chat"]
    assert PARIS in "".join(found["stream"])
    assert len(found["stream"]) > 5
    assert found["structured"]["city"] in ("Paris", "Rome")
    assert found["tools"]
    assert found["embeddings"] == [384, 384]
    assert {SMOLLM2, MINILM} <= {model.removeprefix("openai/") for model in found["models"]}
    assert found["error"] == "NotFoundError"
    until(lambda: not any(runner["in_use"] for runner in daemon.runners()))


@pytest.mark.parametrize(("name", "error"), [("openai", "NotFoundError"), ("ollama", "ResponseError 404")])
def test_javascript_clients(daemon: Daemon, base: str, tmp_path: Path, name: str, error: str) -> None:
    modules, program = installed("npm", name) / "node_modules", f"{name}_client.mjs"
    node = shutil.which("node")
    assert node, "npm was there, and node is not"
    shutil.copy(PROGRAMS / program, tmp_path)
    (tmp_path / "node_modules").symlink_to(modules)
    found = run([node, tmp_path / program], base)
    assert PARIS in found["chat"]
    assert PARIS in "".join(found["stream"])
    assert PARIS in found.get("response", PARIS)
    assert found["structured"]["city"] in ("Paris", "Rome")
    assert found["embeddings"] == [384, 384]
    assert {SMOLLM2, MINILM} <= set(found["models"])
    assert found.get("left", "AbortError") == "AbortError"
    assert found["error"] == error
    until(lambda: not any(runner["in_use"] for runner in daemon.runners()))


def test_llm(base: str, tmp_path: Path) -> None:
    """Simon Willison's command line, with a model of its `extra-openai-models.yaml`."""
    python = installed("pypi", "llm") / "bin" / "python"
    models = f"- model_id: here\n  model_name: {SMOLLM2!r}\n  api_base: {base}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    options = ["-m", "here", "-o", "temperature", "0", "-s", "You are a helpful assistant.", "--key", "none"]
    done = subprocess.run(
        [str(python), "-m", "llm", *options, "What is the capital of France?"],
        env=os.environ | {"LLM_USER_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert PARIS in done.stdout, done.stderr
