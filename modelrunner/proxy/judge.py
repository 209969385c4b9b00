"""What the fast lane makes of a request's head. Heads are judged once and remembered, since a client sends the same one
again and again but for its Content-Length."""

from dataclasses import dataclass
from functools import lru_cache

from modelrunner.errors import ModelRunnerError
from modelrunner.http1 import part_length, with_length
from modelrunner.proxy.head import RequestHead
from modelrunner.proxy.inference import Terms
from modelrunner.proxy.pipeline import Pipeline
from modelrunner.proxy.render import Header, harmless_id, new_request_id
from modelrunner.proxy.wire import cors


@dataclass(frozen=True, slots=True)
class Judged:
    """A head of an inference request, found good. `length` is its Content-Length, -1 for none, and stands for that of
    others; `cors` goes into the answer."""

    terms: Terms
    cors: tuple[Header, ...]
    length: int
    keep_alive: bool
    http_1_0: bool
    expects: bool


class Judge:
    """For one listener."""

    def __init__(self, pipeline: Pipeline, *, local: bool) -> None:
        self._pipeline = pipeline
        self._local = local
        self._access = pipeline.access
        self._remembered = lru_cache(maxsize=256)(self._judge)

    def read(self, data: bytes) -> tuple[Judged, int] | None:
        """The head's meaning and the length of its body; None if it is not for the fast lane. Raises
        `ModelRunnerError`."""
        before, after, length = part_length(data)
        judged = self._remembered(before, after, self._access.generation)
        if judged is None:
            return None
        return judged, judged.length if length is None else length

    def _judge(self, before: bytes, after: bytes, generation: int) -> Judged | None:
        """`generation` is that of the access rules: when they change, what was judged by them is."""
        head = self._parse(with_length(before, after))
        line = head.line
        if line.route is None or head.chunked:
            return None
        terms = self._pipeline.terms(line.route, head.get, line.authority, local=self._local)
        expects = head.get("expect") is not None
        return Judged(terms, cors(terms.origin), head.length, head.keep_alive, line.http_1_0, expects)

    def who(self, data: bytes) -> tuple[str, str | None]:
        """The ID and the origin of a request that was refused, as far as its head lets them be known."""
        ask_id = new_request_id()
        try:
            head = self._parse(data)
            ask_id = harmless_id(head.get("x-request-id")) or ask_id
            return ask_id, self._pipeline.origin(head.get, head.line.authority, local=self._local)
        except ModelRunnerError:
            return ask_id, None

    def _parse(self, data: bytes) -> RequestHead:
        return RequestHead(data, self._pipeline.limits.header_count)
