"""An answer that is kept in memory while it goes to its clients."""

from collections.abc import Callable

from modelrunner.gateway.interceptors.forwarded import Relay, served_by
from modelrunner.gateway.request.exchange import Exchange
from modelrunner.http.answers import Header


class Recording:
    """The `Sink` of the exchange `work`, which is set later, and the `AnswerSource` of relays. The request of the first
    relay made the exchange: only this relay gets an error of the exchange; the others then go on alone.

    At most `limit` bytes of the body are kept: `data`, from the byte `start` on. `unheard` is called when the last
    relay leaves an incomplete answer, `ended` after the last byte."""

    takes_chunks = False

    def __init__(self, limit: int, *, unheard: Callable[[], None], ended: Callable[[], None]) -> None:
        self.work: Exchange
        self.head: tuple[int, tuple[Header, ...], int | None] | None = None
        self.data = bytearray()
        self.start = 0
        self.over = self.complete = False
        self._limit = limit
        self._unheard, self._ended = unheard, ended
        self._relays: dict[Relay, bool] = {}  # True while the client of the relay reads no more
        self._first: Relay | None = None

    # AnswerSource

    def begin(self, relay: Relay) -> None:
        self._relays[relay] = False
        if self._first is None:
            self._first = relay
            self.work.start()
        elif self.head is not None:
            relay.respond(*self.head, bytes(self.data))

    def pause(self, relay: Relay) -> None:
        self._relays[relay] = True
        self.work.pause()

    def resume(self, relay: Relay) -> None:
        self._relays[relay] = False
        if not any(self._relays.values()):
            self.work.resume()

    def leave(self, relay: Relay) -> None:
        paused = self._relays.pop(relay, False)
        if not self._relays:
            self._unheard()
        elif paused and not any(self._relays.values()):
            self.work.resume()

    # Sink

    def respond(self, status: int, headers: tuple[Header, ...], own: bytes, length: int | None, data: bytes) -> None:
        self.head = (status, headers, length)
        self.keep(data)
        for relay in list(self._relays):
            if relay is self._first:
                relay.respond(status, headers, length, data, own)
            elif status == 200:
                relay.respond(status, headers, length, data)
            else:
                del self._relays[relay]
                relay.go_alone()

    def write(self, data: bytes) -> None:
        self.keep(data)
        for relay in list(self._relays):
            relay.write(data)

    def finish(self) -> None:
        self.complete = True
        self._end([relay.finish for relay in self._relays])

    def cut(self) -> None:
        self._end([relay.cut for relay in self._relays])

    def keep(self, data: bytes) -> None:
        self.data += data
        extra = len(self.data) - self._limit
        if extra > 0:
            del self.data[:extra]
            self.start += extra

    def _end(self, tell: list[Callable[[], None]]) -> None:
        self.over = True
        if self.work.lease is not None:
            for relay in self._relays:
                relay.served = served_by(self.work.lease.runner)
        self._relays = {}
        self._ended()
        for end in tell:
            end()
