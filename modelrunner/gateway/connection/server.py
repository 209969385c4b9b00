"""The fast lane: a listening socket whose connections answer inference in callbacks of the event loop, without a task.
Any other request is handed to aiohttp; its connection stays here."""

import asyncio
from collections.abc import Callable
from typing import Any

from modelrunner.gateway.connection.admission import Admission
from modelrunner.gateway.connection.connection import ClientConnection
from modelrunner.gateway.request.pipeline import Pipeline
from modelrunner.http.listener import Listener
from modelrunner.http.tls import ContextOf, TlsConnection


class InferenceServer:
    """The protocol factory of a listening socket. `fallback` makes an aiohttp protocol for one request that is not
    inference; `local` is True for the Unix socket; `is_engine` is that of `Listener`. `tls` returns the current TLS
    context; it is None for a socket without TLS."""

    def __init__(
        self,
        pipeline: Pipeline,
        fallback: Callable[[], asyncio.Protocol],
        *,
        local: bool,
        tls: ContextOf | None = None,
        is_engine: Callable[[Any], bool] = lambda accepted: False,
    ) -> None:
        self.pipeline = pipeline
        self.fallback = fallback
        self.listener = Listener(pipeline.limits, local=local, is_engine=is_engine)
        self.admission = Admission(pipeline, local=local)
        self._tls = tls

    def __call__(self) -> asyncio.Protocol:
        connection = ClientConnection(self.pipeline, self.listener, self.admission, self.fallback)
        return TlsConnection(self._tls, connection) if self._tls is not None else connection

    def drain(self) -> None:
        """Closes every connection as soon as it has nothing under way."""
        self.listener.drain()
