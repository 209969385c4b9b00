"""The environment that the scripts make: whole, made once, and made again where it is of no use."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
# A Python that notes what it is asked to do, and does what the script looks at afterwards.
PYTHON = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
  "-m venv --clear --without-pip .venv")
    rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python
    [ -n "$INTERRUPTED" ] && exit 130
    echo "VIRTUAL_ENV=$(pwd -P)/.venv" > .venv/bin/activate ;;
  "-m pip --python"*) [ -z "$NO_PIP" ] ;;
  *--editable*) cp .venv/bin/activate .venv/bin/modelrunner ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPTS / "environment.sh", folder / "scripts")
    for name in ("requirements.lock", "requirements-dev.lock", "pyproject.toml"):
        (folder / name).touch()
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return folder


def made(checkout: Path, **environ: str) -> int:
    """Sources the script and asks for the environment; how often one was made for it."""
    calls = checkout.parent / "calls"
    calls.write_text("")
    environ = {**os.environ, "CALLS": str(calls), "PYTHON": str(checkout.parent / "python"), **environ}
    script = "set -euo pipefail; source scripts/environment.sh; environment run"
    subprocess.run(["bash", "-c", script], cwd=checkout, env=environ, capture_output=True, check=False)
    return calls.read_text().splitlines().count("-m venv --clear --without-pip .venv")


def test_it_is_made_once(checkout: Path) -> None:
    assert made(checkout) == 1
    assert made(checkout) == 0


def test_one_whose_making_was_interrupted_is_made_again(checkout: Path) -> None:
    assert made(checkout, INTERRUPTED="yes") == 1
    assert not (checkout / ".venv" / "bin" / "modelrunner").exists()
    assert made(checkout) == 1
    assert (checkout / ".venv" / "bin" / "modelrunner").exists()


def test_a_moved_checkout_gets_another(checkout: Path) -> None:
    assert made(checkout) == 1
    moved = checkout.rename(checkout.parent / "moved")
    assert made(moved) == 1
    assert made(moved) == 0


def test_where_the_machine_has_no_pip_the_environment_gets_its_own(checkout: Path) -> None:
    assert made(checkout, NO_PIP="yes") == 1
    calls = (checkout.parent / "calls").read_text().splitlines()
    assert "-m ensurepip" in calls
    assert made(checkout) == 0
