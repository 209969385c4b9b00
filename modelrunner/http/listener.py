"""The connections of one listening socket: their number and their time limits. One timer checks all connections, so a
request sets no timer of its own. The functions below ask the operating system about one connection."""

import asyncio
import fcntl
import math
import select
import socket
import struct
import sys
import termios
from collections import Counter, deque
from collections.abc import Callable
from email.utils import formatdate
from typing import Any, Protocol

from modelrunner.errors import Forbidden, ModelRunnerError, Unavailable
from modelrunner.http.limits import Limits

_MOST_REFUSED = 32  # connections beyond the limit that get an answer with the reason
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close sends RST


class Connection(Protocol):
    peer: str
    """The address of the client, "" on a Unix socket."""

    def check(self, now: float) -> None:
        """Closes the connection if a limit has passed. `now` is the loop's time."""

    def due(self) -> float:
        """Returns the time at which the connection closes if the client stays idle; infinity while a request is being
        answered."""

    def abort(self) -> None: ...

    def drain(self) -> None:
        """Takes no further request; closes at once if it has none."""


class Listener:
    """When the listener is full, a new client replaces the client that has been idle the longest. So clients that only
    hold connections cannot block others. `is_engine` takes the socket of a connection, and returns whether an engine
    opened it. A timer checks the connections every `check_every` seconds: `looked_at` is the time of the last check, in
    the loop's time, and `date` is the Date line of answers for that time."""

    def __init__(
        self, limits: Limits, *, local: bool, is_engine: Callable[[Any], bool] = lambda accepted: False
    ) -> None:
        self.limits = limits
        self.local = local
        self._is_engine = is_engine
        self.draining = False
        self._connections: set[Connection] = set()
        self._peers: Counter[str] = Counter()
        self._refused: deque[Connection] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.looked_at = 0.0
        self.date = b""

    def __len__(self) -> int:
        return len(self._connections)

    def enter(self, connection: Connection, transport: asyncio.BaseTransport) -> ModelRunnerError | None:
        """Adds a connection. Returns the error if it is refused: it stays open for that answer, until too many refused
        connections do. Call `leave` in both cases."""
        room = self._make_room(connection.peer)
        self._connections.add(connection)
        self._peers[connection.peer] += 1
        if not room:
            self._refused.append(connection)
            if len(self._refused) > _MOST_REFUSED:
                self._remove(self._refused[0])
        if self._timer is None:
            self._sweep()
        if not room or self.draining:
            return Unavailable("there are too many connections")
        if self._is_engine(transport.get_extra_info("socket")):
            return Forbidden(
                "engines may not use the daemon: an engine opened this connection, or a program that ended"
            )
        return None

    def _make_room(self, peer: str) -> bool:
        """Returns whether there is room, for which an idle connection may have to go. Refused connections do not count:
        they are few, and take no request."""
        full = len(self._connections) - len(self._refused) >= self.limits.connections
        if not full and (self.local or self._peers[peer] < self.limits.per_peer):
            return True
        others = self._connections.difference(self._refused)
        if not full:
            others = {connection for connection in others if connection.peer == peer}
            if len(others) < self.limits.per_peer:
                return True
        longest = min(others, key=lambda connection: connection.due())
        if longest.due() == math.inf:
            return False
        self._remove(longest)
        return True

    def _remove(self, connection: Connection) -> None:
        connection.abort()
        self.leave(connection)

    def leave(self, connection: Connection) -> None:
        """Removes a closed connection. Safe to call again."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        if connection in self._refused:
            self._refused.remove(connection)
        self._peers[connection.peer] -= 1
        if not self._peers[connection.peer]:
            del self._peers[connection.peer]
        if not self._connections and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def drain(self) -> None:
        """Closes every connection as soon as it has nothing under way."""
        self.draining = True
        for connection in list(self._connections):
            connection.drain()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.limits.check_every, self._sweep)
        self.looked_at = now = loop.time()
        self.date = b"Date: %b\r\n" % formatdate(usegmt=True).encode()
        for connection in list(self._connections):
            connection.check(now)


def peer_of(transport: asyncio.BaseTransport) -> str:
    """Returns the address of the client, "" on a Unix socket."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


def hung_up(transport: asyncio.BaseTransport, *, half: bool) -> bool:
    """Returns True if the client has closed the connection, or with `half` at least its sending side. Needed while the
    connection is not read."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return True
    poll = select.poll()
    poll.register(sock.fileno(), getattr(select, "POLLRDHUP", 0) if half else 0)
    return any(event & (select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)) for _, event in poll.poll(0))


def unsent(transport: asyncio.WriteTransport) -> int:
    """Returns how many written bytes a slow client's machine has not accepted; 0 while the kernel accepts all. Linux
    counts the bytes in the kernel too; elsewhere only the bytes in this process are known."""
    waiting = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if not waiting or sock is None or sys.platform != "linux":
        return waiting
    try:
        queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")  # SIOCOUTQ: tcp(7), unix(7)
    except OSError:
        return waiting
    return waiting + int(struct.unpack("i", queued)[0])


def sever(transport: asyncio.Transport) -> None:
    """Ends a connection so that the client notices an incomplete answer: the written bytes go out, then the connection
    is reset (on a Unix socket: closed)."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.get_extra_info("bare", transport).close()
