"""The real programs that `launch` starts (scripts/install-clients), each from an empty home with its first question as
it is, against llama.cpp with the window that `launch` chooses. The model is written by the tests: it calls a tool, and
then says a sentence."""

import os
import subprocess
from pathlib import Path

import pytest

from modelrunner.store import Store
from tests.clients.test_programs import installed
from tests.e2e.conftest import SMOLLM2, StartDaemon
from tests.e2e.daemons import MODELRUNNER, Daemon
from tests.models import scripted
from tests.waiting import HUNG

SUM = "echo $((6000 + 7)) > sum"
AGENTS = {
    "claude": ("npm", "@anthropic-ai/claude-code", ["-p", "say hi", "--allowedTools", "Bash"]),
    "codex": ("npm", "@openai/codex", ["exec", "--skip-git-repo-check", "-s", "danger-full-access", "say hi"]),
    "opencode": ("npm", "opencode-ai", ["run", "say hi"]),
    "continue": ("npm", "@continuedev/cli", ["-p", "say hi", "--allow", "Bash"]),
    "aider": ("pypi", "aider-chat", ["--message", "say hi", "--no-git", "--yes-always", "--no-check-update"]),
}
"""What is installed for it, and how it is asked; it may use a shell."""
TOOLS = {
    "claude": ("Bash", {"command": SUM, "description": "adds"}),
    "codex": ("exec_command", {"cmd": SUM}),
    "opencode": ("bash", {"command": SUM}),
    "continue": ("Bash", {"command": SUM}),
}
"""What the model calls first, with the parameters that the tool's schema has: llama.cpp fails where a word is a whole
call and the schema forbids a part of it. aider has no tools."""
NOWHERE = "http://127.0.0.1:9"
ALONE = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "AIDER_ANALYTICS": "false",
    "CONTINUE_TELEMETRY_ENABLED": "0",
}
"""What keeps an agent from its maker's services: a proxy at which nobody listens, and its own switch."""


@pytest.fixture(scope="module")
def daemon(make_daemon: StartDaemon) -> Daemon:
    daemon = make_daemon()
    daemon.start(listen="127.0.0.1:0")
    return daemon


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_runs_a_tool_and_shows_the_answer(daemon: Daemon, tmp_path: Path, agent: str) -> None:
    registry, name, question = AGENTS[agent]
    folder, home, model = installed(registry, name), tmp_path / "home", f"test/{agent}"
    file = scripted.write(tmp_path / "model.gguf", Store(daemon.data).bundle(SMOLLM2).model_file, TOOLS.get(agent))
    made = daemon.run("package", "--gguf", str(file), model)
    assert made.returncode == 0, made.stderr
    assert daemon.run("configure", model, "--context-size", "8192").returncode == 0  # too little for the others
    home.mkdir()
    programs = [str(folder / place) for place in ("node_modules/.bin", "bin")]
    variables = ALONE | {"HOME": str(home), "PATH": os.pathsep.join([*programs, os.environ["PATH"]])}
    variables |= {"MODELRUNNER_HOST": f"unix://{daemon.socket}"}
    command = [*MODELRUNNER, "launch", agent, "--model", model, "--yes", "--", *question]
    done = subprocess.run(
        command, cwd=home, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=4 * HUNG
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert scripted.SENTENCE in done.stdout, told
    assert (home / "sum").exists() == (agent in TOOLS), told
    assert agent not in TOOLS or (home / "sum").read_text() == "6007\n"
    assert f"{model} with a window" in done.stderr or agent == "aider", told
    assert f"{model} sees no images" in done.stderr
    assert "the context window it assumes" not in told  # Claude Code's, of a model whose window nobody told it
