"""After every test: no task, child process, socket or file descriptor is left.

The test process is a subreaper, so that whatever outlives its own parent comes to us and is found.
"""

import asyncio
import ctypes
import gc
import inspect
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import uvloop
from hypothesis import settings

from tests.waiting import HUNG

# A push tries the same examples everywhere, so that its result tells of the change; the long suites look for others
# (`--hypothesis-profile explore`). An example that takes long on a busy machine is no failure of what it checks.
settings.register_profile("explore", deadline=None)
settings.register_profile("modelrunner", deadline=None, derandomize=True)
settings.load_profile("modelrunner")

PR_SET_CHILD_SUBREAPER = 36
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


uvloop.run(asyncio.sleep(0))  # the first loop opens a pipe for signals that it never closes


# A job that a shell runs in the background ignores Ctrl-C, and so would every command that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="another order of the files, and of the tests in each")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is not None:
        places = {path: random.Random(f"{seed} {path}").random() for path in {item.path for item in items}}
        items.sort(key=lambda item: (places[item.path], random.Random(f"{seed} {item.nodeid}").random()))


def pytest_collection_finish() -> None:
    collect_garbage()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Set up first and torn down last: what a test's own fixtures hold is closed by then, its event loop too."""
    files, children, threads = open_files(), living_children(), set(threading.enumerate())
    yield
    survivors = {pid: what for pid, what in living_children().items() if pid not in children}
    for pid in survivors:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    collect_garbage()  # what closes itself only when it is collected is reported by its own ResourceWarning
    for thread in (started := set(threading.enumerate()) - threads):
        thread.join(HUNG)  # one that was told to end may be on its way out, and still have a file open
    left = [f"process {pid} {what}" for pid, what in survivors.items()]
    left += [f"thread {thread.name}" for thread in started if thread.is_alive()]
    left += [f"descriptor {fd} {what}" for fd, what in open_files().items() if files.get(fd) != what]
    assert not left, "the test left behind: " + "; ".join(left)


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty folder on another file system than `tmp_path`."""
    here = tmp_path.stat().st_dev
    places = (Path("/dev/shm"), Path("/var/tmp"), Path.home(), Path(__file__).parent)
    usable = (place for place in places if os.access(place, os.W_OK) and place.stat().st_dev != here)
    if (place := next(usable, None)) is None:
        pytest.skip(f"{', '.join(map(str, places))}: none is on another file system than {tmp_path}")
    folder = Path(tempfile.mkdtemp(prefix="modelrunner-test-", dir=place))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def no_task_left_by_a_coroutine(request: pytest.FixtureRequest, nothing_left: None) -> None:
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("no_task_left")


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """A task that is on its way out, its connection closed by the other side, is given a second to end."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=HUNG)
    assert not left, f"the test left tasks behind: {left}"


def collect_garbage() -> None:
    """What is left over (modules, and caches: one of aiohttp's keeps every server of a test) stays for good. It is left
    out of later collections, which would soon take longer than the tests."""
    gc.collect()
    gc.freeze()


def open_files() -> dict[int, str]:
    """What each descriptor of this process is; the one that lists them is not among them."""
    found = {}
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with suppress(FileNotFoundError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def living_children() -> dict[int, str]:
    """Descendants, without those that have ended: an orphan that came to us and ended is nobody's leak."""
    found, parents = {}, [os.getpid()]
    while parents:
        for process in children_of(parents.pop()):
            parents.append(process.pid)
            with suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline())
    return found


def children_of(pid: int) -> list[psutil.Process]:
    """Asked of the kernel where it tells: looking through every process takes milliseconds, twice a test. The kernel
    keeps a list for each thread, and gives it to another thread when the thread ends: read again if the threads have
    changed."""
    threads: list[str] = []
    pids: list[str] = []
    try:
        while threads != (now := os.listdir(f"/proc/{pid}/task")):
            threads = now
            pids = [child for thread in threads for child in _read(f"/proc/{pid}/task/{thread}/children").split()]
        return [psutil.Process(int(child)) for child in pids]
    except (psutil.NoSuchProcess, OSError):  # one has ended meanwhile, or the kernel has no such lists
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).children()
    return []


def _read(file: str) -> str:
    with open(file) as text:
        return text.read()
