"""A pull onto a disk that fills up, or that may not be written, is said before or fails cleanly; what was there stays,
and the next one succeeds."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.test_full_disk import MOUNT, can_mount
from tests.waiting import HUNG


def test_pulls_onto_a_full_or_read_only_disk(tmp_path: Path) -> None:
    if not can_mount(tmp_path):
        pytest.skip("no file system can be mounted here")
    mount = [part.replace("size=3m", "size=24m") for part in MOUNT]
    command = [*mount, tmp_path, sys.executable, "-m", "tests.oci.full_disk", tmp_path]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=HUNG)  # type: ignore[arg-type]
    assert outcome.returncode == 0, outcome.stderr
