"""Recorded bodies of requests to models with `recording` in their configuration: in memory, shortened, and without keys
and files."""

from collections import deque
from collections.abc import Callable

import msgspec

from modelrunner import wire
from modelrunner.errors import ModelRunnerError, RequestNotFound
from modelrunner.gateway.calls import Inference, Sink
from modelrunner.gateway.headers import chunk
from modelrunner.gateway.request.observers import RequestRecord
from modelrunner.gateway.request.work import UnderWay
from modelrunner.http.answers import Header
from modelrunner.telemetry.redaction import redacted
from modelrunner.types import Mode

_SEARCHED = 1 << 20  # bytes of a body that are searched for keys and files; the rest is cut off
_OVERHEAD = 2048  # bytes of a recording without its bodies, about


class Recorded(msgspec.Struct, frozen=True):
    """One request to `path`. `owner` is its `InferenceHead.owner`."""

    record: RequestRecord
    owner: str
    path: str
    request: wire.RecordedText
    answer: wire.RecordedText

    @property
    def size(self) -> int:
        return len(self.request.text) + len(self.answer.text) + _OVERHEAD


class Recordings:
    """The newest recordings, of at most `memory` bytes; each body has at most `limit` bytes. `is_on` takes the name of
    a model, and returns whether its requests are recorded."""

    def __init__(self, is_on: Callable[[str, Mode], bool], memory: int, limit: int) -> None:
        self._is_on = is_on
        self._memory, self.limit = memory, limit
        self._kept: deque[Recorded] = deque()
        self._size = 0

    def tap(self, ask: Inference, sink: Sink) -> "Tap":
        """Returns a tap between a request and its client."""
        return Tap(self, ask, sink)

    def find(self, id: str, owner: str | None) -> Recorded:
        """Returns the newest recording of a request with this ID that `owner` may see; None may see all. Raises
        `RequestNotFound`."""
        for one in reversed(self._kept):
            if one.record.request_id == id and owner in (None, one.owner):
                return one
        raise RequestNotFound(
            "there is no recording of a request with this ID: bodies are recorded only for models with "
            "`modelrunner configure MODEL --recording on`"
        )

    def take(self, ask: Inference, record: RequestRecord, answer: bytes, size: int) -> None:
        """Keeps the bodies of a request that has ended, if its model is recorded."""
        route = ask.head.route
        if not record.served.model or not self._is_on(record.served.model, route.mode):
            return
        path = route.pattern.replace("{backend}", route.backend or "").replace("{runner}", route.runner or "")
        bodies = self._body(ask.body, len(ask.body)), self._body(answer, size)
        self._kept.append(recorded := Recorded(record, ask.head.owner, path, *bodies))
        self._size += recorded.size
        while self._size > self._memory:
            self._size -= self._kept.popleft().size

    def _body(self, start: bytes, size: int) -> wire.RecordedText:
        text, count = redacted(start[:_SEARCHED].decode("utf-8", "replace"))
        shown = text.encode()[: self.limit].decode("utf-8", "ignore")
        return wire.RecordedText(shown, size, shown == text and len(start) == size <= _SEARCHED, count)


class Tap:
    """The `Sink` of a request, which passes the answer on to the client's sink and keeps its start; also an `UnderWay`,
    which passes every call on to `work`."""

    takes_chunks = False
    work: UnderWay

    def __init__(self, recordings: Recordings, ask: Inference, sink: Sink) -> None:
        self.ask = ask
        self._recordings = recordings
        self._sink = sink
        self._framing = self._over = False
        self._start = bytearray()
        self._size = 0

    # UnderWay

    def start(self) -> None:
        self.work.start()

    def pause(self) -> None:
        self.work.pause()

    def resume(self) -> None:
        self.work.resume()

    def cancel(self) -> None:
        self.work.cancel()
        self._end()

    def stop(self, error: ModelRunnerError) -> None:
        self.work.stop(error)

    def record(self) -> RequestRecord:
        return self.work.record()

    # Sink

    def respond(self, status: int, headers: tuple[Header, ...], own: bytes, length: int | None, data: bytes) -> None:
        self._framing = length is None and self._sink.takes_chunks
        self._sink.respond(status, headers, own, length, self._passed(data))

    def write(self, data: bytes) -> None:
        self._sink.write(self._passed(data))

    def finish(self, *, failed: bool = False) -> None:
        self._end()
        if self._framing:
            self._sink.write(b"0\r\n\r\n")
        self._sink.finish(failed=failed)

    def cut(self) -> None:
        self._end()
        self._sink.cut()

    def _passed(self, data: bytes) -> bytes:
        self._size += len(data)
        self._start += data[: max(0, _SEARCHED - len(self._start))]
        return chunk(data) if self._framing and data else data

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._recordings.take(self.ask, self.work.record(), bytes(self._start), self._size)
