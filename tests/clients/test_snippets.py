"""Every snippet of docs/clients.md runs as it stands there, but for the address: the daemon's port is another one. The
name of its embedding model is an alias of the tests', and answers have an end."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.test_programs import installed
from tests.e2e.conftest import MINILM, SMOLLM2, StartDaemon
from tests.e2e.daemons import Daemon
from tests.waiting import HUNG

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
SNIPPETS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
USUAL = "http://127.0.0.1:12434"
ELSEWHERE = {"langchain_openai": ("pypi", "langchain-openai"), "litellm": ("pypi", "litellm")}


def snippets(language: str) -> list[str]:
    return [text for found, text in SNIPPETS if found == language]


@pytest.fixture(scope="module")
def base(make_daemon: StartDaemon) -> str:
    daemon: Daemon = make_daemon()
    names = {"hf.co/nomic-ai/nomic-embed-text-v1.5-GGUF": MINILM}
    lines = "".join(f"{json.dumps(alias)} = {json.dumps(name)}\n" for alias, name in names.items())
    Path(daemon.environment["MODELRUNNER_CONFIG"]).write_text(f"[aliases]\n{lines}")
    daemon.start(listen="127.0.0.1:0")
    given = daemon.run("configure", SMOLLM2, "--max-tokens", "24")
    assert given.returncode == 0, given.stderr
    found: str = daemon.get("/version").json()["listen"]
    return found


def succeeds(command: list[str | Path], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=HUNG, check=False, env=environment or None
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_one_for_each_client() -> None:
    assert [len(snippets(language)) for language in ("python", "js", "yaml", "sh")] == [5, 2, 1, 1]


@pytest.mark.parametrize("text", snippets("python"), ids=re.compile(r"(?:from|import) (\w+)").findall(PAGE)[:5])
def test_python(text: str, base: str, tmp_path: Path) -> None:
    module = re.split(r"[ .\n]", text.split(maxsplit=1)[1])[0]
    python = installed(*ELSEWHERE[module]) / "bin" / "python" if module in ELSEWHERE else Path(sys.executable)
    assert USUAL in text
    (tmp_path / "snippet.py").write_text(text.replace(USUAL, base))
    succeeds([python, tmp_path / "snippet.py"], tmp_path)


@pytest.mark.parametrize("text", snippets("js"), ids=["openai", "ollama"])
def test_javascript(text: str, base: str, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(installed("npm", text.split('from "')[1].split('"')[0]) / "node_modules")
    node = shutil.which("node")
    assert node
    assert USUAL in text
    (tmp_path / "snippet.mjs").write_text(text.replace(USUAL, base))
    succeeds([node, tmp_path / "snippet.mjs"], tmp_path)


def test_llm(base: str, tmp_path: Path) -> None:
    [models], [line] = snippets("yaml"), snippets("sh")
    (tmp_path / "extra-openai-models.yaml").write_text(models.replace(USUAL, base))
    path = f"{installed('pypi', 'llm') / 'bin'}:/usr/bin:/bin"
    assert succeeds(["sh", "-c", line], tmp_path, PATH=path, LLM_USER_PATH=str(tmp_path), HOME=str(tmp_path)).strip()
