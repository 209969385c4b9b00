import shutil
import subprocess
import sys

import pytest

from tests.waiting import HUNG

MOUNT = [
    "unshare",
    "--map-root-user",
    "--mount",
    "sh",
    "-ec",
    'mount -t tmpfs -o size=3m none "$1"; shift; exec "$@"',
    "-",
]


def can_mount(folder) -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*MOUNT, folder, "true"], capture_output=True).returncode == 0


def test_models_can_be_removed_and_nothing_is_lost_when_the_disk_is_full(tmp_path):
    if not can_mount(tmp_path):
        pytest.skip("no file system can be mounted here")
    command = [*MOUNT, tmp_path, sys.executable, "-m", "tests.store.full_disk", tmp_path]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=HUNG)
    assert outcome.returncode == 0, outcome.stderr
