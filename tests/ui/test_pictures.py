"""A picture that a model draws step by step, in the chat of the page."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import expect

from tests.e2e.daemons import Daemon, environment
from tests.processes.test_configured_engines import words
from tests.processes.test_images import DRAWER, IMAGES, PYTHON
from tests.ui.conftest import OpenPage, say

pytestmark = pytest.mark.engine
PARTIAL = 'self.event("partial_image"'
SHOWN = "data:image/png;base64,"


@pytest.fixture
def drawer(tmp_path: Path) -> Iterator[Any]:
    """A daemon with an engine that waits in each step for a file of the step's number."""
    told = f"self.event('progress', step=step + 1, steps=4); {PARTIAL}"
    with serving(tmp_path, DRAWER.replace(PARTIAL, told)) as daemon:
        yield daemon


@contextmanager
def serving(folder: Path, program: str) -> Iterator[Any]:
    """A daemon with this program as the engine of one model."""
    (folder / "drawer.py").write_text(program)
    (folder / "config.toml").write_text(f"""
        [engines.drawer]
        command = {words(PYTHON, folder / "drawer.py", "{port}", folder)}
        models = [{{ name = "tiny-sd", capabilities = ["image-generation"] }}]
        endpoints = {{ "{IMAGES}" = "image" }}
        ready = {{}}
    """)
    data = folder / "data"
    daemon = Daemon(data, folder / "run" / "modelrunner.sock", environment(data, folder / "run"))
    daemon.start(listen="127.0.0.1:0")
    try:
        yield SimpleNamespace(port=urlsplit(daemon.get("/version").json()["listen"]).port)
    finally:
        daemon.stop()


async def test_its_steps_are_shown_and_it_stays(drawer: Any, open_page: OpenPage, tmp_path: Path) -> None:
    page = await open_page(drawer, "#/chat")
    await say(page, "slow")
    for step in range(4):
        await expect(page.get_by_text(f"Step {step + 1} of 4")).to_be_visible()
        await expect(page.get_by_alt_text("The picture so far")).to_have_attribute("src", f"{SHOWN}AA==")
        (tmp_path / str(step)).touch()
    picture = page.get_by_alt_text("The picture", exact=True)
    await expect(picture).to_have_attribute("src", f"{SHOWN}Tm9uZSBzbG93")  # the engine's "None slow"
    await expect(page.get_by_role("status").filter(has_text="Step")).to_have_count(0)
    await page.reload()
    await expect(picture).to_have_attribute("src", f"{SHOWN}Tm9uZSBzbG93")


async def test_one_of_an_engine_that_makes_no_streams_is_shown(open_page: OpenPage, tmp_path: Path) -> None:
    with serving(tmp_path, DRAWER.replace('asked.get("stream")', "False")) as daemon:
        page = await open_page(daemon, "#/chat")
        await say(page, "a cat")
        picture = page.get_by_alt_text("The picture", exact=True)
        await expect(picture).to_have_attribute("src", f"{SHOWN}Tm9uZSBhIGNhdA==")  # "None a cat"
