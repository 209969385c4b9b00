"""Recognises connections to the daemon's Unix socket that an engine opened, and connections of the daemon that reach
another program than the engine. Whoever uses the daemon's socket is its owner, and an engine with the permission
`network` can connect to it. An engine can put a link in the place of its own socket, and so have the daemon speak with
whatever listens there.

A TCP connection tells nothing of its process: the kernel says which socket it is, but a socket can be held by several
processes, or by none while one sends it to another. So the sandbox closes the daemon's port (confinement.py)."""

import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from modelrunner.processes.processtree import descends_from, with_guardian

_CREDENTIALS = struct.Struct("3i")  # struct ucred (unix(7)): process ID, user, group

guardians: set[int] = set()
"""Process IDs of the guardians whose engines are confined, and may open connections."""


class Expected(NamedTuple):
    """The process of an engine, and what is called where another one listens on its socket."""

    pid: int
    is_another: Callable[[], None]


expected: dict[Path, Expected] = {}
"""The engine that should listen on each Unix socket, while it runs."""


def is_another(connected: Any, path: Path) -> bool:
    """Tells whether a connection to the Unix socket of an engine reaches another program: one that is not of the tree
    of the engine's processes, or that has ended. A system call, and for an engine of several processes a file for each
    ancestor. `connected` is the socket of a loop's transport."""
    engine = expected.get(path)
    if engine is None or sys.platform != "linux":
        return False
    listener = _credentials(connected)[0]  # of the process that called listen(2)
    if listener == engine.pid or descends_from(listener, with_guardian(engine.pid)):
        return False
    engine.is_another()
    return True


def _credentials(sock: Any) -> tuple[int, int, int]:
    pid, user, group = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user, group


def is_engine(accepted: Any) -> bool:
    """Tells whether such an engine, or a process of it in whatever session, opened this connection; also True of a
    process that has ended, of which nobody knows. A system call and a file for each ancestor of the process; nothing
    while there is no such engine. `accepted` is the socket of a loop's transport."""
    if not guardians:
        return False
    pid, user, _ = _credentials(accepted)
    if user != os.geteuid() or pid == 0:  # another user's, or outside our namespace: an engine is neither
        return False
    return descends_from(pid, guardians) is not False
