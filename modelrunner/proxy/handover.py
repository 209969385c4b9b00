"""A connection that was handed to aiohttp: its protocol gets everything, and we keep count and notice who leaves."""

import asyncio
import math

from aiohttp import web

from modelrunner.proxy.listener import Listener, hung_up, peer_of


class HandedOver(asyncio.Protocol):
    def __init__(self, listener: Listener, transport: asyncio.Transport, inner: asyncio.Protocol) -> None:
        self._listener = listener
        self._transport = transport
        self.peer = peer_of(transport)
        self._inner = inner
        self._half_closed = False
        self._heard = asyncio.get_running_loop().time()

    def take_over(self, data: bytes) -> None:
        """`data` is what was read and not yet answered."""
        self._transport.set_protocol(self)
        self._inner.connection_made(self._transport)
        if data:
            self._inner.data_received(data)

    def data_received(self, data: bytes) -> None:
        self._heard = asyncio.get_running_loop().time()
        self._inner.data_received(data)

    def eof_received(self) -> bool:
        self._inner.eof_received()
        if not self._listener.local or self._in_a_body():
            return False
        self._half_closed = True
        self.drain()
        return True

    def _in_a_body(self) -> bool:
        """Does the request under way still lack a part of its body? aiohttp itself always closes at the end of input,
        so it offers no way to ask."""
        request = self._request()
        return request is not None and not request.content.is_eof()

    def _request(self) -> web.BaseRequest | None:
        """The one under way."""
        return self._inner._current_request if isinstance(self._inner, web.RequestHandler) else None

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.leave(self)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def due(self) -> float:
        waiting = self._request() is None or self._in_a_body()
        return self._heard + self._listener.limits.idle if waiting else math.inf

    def abort(self) -> None:
        self._transport.abort()

    def check(self, now: float) -> None:
        if self._in_a_body() and now > self._heard + self._listener.limits.body_idle:
            self._transport.abort()
        if self._half_closed and (self._in_a_body() or hung_up(self._transport, half=False)):
            self._transport.abort()

    def drain(self) -> None:
        if isinstance(self._inner, web.RequestHandler):
            self._inner.close()
