"""Closing a client's connection so that it is noticed."""

import asyncio
import socket
import struct

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close sends RST


def sever(transport: asyncio.Transport) -> None:
    """What was written goes out, then the connection is reset (on a Unix socket: closed): a body that only the end of
    the connection ends is not taken for whole."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.close()
