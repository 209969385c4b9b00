"""Recognises connections to the daemon's Unix socket that an engine opened. Whoever uses the socket is the daemon's
owner, and an engine with the permission `network` can connect to it.

A TCP connection tells nothing of its process: the kernel says which socket it is, but a socket can be held by several
processes, or by none while one sends it to another. So the sandbox closes the daemon's port (confinement.py)."""

import os
import socket
import struct
from typing import Any

from modelrunner.processes.processtree import descends_from

_CREDENTIALS = struct.Struct("3i")  # struct ucred (unix(7)): process ID, user, group

guardians: set[int] = set()
"""Process IDs of the guardians whose engines are confined, and may open connections."""


def is_engine(accepted: Any) -> bool:
    """Tells whether such an engine, or a process of it in whatever session, opened this connection; also True of a
    process that has ended, of which nobody knows. A system call and a file for each ancestor of the process; nothing
    while there is no such engine. `accepted` is the socket of a loop's transport."""
    if not guardians:
        return False
    pid, user, _ = _CREDENTIALS.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid() or pid == 0:  # another user's, or outside our namespace: an engine is neither
        return False
    return descends_from(pid, guardians) is not False
