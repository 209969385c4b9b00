"""Admission: the check of a request's head, for every route. Checked heads are cached, since a client usually sends the
same head again with another Content-Length."""

from dataclasses import dataclass
from functools import lru_cache

from modelrunner.errors import ModelRunnerError
from modelrunner.gateway.calls import InferenceHead
from modelrunner.gateway.headers import harmless_id, new_request_id
from modelrunner.gateway.request.pipeline import HEADERS, Pipeline
from modelrunner.gateway.routes import match
from modelrunner.http.answers import Header, cors
from modelrunner.http.requests import RequestHead, RequestLine, names_of
from modelrunner.http.responses import with_length
from modelrunner.keys.ring import KeyHolder

_NAMES = names_of(HEADERS)


@dataclass(frozen=True, slots=True)
class AdmittedHead:
    """The head of an admitted request, and the API key that it was admitted with. `inference` is None for a request
    that is not inference, which aiohttp answers. `length` is the Content-Length in bytes, -1 for none; a cached head
    may stand for other lengths. `origin` is the origin of an allowed web page, None without one, and `cors` has the
    answer's fields for it. `request_id` is the client's own. `generation` is that of the access rules."""

    line: RequestLine
    inference: InferenceHead | None
    origin: str | None
    cors: tuple[Header, ...]
    request_id: str | None
    length: int
    chunked: bool
    keep_alive: bool
    expects: bool
    key: KeyHolder | None
    generation: int


class Admission:
    """Checks the heads of one listener."""

    def __init__(self, pipeline: Pipeline, *, local: bool) -> None:
        self._pipeline = pipeline
        self._local = local
        self.read = lru_cache(maxsize=256)(self._read)
        """Checks a head that `part_length` has split. A new generation of the access rules invalidates the cache.
        Raises `ModelRunnerError`."""

    def _read(self, before: bytes, after: bytes, generation: int) -> AdmittedHead:
        head = self._parse(with_length(before, after))
        line, inference = head.line, None
        origin = self._pipeline.admit(head.get, line.authority, local=self._local)
        preflight = line.method == "OPTIONS" and origin is not None  # a browser sends no key with it
        key = None if preflight else self._pipeline.key(head.get, line.path, local=self._local)
        route = match(line.path) if line.method == "POST" else None
        if route is not None:
            inference = self._pipeline.inference_head(route, head.get, line.target, origin, key)
        return AdmittedHead(
            line,
            inference,
            origin,
            cors(origin),
            harmless_id(head.get("x-request-id")),
            head.length,
            head.chunked,
            head.keep_alive,
            head.get("expect") is not None,
            key,
            generation,
        )

    def identify(self, data: bytes) -> tuple[str, str | None]:
        """Returns the ID and the origin of a refused request, as far as its head shows them."""
        ask_id = new_request_id()
        try:
            head = self._parse(data)
            ask_id = harmless_id(head.get("x-request-id")) or ask_id
            return ask_id, self._pipeline.origin(head.get, head.line.authority, local=self._local)
        except ModelRunnerError:
            return ask_id, None

    def _parse(self, data: bytes) -> RequestHead:
        return RequestHead(data, self._pipeline.limits.header_count, _NAMES)
