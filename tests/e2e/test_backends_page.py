"""docs/backends.md, followed word for word: its files are extracted and installed, and its suite runs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from modelrunner.backend import Backend
from tests.fakes import FAKE_ENGINE
from tests.pull.models import gguf

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "backends.md"
FILE = re.compile(r"^```(?:toml|python)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The engine of the page: it takes the arguments of the page, and is the tests' engine beneath.
TINY_SERVER = """#!{python} -IS
import pathlib, runpy, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
assert given.keys() == {{"--host", "--port", "--model", "--context"}}, given
del given["--context"]
engine = pathlib.Path(__file__).with_name("engine.py")
sys.argv = [str(engine), *(word for option in given.items() for word in option)]
runpy.run_path(str(engine), run_name="__main__")
"""


@pytest.mark.engine  # pip fetches the build backend that the page names
def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    folder, site, programs = (tmp_path / name for name in ("tiny", "site", "bin"))
    folder.mkdir()
    programs.mkdir()
    files = dict(FILE.findall(PAGE.read_text()))
    assert files.keys() == {"pyproject.toml", "modelrunner_tiny.py", "test_tiny.py"}
    for name, text in files.items():
        (folder / name).write_text(text)
    server = programs / "tiny-server"
    server.write_text(TINY_SERVER.format(python=sys.executable))
    shutil.copy(FAKE_ENGINE, programs / "engine.py")
    server.chmod(0o755)
    (tmp_path / "small.gguf").write_bytes(gguf())

    # --no-deps: modelrunner itself is here, and on no index.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(folder)]
    subprocess.run(pip, check=True)
    environment = os.environ | {
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT), str(ROOT / "backends")]),
        "TINY_MODEL": str(tmp_path / "small.gguf"),
        "PYTEST_ADDOPTS": "",  # options of our own conftest mean nothing there
    }
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "test_tiny.py"]
    done = subprocess.run(suite, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "14 passed" in done.stdout


def test_the_page_names_the_whole_contract() -> None:
    page = PAGE.read_text()
    names = [name for name in vars(Backend) if not name.startswith("_")]
    assert [name for name in names if not re.search(rf"`{name}\b|\b{name}\(|^ +{name} = ", page, re.MULTILINE)] == []
