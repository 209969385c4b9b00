"""The requests under way end with the API key that they were admitted with."""

import asyncio

from modelrunner.errors import Unauthorized
from modelrunner.gateway.calls import Inference
from modelrunner.gateway.connection.handover import HandoverTransport
from modelrunner.gateway.request.exchange import Exchange
from modelrunner.gateway.request.pipeline import IS_OPEN, Pipeline
from modelrunner.keys.ring import ApiKey, KeyRing

_LOOK = 60.0  # the most seconds between two checks of the time of day, which may be changed


class Revocation:
    """Cuts requests whose key is revoked, rotated or expired, and requests over TCP without a key once there are keys.
    Their handlers are cancelled as if the client had left. A change of the keys also ends the requests of models that
    wait for a runner and whose key is gone, or who need one now. Belongs to one event loop."""

    def __init__(self, pipeline: Pipeline, keys: KeyRing) -> None:
        self._pipeline = pipeline
        self._keys = keys
        self._loop = asyncio.get_running_loop()
        self._requests: dict[HandoverTransport, ApiKey | None] = {}
        self._timers: dict[HandoverTransport, asyncio.TimerHandle] = {}
        keys.watchers.append(self._changed)

    def begin(self, transport: HandoverTransport) -> None:
        """Follows the request of the transport, with a key or over TCP, until `end`. Does nothing for what is open to
        all, and for the answers of /keys, which report the change itself."""
        holder, path = transport.admitted.key, transport.admitted.line.path
        if (holder is None and IS_OPEN(path)) or path == "/keys" or path.startswith("/keys/"):
            return
        self._requests[transport] = key = holder.key if holder is not None else None
        if key is not None and key.expires is not None:
            self._look_at_expiry(transport, key)
        elif not self._keys.admits(key):
            transport.abort()

    def end(self, transport: HandoverTransport) -> None:
        self._requests.pop(transport, None)
        if (timer := self._timers.pop(transport, None)) is not None:
            timer.cancel()

    def _look_at_expiry(self, transport: HandoverTransport, key: ApiKey) -> None:
        if self._keys.admits(key):
            pause = min(self._keys.left(key), _LOOK)
            self._timers[transport] = self._loop.call_later(pause, self._look_at_expiry, transport, key)
        else:
            transport.abort()

    def _changed(self) -> None:
        """Called after a change of the keys, from any thread."""
        self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        for transport, key in list(self._requests.items()):
            if not self._keys.admits(key):
                transport.abort()
        for work in [*self._pipeline.running]:
            if isinstance(work, Exchange) and work.lease is None and not self._admits(work.ask):
                work.stop(
                    Unauthorized("the API key was revoked while the request waited for its model, or is needed now")
                )

    def _admits(self, ask: Inference) -> bool:
        if ask.head.key is not None:  # a new text of the key changes nothing for what it has begun
            return self._keys.owner(ask.head.owner) is not None
        return not ask.peer or not self._keys
