"""An answer that is kept in memory while it goes to its clients."""

from collections.abc import Callable
from functools import partial

from modelrunner.gateway.interceptors.forwarded_request import ForwardedRequest, served_by
from modelrunner.gateway.request.exchange import Exchange
from modelrunner.http.answers import Header


class SharedResponse:
    """The `Sink` of the exchange `work`, which is set later, and the `AnswerSource` of requests. The request of the
    first request made the exchange: only this request gets an error of the exchange; the others then go on alone.

    At most `limit` bytes of the body are kept: `data`, from the byte `start` on. `unheard` is called when the last
    request leaves an incomplete answer, `ended` after the last byte."""

    takes_chunks = False

    def __init__(self, limit: int, *, unheard: Callable[[], None], ended: Callable[[], None]) -> None:
        self.work: Exchange
        self.head: tuple[int, tuple[Header, ...], int | None] | None = None
        self.data = bytearray()
        self.start = 0
        self.over = self.complete = self.failed = False
        self._limit = limit
        self._unheard, self._ended = unheard, ended
        self._requests: dict[ForwardedRequest, bool] = {}  # True while the client of the request reads no more
        self._first: ForwardedRequest | None = None

    # AnswerSource

    def begin(self, request: ForwardedRequest) -> None:
        self._requests[request] = False
        if self._first is None:
            self._first = request
            self.work.start()
        elif self.head is not None:
            request.respond(*self.head, bytes(self.data))

    def pause(self, request: ForwardedRequest) -> None:
        self._requests[request] = True
        self.work.pause()

    def resume(self, request: ForwardedRequest) -> None:
        self._requests[request] = False
        if not any(self._requests.values()):
            self.work.resume()

    def leave(self, request: ForwardedRequest) -> None:
        paused = self._requests.pop(request, False)
        if not self._requests:
            self._unheard()
        elif paused and not any(self._requests.values()):
            self.work.resume()

    def is_between_events(self) -> bool:
        return self.work.is_between_events()

    # Sink

    def respond(self, status: int, headers: tuple[Header, ...], own: bytes, length: int | None, data: bytes) -> None:
        self.head = (status, headers, length)
        self.keep(data)
        for request in list(self._requests):
            if request is self._first:
                request.respond(status, headers, length, data, own)
            elif status == 200:
                request.respond(status, headers, length, data)
            else:
                del self._requests[request]
                request.go_alone()

    def write(self, data: bytes) -> None:
        self.keep(data)
        for request in list(self._requests):
            request.write(data)

    def finish(self, *, failed: bool = False) -> None:
        self.complete, self.failed = True, failed
        self._end([partial(request.finish, failed=failed) for request in self._requests])

    def cut(self) -> None:
        self._end([request.cut for request in self._requests])

    def keep(self, data: bytes) -> None:
        self.data += data
        extra = len(self.data) - self._limit
        if extra > 0:
            del self.data[:extra]
            self.start += extra

    def _end(self, tell: list[Callable[[], None]]) -> None:
        self.over = True
        if self.work.lease is not None:
            for request in self._requests:
                request.served = served_by(self.work.lease)
        self._requests = {}
        self._ended()
        for end in tell:
            end()
