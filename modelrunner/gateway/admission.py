"""Admission: the fast lane's decision about a request's head, for every route. Heads are checked once and cached,
since a client sends the same one again and again but for its Content-Length."""

from dataclasses import dataclass
from functools import lru_cache

from modelrunner.errors import ModelRunnerError
from modelrunner.gateway.interfaces import Terms
from modelrunner.gateway.pipeline import HEADERS, Pipeline
from modelrunner.gateway.render import harmless_id, new_request_id
from modelrunner.gateway.routes import match
from modelrunner.http.answers import Header, cors
from modelrunner.http.requests import RequestHead, RequestLine, names_of
from modelrunner.http.responses import with_length

_NAMES = names_of(HEADERS)


@dataclass(frozen=True, slots=True)
class AdmittedHead:
    """A head that was found good. `terms` is None for a request that is not inference: aiohttp answers it. `length` is
    the Content-Length in bytes, -1 for none; of a remembered head it stands for that of others. `origin` is the allowed
    page that asks, if one does, and `cors` what the answer says about it. `request_id` is the client's own."""

    line: RequestLine
    terms: Terms | None
    origin: str | None
    cors: tuple[Header, ...]
    request_id: str | None
    length: int
    chunked: bool
    keep_alive: bool
    expects: bool


class Admission:
    """Judges the heads of one listener."""

    def __init__(self, pipeline: Pipeline, *, local: bool) -> None:
        self._pipeline = pipeline
        self._local = local
        self.read = lru_cache(maxsize=256)(self._read)
        """The meaning of a head that `part_length` has parted. The rules of access are asked anew when their number
        changes. Raises `ModelRunnerError`."""

    def _read(self, before: bytes, after: bytes, access_generation: int) -> AdmittedHead:
        head = self._parse(with_length(before, after))
        line, terms = head.line, None
        origin = self._pipeline.admit(head.get, line.authority, local=self._local)
        route = match(line.path) if line.method == "POST" else None
        if route is not None:
            terms = self._pipeline.terms(route, head.get, origin)
        return AdmittedHead(
            line,
            terms,
            origin,
            cors(origin),
            harmless_id(head.get("x-request-id")),
            head.length,
            head.chunked,
            head.keep_alive,
            head.get("expect") is not None,
        )

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
        return RequestHead(data, self._pipeline.limits.header_count, _NAMES)
