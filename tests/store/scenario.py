"""Run under strace by test_crashes.py: changes a store in many child processes, of which child N is struck at the Nth
call of the traced system call. Each child reports what it was told is done, in a pipe that outlives it."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from modelrunner.errors import ModelRunnerError
from modelrunner.pull.claims import Claims
from modelrunner.pull.loading import LoadOptions, load
from modelrunner.store import Blob, Store
from modelrunner.store.blobs import ignore


def burn(call: str, count: int, folder: Path) -> None:
    """strace counts calls per process: with `when=K`, a child that first makes K-N calls is struck at its own Nth."""
    scratch = folder / "scratch"
    descriptor = os.open(scratch, os.O_CREAT | os.O_RDWR)
    actions: dict[str, Callable[[], object]] = {
        "fsync": lambda: os.fsync(descriptor),
        "write": lambda: os.write(descriptor, b"x"),
        "rename": lambda: os.rename(scratch, scratch),
        "link": lambda: _refused(lambda: os.link(scratch, scratch)),
        "unlink": lambda: _refused(lambda: os.unlink(folder / "absent")),
        "mkdir": lambda: _refused(lambda: os.mkdir(folder)),
    }
    for _ in range(count):
        actions[call]()
    os.close(descriptor)


def _refused(action: Callable[[], object]) -> None:
    try:
        action()
    except FileExistsError:
        pass
    except FileNotFoundError:
        pass


def change(data: Path, report: int) -> None:
    """Each step is reported before it begins and when it is acknowledged, or refused."""

    def step(name: str, action: Callable[[], object]) -> None:
        os.write(report, f"begin {name}\n".encode())
        try:
            action()
        except ModelRunnerError as error:
            os.write(report, f"refused {name} {error.code}\n".encode())
        else:
            os.write(report, f"done {name}\n".encode())

    store = Store(data)
    step("create", lambda: store.create({"m": store.ingest(store.partial / "new.gguf")}, "new"))
    step("tag", lambda: store.tag("kept", "second"))
    step("untag", lambda: store.remove("second"))
    step("remove", lambda: store.remove("doomed"))
    step("import", lambda: store.create({"m": _theirs(store)}, "imported"))
    step("load", lambda: _load(store))
    step("prune", store.prune)


def _load(store: Store) -> None:
    folder = store.partial / "load"
    folder.mkdir(exist_ok=True)
    with open(store.data.parent / "archive.tar", "rb") as archive, Claims(store).claim() as claim:
        load(store, archive, folder, LoadOptions(), ignore, threading.Event(), claim)


def _theirs(store: Store) -> Blob:
    """A hard link to another program's file."""
    link = store.partial / "theirs.gguf"
    link.unlink(missing_ok=True)
    os.link(store.data.parent / "theirs.gguf", link)
    return store.ingest(link)


def main(call: str, when: int, root: Path) -> None:
    for folder in sorted(root.iterdir(), key=lambda folder: int(folder.name)):
        n = int(folder.name)
        report = os.open(folder / "report", os.O_CREAT | os.O_WRONLY)
        child = os.fork()
        if not child:
            try:
                burn(call, when - n, folder)
                change(folder / "data", report)
            finally:
                os._exit(0)
        os.close(report)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
