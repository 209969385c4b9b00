"""The daemon's listeners: its Unix socket, which is made again if its files are removed, and its TCP port; and the data
directory, by which commands find the daemon."""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path

from modelrunner.concurrency.beat import beat
from modelrunner.config import lockfile
from modelrunner.daemon.instance import AlreadyRunning, Announce, UnixListener, bind_tcp
from modelrunner.daemon.system_routes import Addresses
from modelrunner.errors import ModelRunnerError

log = logging.getLogger(__name__)

_INTERVAL = 1.0  # seconds
_LOOKS = 5  # at the socket, for each one at the data directory, whose disk may hang: it takes a thread

Serve = Callable[[UnixListener], Awaitable[asyncio.Server]]


class Doorway:
    """The published Unix socket. `addresses` have its path, and the reason if it cannot be reached, or if the data
    directory is not where it was."""

    def __init__(self, unix: UnixListener, addresses: Addresses, place: Callable[[], Path], announce: Announce) -> None:
        """`place` makes the folder of the socket and returns the socket's path. The path may change: systemd removes
        the runtime directory of a user who has logged out."""
        self._unix = unix
        self.addresses = addresses
        self._place = place
        self._announce = announce
        self._server: asyncio.Server | None = None
        self._lock: os.stat_result | None = None  # that of the data directory, once it is open

    async def open(self, serve: Serve) -> None:
        """Starts serving, then publishes the socket."""
        self._server = await serve(self._unix)
        self._unix.publish()
        self._announce(self.addresses.socket, self.addresses.listen)
        self._lock = self._lock or self._found_lock()

    async def watch(self, serve: Serve) -> None:
        """Publishes a new socket when this one is gone, and tells when the data directory is. Runs until it is
        cancelled."""
        gone = moved = ""
        for look in count(1):
            await beat(_INTERVAL)
            if not self._unix.is_published():
                gone = await self._publish_again(serve)
                self._tell(gone or moved)
            if look % _LOOKS == 0:
                moved = await asyncio.to_thread(self._moved)
                self._tell(gone or moved)

    def _tell(self, trouble: str) -> None:
        if trouble and not self.addresses.trouble:
            log.error("%s", trouble)
        self.addresses.trouble = trouble

    def _found_lock(self) -> os.stat_result | None:
        try:
            return os.lstat(self.addresses.data / lockfile.NAME)
        except OSError:
            return None

    def _moved(self) -> str:
        """Returns a sentence if the data directory is not where it was, else "". What the daemon stores would go to
        another one, and commands would start a second daemon there."""
        lock = self._found_lock()
        if self._lock is None or (lock is not None and os.path.samestat(lock, self._lock)):
            return ""
        return (
            f"the data directory {self.addresses.data} was moved or removed: put it back where it was, or end this "
            "daemon and set MODELRUNNER_DATA_DIR"
        )

    async def _publish_again(self, serve: Serve) -> str:
        """Returns a sentence if it failed, else ""."""
        try:
            path = self._place()
            unix = UnixListener(path)
            self.close()
            self._unix, self.addresses.socket = unix, path
            await self.open(serve)
        except (ModelRunnerError, OSError) as error:  # `OSError`: the new folder is removed, too
            return f"the socket {self.addresses.socket} is gone and cannot be made again: {error}"
        log.warning("the socket was gone: the daemon listens on %s", path)
        return ""

    def close(self) -> None:
        """Accepts no more connections; open ones stay."""
        if self._server is not None:
            self._server.close()
        self._unix.close()


def open_port(listen: str, *, wanted: bool, beyond_loopback: bool) -> socket.socket | None:
    """Opens the TCP listener, None without one; on loopback alone unless more is allowed. If the port is taken, perhaps
    by the daemon of another user, an address that is only the default (not `wanted`) is given up: the Unix socket alone
    will do. Raises `ConfigurationError`, `AlreadyRunning`."""
    try:
        return bind_tcp(listen, beyond_loopback=beyond_loopback)
    except AlreadyRunning as error:
        if wanted:
            raise
        log.warning("%s; until then, this daemon is reached on its Unix socket only", error.message)
        return None
