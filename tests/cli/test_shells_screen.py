"""Completion in the shells themselves, on a terminal."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.cli.fake_daemon import FakeDaemon
from tests.cli.test_commands_screen import MODEL
from tests.cli.tmux import screen

SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'PS1="$ "; eval "$(modelrunner completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'PS1="$ "; autoload -U compinit; compinit -u; eval "$(modelrunner completion zsh)"'),
    "fish": (
        ["fish", "--no-config", "-i"],
        "function fish_prompt; echo '$ '; end; modelrunner completion fish | source",
    ),
}
"""How each is started without the settings of its user, and what those would have."""


@pytest.mark.parametrize(
    "steps",
    [
        [("modelrunner insp", "modelrunner inspect"), ("pypi:o", "modelrunner inspect pypi:other")],
        [("modelrunner launch env --model my/m", "modelrunner launch env --model my/model")],
    ],
    ids=["argument", "option"],
)
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_and_models(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, steps: list[tuple[str, str]]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} (Debian: apt-get install {shell})")
    daemon.answers["GET /models"] = [MODEL, {**MODEL, "tags": ["pypi:other"]}]
    program = tmp_path / "modelrunner"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m modelrunner "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    command, settings = SHELLS[shell]
    with screen(tmp_path, program=command, columns=100) as terminal:
        terminal.type(f"export PATH={tmp_path}:$PATH; {settings}; echo load''ed")
        terminal.wait_for(r"^loaded\n\$")  # it listens for keys now
        for more, completed in steps:
            terminal.tmux("send-keys", "-l", more)
            terminal.press("Tab")
            terminal.wait_for(completed)
