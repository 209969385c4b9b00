"""The real programs that `launch` starts (scripts/install-clients), asked one question each with the model and the
window that it chooses: they run the tool that the model calls, and show its answer. The engine behind it is the tests'
own."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from modelrunner.engineapi import OPENAI_ENDPOINTS
from tests.api.conftest import StartDaemon, start_daemon
from tests.clients.test_programs import installed
from tests.waiting import HUNG

__all__ = ["start_daemon"]
pytestmark = pytest.mark.engine

SUM = "echo $((6000 + 7))"
AGENTS = {
    "claude": ("npm", "@anthropic-ai/claude-code", ["-p", "hello", "--allowedTools", "Bash"]),
    "codex": ("npm", "@openai/codex", ["exec", "--skip-git-repo-check", "-s", "danger-full-access", "hello"]),
    "opencode": ("npm", "opencode-ai", ["run", "hello"]),
    "continue": ("npm", "@continuedev/cli", ["-p", "hello", "--allow", "Bash"]),
    "aider": ("pypi", "aider-chat", ["--message", "hello", "--no-git", "--yes-always", "--no-check-update"]),
}
"""What is installed for it, and how it is asked; it may use a shell."""
TOOLS = {
    "claude": ("Bash", {"command": SUM, "description": "adds"}),
    "codex": ("exec_command", {"cmd": SUM}),
    "opencode": ("bash", {"command": SUM}),
    "continue": ("Bash", {"command": SUM}),
}
"""What the model calls first; aider has no tools."""
TALKS_WITH_TOOLS = {
    "tokenizer.chat_template": "{{ tools }}{{ tool_calls }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "llama.context_length": 131072,
}
NOWHERE = "http://127.0.0.1:9"
ALONE = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "AIDER_ANALYTICS": "false",
    "CONTINUE_TELEMETRY_ENABLED": "0",
}
"""What keeps an agent from its maker's services: a proxy at which nobody listens, and its own switch."""


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_runs_a_tool_and_shows_the_answer(
    start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    registry, name, question = AGENTS[agent]
    folder, record, home = installed(registry, name), tmp_path / "record", tmp_path / "home"
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS_WITH_TOOLS)
    monkeypatch.setattr(daemon.backend, "endpoints", OPENAI_ENDPOINTS)  # what Anthropic's clients say is translated
    rounds = ["--round", json.dumps([TOOLS[agent]])] if agent in TOOLS else []
    daemon.backend.knobs = ("--most-tokens", "8", "--record", str(record), *rounds)
    home.mkdir()
    programs = [str(folder / place) for place in ("node_modules/.bin", "bin")]
    variables = ALONE | {"HOME": str(home), "PATH": os.pathsep.join([*programs, os.environ["PATH"]])}
    variables |= {"MODELRUNNER_HOST": f"unix://{daemon.settings.runtime_dir}/modelrunner.sock"}
    command = [sys.executable, "-m", "modelrunner", "launch", agent, "--yes", "--", *question]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=home, env=variables, stdin=asyncio.subprocess.DEVNULL, stdout=-1, stderr=-1
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 2 * HUNG)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (out + err).decode()
    assert "w0 w1 w2" in out.decode(), (out + err).decode()
    asked = [json.loads(line).get("body", "") for line in record.read_text().splitlines()]
    results = [
        message for body in asked if body for message in json.loads(body)["messages"] if message["role"] == "tool"
    ]
    assert bool(results) == (agent in TOOLS)
    assert all("6007" in json.dumps(result) for result in results), results
