"""Models on a file system that the head and a host see through mounts of their own: with the double of Ray, and
namespaces of mounts."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cluster.rig import Rig
from tests.e2e.daemons import until

OWN_MOUNTS = ["unshare", "--mount", "--propagation", "private"]
MOUNTS = {
    "another mount of it, read-only": 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"',
    "another file system, read-only": 'mount -t overlay none -o "lowerdir=$1:$2" "$1"',
    "nothing": 'mount -t tmpfs none "$1"',
}


@pytest.mark.nightly
@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(
        [*OWN_MOUNTS, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    ).returncode
    > 0,
    reason="mounts of one's own need root",
)
@pytest.mark.parametrize("sees", MOUNTS)
def test_a_host_reads_what_it_sees_there_and_gets_what_it_does_not(tmp_path: Path, sees: str) -> None:
    rig = Rig(tmp_path, (), ("m",), shared=True)
    try:
        rig.head.start()
        rig.add_models()
        head, empty = tmp_path / "head", tmp_path / "empty"
        empty.mkdir()
        program = f'{MOUNTS[sees]} && shift 2 && exec "$@"'
        rig.join("b", [*OWN_MOUNTS, "sh", "-c", program, "sh", str(head), str(empty)])
        until(lambda: rig.states() == {"b": "ready"})
        answer = rig.ask("m")
        assert answer.status_code == 200, answer.text
        copies = list((tmp_path / "b").rglob("*.gguf"))
        assert bool(copies) == (sees == "nothing")
        until(lambda: [host["models"] for host in rig.head.get("/hosts").json()["hosts"]] == [1])
    finally:
        rig.close()
