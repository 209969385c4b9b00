"""The connections of one listening socket: how many there are, and the clock that closes the ones which take too long.
One timer looks at all of them, so that a request sets no timer of its own."""

import asyncio
import math
import select
from collections import Counter
from typing import Protocol

from modelrunner.proxy.limits import Limits


class Connection(Protocol):
    peer: str
    """The address of the client, "" on a Unix socket."""

    def check(self, now: float) -> None:
        """Closes itself if a limit has passed. `now` is the loop's time."""

    def due(self) -> float:
        """When it closes if the client does nothing more; infinity while a request is being answered."""

    def abort(self) -> None: ...

    def drain(self) -> None:
        """Takes no further request; closes at once if it has none."""


class Listener:
    """When it is full, the client that has kept a place for nothing the longest gives it to the next one: clients that
    only hold connections keep nobody out."""

    def __init__(self, limits: Limits, *, local: bool) -> None:
        self.limits = limits
        self.local = local
        self.draining = False
        self._connections: set[Connection] = set()
        self._peers: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._connections)

    def enter(self, connection: Connection) -> bool:
        """False if there is no room; `leave` is to be called in both cases."""
        room = self._make_room(connection.peer)
        self._connections.add(connection)
        self._peers[connection.peer] += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.limits.check_every, self._sweep)
        return room

    def _make_room(self, peer: str) -> bool:
        if len(self._connections) >= self.limits.connections:
            others = list(self._connections)
        elif not self.local and self._peers[peer] >= self.limits.per_peer:
            others = [connection for connection in self._connections if connection.peer == peer]
        else:
            return True
        longest = min(others, key=lambda connection: connection.due())
        if longest.due() == math.inf:
            return False
        longest.abort()
        self.leave(longest)
        return True

    def replace(self, old: Connection, new: Connection) -> None:
        self._connections.discard(old)
        self._connections.add(new)

    def leave(self, connection: Connection) -> None:
        """Safe to call again."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        self._peers[connection.peer] -= 1
        if not self._peers[connection.peer]:
            del self._peers[connection.peer]
        if not self._connections and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def drain(self) -> None:
        """Every connection closes as soon as it has nothing under way."""
        self.draining = True
        for connection in list(self._connections):
            connection.drain()

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.limits.check_every, self._sweep)
        now = loop.time()
        for connection in list(self._connections):
            connection.check(now)


def peer_of(transport: asyncio.BaseTransport) -> str:
    """The address of the client, "" on a Unix socket."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


def hung_up(transport: asyncio.BaseTransport, *, half: bool) -> bool:
    """Has the client closed its end (`half`: at least its sending side)? For a connection that is not being read."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return True
    poll = select.poll()
    poll.register(sock.fileno(), getattr(select, "POLLRDHUP", 0) if half else 0)
    return any(event & (select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)) for _, event in poll.poll(0))
