"""The connections of one listening socket: their number and their time limits. One timer checks all connections, so a
request sets no timer of its own. The functions below ask the operating system about one connection."""

import asyncio
import fcntl
import select
import socket
import struct
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass, field
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

    def abort(self) -> None: ...

    def drain(self) -> None:
        """Takes no further request; closes at once if it has none."""


@dataclass(slots=True)
class _Peer:
    connections: int = 0
    idle: dict[Connection, None] = field(default_factory=dict)
    """Those that wait for their client, the one that waits the longest first."""


class Listener:
    """When the listener is full, a new client replaces the client that has been silent the longest. So clients that
    only hold connections cannot block others. `is_engine` takes the socket of a connection, and returns whether an
    engine opened it. A timer checks the connections every `check_every` seconds: `looked_at` is the time of the last
    check, in the loop's time, and `date` is the Date line of answers for that time."""

    def __init__(
        self, limits: Limits, *, local: bool, is_engine: Callable[[Any], bool] = lambda accepted: False
    ) -> None:
        self.limits = limits
        self.local = local
        self._is_engine = is_engine
        self.draining = False
        self._connections: dict[Connection, tuple[_Peer, ...]] = {}
        """Each with the groups whose limits it counts for."""
        self._refused: dict[Connection, None] = {}
        self._peers: dict[str, _Peer] = {}
        self._everyone = _Peer()
        self._unsent: dict[Connection, int] = {}
        self._total_unsent = 0
        self._timer: asyncio.TimerHandle | None = None
        self.looked_at = 0.0
        self.date = b""

    def __len__(self) -> int:
        return len(self._connections) + len(self._refused)

    def enter(self, connection: Connection, transport: asyncio.BaseTransport) -> ModelRunnerError | None:
        """Adds a connection. Returns the error if it is refused: it stays open for that answer, until too many refused
        connections do. Call `leave` in both cases."""
        room = self._make_room(connection.peer)
        if room:
            self._connections[connection] = groups = self._groups(connection)
            for peer in groups:
                peer.connections += 1
            self.idle(connection)
        else:
            self._refused[connection] = None
            if len(self._refused) > _MOST_REFUSED:
                self._remove(next(iter(self._refused)))
        if self._timer is None:
            self._sweep()
        if not room or self.draining:
            return Unavailable("there are too many connections")
        if self._is_engine(transport.get_extra_info("socket")):
            return Forbidden(
                "engines may not use the daemon: an engine opened this connection, or a program that ended"
            )
        return None

    def idle(self, connection: Connection) -> None:
        """Records that the connection waits for bytes of its client: it may have to go for a new one."""
        for peer in self._connections.get(connection, ()):
            peer.idle.pop(connection, None)
            peer.idle[connection] = None

    def busy(self, connection: Connection) -> None:
        """Records that the connection has a whole request, which is being answered."""
        for peer in self._connections.get(connection, ()):
            peer.idle.pop(connection, None)

    def full(self, connection: Connection, unsent: int) -> None:
        """Records that the client does not read, and `unsent` bytes wait for it. If all of them are too many, the
        connection with the most goes."""
        self.flowing(connection)
        self._unsent[connection] = unsent
        self._total_unsent += unsent
        while self._total_unsent > self.limits.total_unsent:
            most = max(self._unsent, key=self._unsent.__getitem__)
            self.leave(most)
            asyncio.get_running_loop().call_soon(most.abort)  # its transport is perhaps in the middle of a write

    def flowing(self, connection: Connection) -> None:
        """Records that the client reads again."""
        self._total_unsent -= self._unsent.pop(connection, 0)

    def _groups(self, connection: Connection) -> tuple[_Peer, ...]:
        if self.local:
            return (self._everyone,)
        return self._everyone, self._peers.setdefault(connection.peer, _Peer())

    def _make_room(self, address: str) -> bool:
        """Returns whether there is room, for which an idle connection may have to go. Refused connections do not count:
        they are few, and take no request."""
        peer = self._peers.get(address) if not self.local else None
        limits = ((peer, self.limits.per_peer), (self._everyone, self.limits.connections))
        for group, most in limits:
            if group is not None and group.connections >= most:
                longest = next(iter(group.idle), None)
                if longest is None:
                    return False
                self._remove(longest)
        return True

    def _remove(self, connection: Connection) -> None:
        connection.abort()
        self.leave(connection)

    def leave(self, connection: Connection) -> None:
        """Removes a closed connection. Safe to call again."""
        self.flowing(connection)
        self._refused.pop(connection, None)
        if connection in self._connections:
            self.busy(connection)
            for peer in self._connections.pop(connection):
                peer.connections -= 1
            if not self.local and not self._peers[connection.peer].connections:
                del self._peers[connection.peer]
        if not len(self) and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def drain(self) -> None:
        """Closes every connection as soon as it has nothing under way."""
        self.draining = True
        for connection in (*self._connections, *self._refused):
            connection.drain()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.limits.check_every, self._sweep)
        self.looked_at = now = loop.time()
        self.date = b"Date: %b\r\n" % formatdate(usegmt=True).encode()
        for connection in (*self._connections, *self._refused):
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
