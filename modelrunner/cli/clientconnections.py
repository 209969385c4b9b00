"""The connections of the command line's client: over a Unix socket, TCP, and TLS.

Python checks for signals before it enters a system call: a Ctrl-C in between would have no effect before the next byte.
So each connection waits for data in steps."""

import http.client
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from math import inf
from time import monotonic
from typing import Any

CONNECT_TIMEOUT = 5.0
_STEP = 0.1  # seconds: a late Ctrl-C feels immediate
_SHORTEST = 0.001  # seconds of the shortest step; 0 would mean no wait at all


def _in_steps(sock: socket.socket, receive: Callable[..., int], arguments: tuple[Any, ...]) -> int:
    limit = sock.gettimeout()
    end = inf if limit is None else monotonic() + limit
    try:
        while True:
            sock.settimeout(max(_SHORTEST, min(_STEP, end - monotonic())))
            with suppress(TimeoutError):
                return receive(*arguments)
            if monotonic() >= end:
                raise TimeoutError("timed out")
    finally:
        sock.settimeout(limit)


class _Socket(socket.socket):
    def recv_into(self, *arguments: Any) -> int:
        return _in_steps(self, super().recv_into, arguments)


class _TlsSocket(ssl.SSLSocket):
    def recv_into(self, *arguments: Any) -> int:
        return _in_steps(self, super().recv_into, arguments)


class TcpConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        limit = self.sock.gettimeout()
        self.sock = _Socket(fileno=self.sock.detach())
        self.sock.settimeout(limit)


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_TIMEOUT)
        self._path = path

    def connect(self) -> None:
        self.sock = _Socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class PinnedConnection(http.client.HTTPSConnection):
    """A connection to a certificate with the `fingerprint`, in lower-case hex; "" accepts a certificate that this
    machine trusts."""

    def __init__(self, host: str, port: int | None, fingerprint: str) -> None:
        context = ssl.create_default_context()
        context.sslsocket_class = _TlsSocket
        if fingerprint:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        super().__init__(host, port, timeout=CONNECT_TIMEOUT, context=context)
        self._fingerprint = fingerprint

    def connect(self) -> None:
        """Connects. Raises `SSLError` for another certificate, before anything is sent."""
        super().connect()
        certificate = self.sock.getpeercert(binary_form=True) or b""
        if self._fingerprint and sha256(certificate).hexdigest() != self._fingerprint:
            self.close()
            raise ssl.SSLError(f"its certificate has the fingerprint {sha256(certificate).hexdigest()}")
