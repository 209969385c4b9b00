"""A program whose Nth system call of a kind fails, or kills it: strace's tampering (strace(1), `-e inject`)."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from modelrunner.errors import ModelNotFound
from modelrunner.store import Store
from tests.waiting import HUNG

some_or_all = pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.nightly)])
"""Strikes at every tenth call, and under `scripts/test --all` at each."""
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
_CALLS = {
    "pwritev": "pwritev,pwritev2",
    "rename": "rename,renameat,renameat2",
    "link": "link,linkat",
    "unlink": "unlink,unlinkat",
}


def strike(trace: Path, kind: str, when: int, fault: str, module: str, *arguments: str | Path) -> None:
    """Runs `module`, which ends well, with `fault` (as strace writes it) at call number `when` of that kind, counted in
    each thread. Fails if no call was struck. `trace` is a file for strace's log."""
    names = _CALLS.get(kind, kind)
    tampering = ("-e", f"trace={names}", "-e", f"inject={names}:{fault}:when={when}")
    command: list[str | Path] = ["strace", "-f", "-qq", "-o", trace, *tampering]
    subprocess.run([*command, sys.executable, "-m", module, *arguments], check=True, timeout=HUNG)
    log = trace.read_text()
    assert "INJECTED" in log or "killed by SIGKILL" in log


def numbers(calls: int, step: int = 1) -> list[int]:
    """Returns which calls of a sweep are struck: every `step`th, and the last."""
    return sorted({*range(1, calls + 1, step), calls})


def exists(store: Store, name: str) -> bool:
    try:
        store.get(name)
    except ModelNotFound:
        return False
    return True
