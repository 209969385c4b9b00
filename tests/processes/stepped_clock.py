"""Sweeps twice, as a daemon's start does, after the clock was stepped: while another daemon lives, and once it and its
guardian were killed. Run in a namespace of its own, with the step in seconds and a folder."""

import sys
import time
from pathlib import Path

import psutil

from modelrunner.processes.processtree import sweep_orphans
from tests.processes.test_daemon_killed import start_daemon


def main(step: float, folder: Path) -> None:
    create_time = psutil.Process.create_time
    daemon = start_daemon(folder, "60", "daemon", knobs=[])
    while not (folder / "e.sock").exists():
        assert daemon.poll() is None
        time.sleep(0.01)
    psutil.Process.create_time = lambda process: create_time(process) + step  # type: ignore[method-assign, assignment]
    before = sweep_orphans()
    for process in [*daemon.children(), daemon]:  # the guardian first: the engine is killed by the kernel with it
        process.suspend()
    engine = daemon.children(recursive=True)[-1]
    daemon.kill()
    daemon.wait()
    sweep_orphans()  # finds nothing where the kernel was quicker
    while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    print(f"swept {before} of a living daemon")


main(float(sys.argv[1]), Path(sys.argv[2]))
