"""Run under strace by test_crashes.py: pulls or pushes in many child processes, of which child N is struck at the Nth
call of the traced system call."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from modelrunner.concurrency.threads import Pool
from modelrunner.errors import ModelRunnerError
from modelrunner.web.session import new_client
from tests.oci.conftest import Machine
from tests.store.scenario import burn


def inline(pool: Pool, work: Callable[..., Any], /, *arguments: Any) -> "Future[Any]":
    """strace counts calls per thread: here all of them are the first thread's."""
    future: Future[Any] = Future()
    try:
        future.set_result(work(*arguments))
    except BaseException as error:
        future.set_exception(error)
    return future


def spend(call: str, count: int, folder: Path) -> None:
    if call not in ("write", "pwritev", "sendto"):
        burn(call, count, folder)
        return
    one, other = socket.socketpair()
    descriptor = os.open(folder / "scratch", os.O_CREAT | os.O_RDWR)
    for _ in range(count):
        if call == "sendto":
            one.send(b"x")
            other.recv(1)
        elif call == "pwritev":
            os.pwritev(descriptor, [b"x"], 0)
        else:
            os.write(descriptor, b"x")
    one.close()
    other.close()
    os.close(descriptor)


async def change(what: str, folder: Path, name: str) -> None:
    from modelrunner.oci.push import Pusher

    machine = Machine(folder)
    if what == "pull":
        await machine.puller.pull(name, lambda line: None)
    else:
        await Pusher(machine.store, machine.registries, machine.credentials).push("new", name, lambda line: None)


def main(what: str, call: str, when: int, root: Path, name: str) -> None:
    asyncio.run(new_client("http://127.0.0.1").aclose())  # the certificates, once for all children
    Pool.submit = inline  # type: ignore[method-assign, assignment]
    for folder in sorted(root.iterdir(), key=lambda folder: int(folder.name)):
        n = int(folder.name)
        child = os.fork()
        if not child:
            said = "killed"
            try:
                spend(call, when - n, folder)
                asyncio.run(change(what, folder, name.replace("NUMBER", str(n))))
                said = "done"
            except ModelRunnerError as error:
                said = f"refused {error.code}"
            finally:
                # By a call that is never struck.
                os.mkdir(folder / said)
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
