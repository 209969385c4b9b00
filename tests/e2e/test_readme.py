"""README.md word for word: its block for daily use, from top to bottom in an empty home folder, and its samples for
programs.

Every line of the block is given to bash. Five rules say how, and nothing else is special:

- A line with ORG/REPO is left out, since a repository of your own would have to be on a public hub.
- MODEL.gguf is a file that the test puts there.
- A line whose comment names /bye is a chat: it runs on a terminal, where /bye is typed.
- A line whose comment names Ctrl-C is interrupted after its first output.
- `modelrunner install` is left out for an engine that is not in this machine's cache: it would download gigabytes or
  compile.

The samples connect to the port that the daemon got, since the default port may be another daemon's.
"""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelrunner.config.locations import Locations
from modelrunner.store import Store
from tests.e2e.conftest import SMOLLM2
from tests.terminal import Terminal

README = Path(__file__).parents[2] / "README.md"
LISTEN = "127.0.0.1:12434"  # in the samples
_LIMIT = 600  # seconds until a command that hangs is killed
_CACHED = {"llama.cpp": "llama.cpp-wheel-*", "llama.cpp --build": "llama.cpp-native-*", "vllm": "vllm-*"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.M | re.S)


def daily_use() -> list[str]:
    (block,) = (block for block in blocks("sh") if "modelrunner run" in block)
    return block.splitlines()


class Home:
    """An empty home folder, with the cache of this machine's engines and its package index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines = Locations.find().cache
        known = {name: text for name, text in os.environ.items() if not name.startswith(("MODELRUNNER_", "XDG_"))}
        index = Path.home() / ".config/pip/pip.conf"
        self.environment = known | {
            "HOME": str(folder),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "MODELRUNNER_CACHE_DIR": str(self.engines),
            "MODELRUNNER_LISTEN": "127.0.0.1:0",
            **({"PIP_CONFIG_FILE": str(index)} if index.exists() else {}),
        }

    def is_cached(self, engine: str) -> bool:
        return any(path.is_dir() for path in self.engines.glob(_CACHED[engine]))

    def shell(self, line: str) -> str:
        """What the line prints. Fails with the line's words if its last command fails."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    def chat(self, line: str) -> None:
        """Runs the line on a terminal and types /bye at its prompt."""
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(ours, (24, 80))
        environment = self.environment | {"TERM": "xterm"}
        with open(ours, "r+b", buffering=0), open(theirs, "r+b", buffering=0) as screen:
            process = subprocess.Popen(
                ["bash", "-c", line], cwd=self.folder, env=environment, stdin=screen, stdout=screen, stderr=screen
            )
            try:
                terminal = Terminal(ours)
                terminal.wait_for(">>>", _LIMIT)
                terminal.type("/bye\r")
                assert process.wait(_LIMIT) == 0, line
            finally:
                process.kill()
                process.wait()

    def interrupted(self, line: str) -> None:
        """Presses Ctrl-C once the line has printed something."""
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline().strip(), line
            process.send_signal(signal.SIGINT)
            process.stdout.read()
        assert process.wait(_LIMIT) == 130, line


@pytest.fixture
def home() -> Iterator[Home]:
    with tempfile.TemporaryDirectory(prefix="readme") as folder:
        home = Home(Path(folder))
        yield home
        subprocess.run(
            ["modelrunner", "shutdown"],
            env=home.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )


def test_the_commands_of_the_readme_work_from_top_to_bottom(home: Home, prepared: Path) -> None:
    shutil.copy(Store(prepared).bundle(SMOLLM2).model_file, home.folder / "MODEL.gguf")
    ask = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    question = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": ask}
    (home.folder / "questions.jsonl").write_text(json.dumps(question))
    run = 0
    for line in daily_use():
        command, _, comment = line.partition("  # ")
        command = command.strip()
        engine = command.removeprefix("modelrunner install ")
        if "ORG/REPO" in command or (engine != command and not home.is_cached(engine)):
            continue
        run += 1
        if "/bye" in comment:
            home.chat(command)
        elif "Ctrl-C" in comment:
            home.interrupted(command)
        else:
            home.shell(command)
    assert run >= len(daily_use()) - 3
    listen = home.shell(
        "modelrunner status --json | python3 -c 'import json,sys; print(json.load(sys.stdin)[\"listen\"])'"
    )
    python, local = blocks("python")
    address = listen.strip().removeprefix("http://")
    sample = home.folder / "sample.py"
    sample.write_text(python.replace(LISTEN, address))
    assert home.shell(f"python3 {sample}").strip()
    sample.write_text(local)
    assert home.shell(f"python3 {sample}").strip()
    (curl,) = (block for block in blocks("sh") if "curl" in block)
    assert json.loads(home.shell(curl.replace(LISTEN, address)))["choices"][0]["message"]["content"]
    home.shell("modelrunner shutdown")
