"""The daemon's listeners: its Unix socket, which is made again if its files are removed, and its TCP port."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from modelrunner.daemon.instance import AlreadyRunning, Announce, UnixListener, bind_tcp
from modelrunner.daemon.system_routes import Addresses
from modelrunner.errors import ModelRunnerError

log = logging.getLogger(__name__)

_INTERVAL = 0.5  # seconds

Serve = Callable[[UnixListener], Awaitable[asyncio.Server]]


class Doorway:
    """The published Unix socket. `addresses` have its path, and the reason if it cannot be reached."""

    def __init__(self, unix: UnixListener, addresses: Addresses, place: Callable[[], Path], announce: Announce) -> None:
        """`place` makes the folder of the socket and returns the socket's path. The path may change: systemd removes
        the runtime directory of a user who has logged out."""
        self._unix = unix
        self.addresses = addresses
        self._place = place
        self._announce = announce
        self._server: asyncio.Server | None = None

    async def open(self, serve: Serve) -> None:
        """Starts serving, then publishes the socket."""
        self._server = await serve(self._unix)
        self._unix.publish()
        self._announce(self.addresses.socket, self.addresses.listen)

    async def watch(self, serve: Serve) -> None:
        """Publishes a new socket when this one is gone. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL)
            if not self._unix.is_published():
                await self._publish_again(serve)

    async def _publish_again(self, serve: Serve) -> None:
        try:
            path = self._place()
            unix = UnixListener(path)
            self.close()
            self._unix, self.addresses.socket = unix, path
            await self.open(serve)
        except (ModelRunnerError, OSError) as error:  # `OSError`: the new folder is removed, too
            if not self.addresses.trouble:
                log.error("the socket %s is gone and cannot be made again: %s", self.addresses.socket, error)
            self.addresses.trouble = f"the socket {self.addresses.socket} is gone: {error}"
            return
        self.addresses.trouble = ""
        log.warning("the socket was gone: the daemon listens on %s", path)

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
