"""The listening socket that a service manager made: it starts the daemon with the first client."""

import os
import socket
from collections.abc import MutableMapping

_FIRST = 3


def handed_over(environ: MutableMapping[str, str] = os.environ) -> socket.socket | None:
    """Takes the Unix socket from LISTEN_FDS (systemd: sd_listen_fds(3)), once, so that engines do not get it; closes
    other sockets. None where LISTEN_PID is not this process."""
    count, pid = environ.pop("LISTEN_FDS", ""), environ.pop("LISTEN_PID", "")
    environ.pop("LISTEN_FDNAMES", None)
    if not count.isdecimal() or pid != str(os.getpid()):
        return None
    found = None
    for descriptor in range(_FIRST, _FIRST + int(count)):
        each = socket.socket(fileno=descriptor)
        if found is None and each.family == socket.AF_UNIX:
            each.set_inheritable(False)
            found = each
        else:
            each.close()
    return found
