"""The signal HUP: from a terminal that was closed, or from somebody who asks for a reload."""

import os
import signal
import subprocess
import sys

import pytest

# Says "ready", and then what the first HUP meant.
CHILD = """
import asyncio, fcntl, os, sys, termios
from modelrunner.daemon.instance import Lifecycle

async def main():
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    lifecycle, reloaded = Lifecycle(), asyncio.Event()
    lifecycle.on_reload = reloaded.set
    with lifecycle.on_signals():
        print("ready", flush=True)
        waits = {asyncio.create_task(event.wait(), name=name) for name, event in
                 (("reload", reloaded), ("stop", lifecycle.stop))}
        done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        print(*(task.get_name() for task in done), flush=True)
        for task in rest:
            task.cancel()

asyncio.run(main())
"""


@pytest.mark.parametrize("closed", [True, False])
def test_a_closed_terminal_ends_the_daemon_and_a_signal_reloads_it(closed: bool) -> None:
    ours, terminal = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=terminal, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        os.close(terminal)
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        if closed:
            os.close(ours)  # the system sends the signal
        else:
            child.send_signal(signal.SIGHUP)
        assert child.stdout.read() == ("stop\n" if closed else "reload\n")
    if not closed:
        os.close(ours)


def test_without_a_terminal_it_reloads() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGHUP)
        assert child.stdout.read() == "reload\n"
