"""A TCP port for a server that must be told its port."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port(address: str = "127.0.0.1") -> Iterator[int]:
    """A port that nobody else gets while the context lasts.

    A socket that is bound and does not listen holds it: the kernel gives the port to no connection and to no other
    socket that asks for any port. A server that sets SO_REUSEADDR, as servers do, can listen there (socket(7)).
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        yield holder.getsockname()[1]
