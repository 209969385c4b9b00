"""Admission of a request: from its head and body to an exchange. Inference and control plane share it, so that the same
rules hold for both."""

import re
from collections.abc import Callable
from hashlib import sha256
from time import perf_counter, time

import msgspec

from modelrunner.errors import (
    ExpectationFailed,
    LengthRequired,
    ModelRunnerError,
    PayloadTooLarge,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
)
from modelrunner.gateway.calls import Asked, Inference, Interceptor, Recorder, Sink, Terms, UnderWay, asked
from modelrunner.gateway.connection.access import Access
from modelrunner.gateway.dialects.dialect import Fields
from modelrunner.gateway.headers import harmless_id
from modelrunner.gateway.request.exchange import Exchange
from modelrunner.gateway.request.leasing import AliasChooser, Leasing, Resolve
from modelrunner.gateway.request.observers import CONTROL, Observers, RequestRecord, shortened
from modelrunner.gateway.request.quarantine import Quarantine
from modelrunner.gateway.response_store import ResponseStore
from modelrunner.gateway.routes import Route, dialect_of, match
from modelrunner.http.answers import Header
from modelrunner.http.limits import Limits
from modelrunner.keys.allowances import AddressAllowances, Allowance, begin_all
from modelrunner.keys.ring import KeyHolder, KeyRing, Scope
from modelrunner.scheduler import Scheduler
from modelrunner.types import KeepAlive

HEADERS = frozenset(
    (
        *("host", "origin", "content-type", "content-encoding", "expect", "authorization"),
        *("x-api-key", "x-caller", "x-preload-only", "x-priority", "x-progress", "x-request-id", "x-resumable"),
        "traceparent",
    )
)
"""The fields of a request's head that are used, in lower case. Each may be given once."""
GetHeader = Callable[[str], str | None]
"""Returns one of these by its name in lower case, None if the request lacks it."""
_LONGEST_CALLER = 64
_INFERENCE = Scope.INFERENCE  # to look it up in its class costs every request
IS_OPEN = re.compile(r"/|/health|/ready|/openapi\.json|/(docs|ui(/[a-z0-9][a-z0-9.-]*)?)").fullmatch
"""Matches a path that needs no API key: monitors have none, and the document and the files of the page hold no data. It
matches no path with `..` or an escape, which the router could resolve to another route."""


class Pipeline(Leasing):
    """Requests on their way. `keys` are the API keys; without them, everybody owns the daemon. `responses` keeps the
    responses of OpenAI's API, `recorder` keeps bodies; with `tracing`, each request gets a trace. `running` are the
    requests under way, `buffered` the bytes of their bodies; both change when an exchange or a `Relay` begins and ends.
    `observers` are told of every request, `addresses` limits those of each client's address."""

    def __init__(
        self,
        resolve: Resolve,
        scheduler: Scheduler,
        access: Access,
        limits: Limits,
        keys: KeyRing | None = None,
        *,
        responses: ResponseStore | None = None,
        recorder: Recorder | None = None,
        tracing: bool = False,
    ) -> None:
        self.resolve = resolve
        self.scheduler = scheduler
        self.access = access
        self.limits = limits
        self.aliases: AliasChooser | None = None
        self.responses = responses
        self.keys = keys
        self.addresses = AddressAllowances()
        self.observers = Observers()
        self.tracing = tracing
        self.quarantine = Quarantine()
        self.running: set[UnderWay] = set()
        self.buffered = 0
        self._interceptors: tuple[Interceptor, ...] = ()
        self._streams: tuple[Interceptor, ...] = ()
        self._recorder = recorder

    def use_interceptors(self, *interceptors: Interceptor, streams: Interceptor | None = None) -> None:
        """Sets the interceptors: each is asked for a request before the request gets an exchange. `streams` is asked
        first for requests that ask to be resumable."""
        self._interceptors = interceptors
        self._streams = () if streams is None else (streams,)

    def use_aliases(self, aliases: AliasChooser | None) -> None:
        """Sets the names that stand for models. With None, no request looks for one."""
        self.aliases = aliases

    # admission, in this order

    def origin(self, header: GetHeader, authority: str | None, *, local: bool) -> str | None:
        """Returns the allowed Origin of the request, if it has one. `authority` is the host of an absolute target.
        Raises `Forbidden`."""
        return self.access.check(header("host"), header("origin"), authority, local=local)

    def admit(self, header: GetHeader, authority: str | None, *, local: bool) -> str | None:
        """Checks the head of any request, and returns the allowed Origin, if it has one. Raises `Forbidden`,
        `ExpectationFailed`, `UnsupportedMediaType`."""
        origin = self.origin(header, authority, local=local)
        if (header("expect") or "100-continue").lower() != "100-continue":
            raise ExpectationFailed("the only supported expectation is 100-continue")
        if header("content-encoding") not in (None, "identity"):
            raise UnsupportedMediaType("compressed bodies are not supported: send the JSON uncompressed")
        return origin

    def key(self, header: GetHeader, path: str, *, local: bool) -> KeyHolder | None:
        """Returns the API key of the request; None for the owner of the daemon, which is every client while there are
        no keys, and a client of the Unix socket without a key. Raises `Unauthorized`."""
        if not self.keys or IS_OPEN(path):
            return None
        text = _key_text(header)
        if local:
            return self.keys.known(text)
        if not text:
            raise Unauthorized("send an API key: `Authorization: Bearer KEY` or `X-API-Key: KEY`")
        return self.keys.find(text)

    def terms(self, route: Route, header: GetHeader, origin: str | None, key: KeyHolder | None = None) -> Terms:
        """Returns the terms of an admitted inference request from its head. Raises `UnsupportedMediaType`."""
        # A page can send other types without a preflight; programs (curl -d) often send a wrong type.
        if origin is not None and not _is_json(header("content-type")):
            raise UnsupportedMediaType("send the body as application/json")
        return Terms(
            route,
            origin,
            harmless_id(header("x-request-id")),
            key.key.name if key is not None else _caller(header),
            (header("x-priority") or "").lower() == "batch" or (key is not None and key.key.batch),
            (header("x-preload-only") or "").lower() == "true",
            header("x-progress") == "events",
            key,
            (header("x-resumable") or "").lower() == "true",
            header("traceparent"),
            key.key.owner if key is not None else "",
        )

    def buffer(self, size: int, whole: int) -> None:
        """Counts `size` more bytes of a body with at least `whole` bytes. Raises `LengthRequired` for a negative
        length, `PayloadTooLarge`, and `Unavailable` if all bodies together are too large."""
        if whole < 0:
            raise LengthRequired("the request has no body: send JSON with a Content-Length")
        if whole > self.limits.body:
            raise PayloadTooLarge(f"the body has {whole} bytes; body_limit allows {self.limits.body}")
        if self.buffered + size > self.limits.total_body:
            raise Unavailable("the requests under way have too many bytes together; try again later")
        self.buffered += size

    def unbuffer(self, size: int) -> None:
        """Subtracts the bytes of a body that gets no exchange."""
        self.buffered -= size

    def exchange(
        self,
        terms: Terms,
        body: bytes,
        request_id: str,
        sink: Sink,
        fields: Fields | None = None,
        *,
        peer: str = "",
        goes_on: Inference | None = None,
        interceptors: tuple[Interceptor, ...] = (),
    ) -> UnderWay:
        """Makes an exchange, or the work of an interceptor, which the caller starts. `fields` are those of a body that
        is decoded already. The body counts as buffered until the work ends. `peer` is the client's address. `goes_on`
        is the request that this one continues, and was counted with. `interceptors` are asked before those of the
        pipeline. Raises `BadRequest`, `RateLimited`; `Unauthorized` and `Forbidden` for the API key."""
        arrived = perf_counter()
        fields = fields or terms.route.dialect.read(body)
        if fields.stream and not terms.route.streams:
            fields = msgspec.structs.replace(fields, stream=None)
        keep = None if fields.keep_alive is None else KeepAlive.parse(fields.keep_alive)
        only_loads = terms.preload or fields.only_loads
        alias = self.aliases.find(terms.route.dialect.name, fields.model) if self.aliases is not None else None
        counted: tuple[Allowance, ...] = ()
        if goes_on is not None:
            counted = goes_on.counted
            for allowance in counted:
                allowance.begin(len(body), arrived)
        else:
            if (key := terms.key) is not None and not key.may_always_ask:
                key.check(_INFERENCE)
            counted = self._counted(key, peer)
            begin_all(counted, len(body), arrived)
        ask = Inference(terms, fields, keep, body, request_id, arrived, only_loads, counted, alias, "", peer)
        if self._recorder is not None:
            target = self.resolve.known.get((terms.route.backend, fields.model, terms.route.mode))
            if target is None or target.recording:
                tap = self._recorder.tap(ask, sink)
                tap.work = self._work(ask, tap, interceptors=goes_on is None)
                return tap
        for interceptor in interceptors:
            if (work := interceptor.take(ask, sink)) is not None:
                return work
        if goes_on is None and (terms.resumable or self._interceptors):
            return self._work(ask, sink, interceptors=True)
        exchange = Exchange(self, ask, sink)  # as `plain`, whose call would cost every request
        self.running.add(exchange)
        return exchange

    def plain(self, ask: Inference, sink: Sink) -> Exchange:
        """Makes the exchange of a request that takes no interceptor, or that a interceptor asks for it."""
        exchange = Exchange(self, ask, sink)
        self.running.add(exchange)
        return exchange

    def _work(self, ask: Inference, sink: Sink, *, interceptors: bool) -> UnderWay:
        for interceptor in self._interceptors_of(ask) if interceptors else ():
            if (work := interceptor.take(ask, sink)) is not None:
                return work
        return self.plain(ask, sink)

    def _counted(self, key: KeyHolder | None, peer: str) -> tuple[Allowance, ...]:
        """Returns the allowances that count a request."""
        address = self.addresses.of(peer)  # None on the Unix socket
        return (*(() if address is None else (address,)), *(() if key is None else (key.allowance,)))

    def _interceptors_of(self, ask: Inference) -> tuple[Interceptor, ...]:
        return (*self._streams, *self._interceptors) if ask.terms.resumable else self._interceptors

    def refusal(
        self, error: ModelRunnerError, request_id: str, path: str, terms: Terms | None = None, peer: str = ""
    ) -> tuple[tuple[Header, ...], bytes]:
        """Returns headers and body of the answer to a request that gets no exchange, in the shape of the path's
        family. `terms` are those of its head, if that was admitted; `peer` is the client's address."""
        dialect = dialect_of(path)
        family = dialect.name if terms is not None or match(path) is not None else CONTROL
        self._tell(asked(family, shortened(path), *_who(terms)), request_id, error.status, error.code, peer)
        return dialect.error(error, request_id)

    def ended(self, work: UnderWay) -> None:
        """Tells the allowances that count a request, and the observers, that it is over."""
        record, ask = work.record(), work.ask
        for allowance in ask.counted:
            tokens = record.tokens
            allowance.end(tokens.prompt + tokens.answer, len(ask.body), ask.arrived + record.duration)
        if self.observers.active:
            self.observers.tell(record)

    def _tell(self, of: Asked, request_id: str, status: int, error: str, peer: str) -> None:
        if self.observers.active:
            self.observers.tell(RequestRecord(request_id, of, status, error, peer=peer, time=time()))


def _who(terms: Terms | None) -> tuple[str, str]:
    """Returns the caller and the name of the API key, as far as they are known."""
    return (terms.caller, terms.key_name) if terms is not None else ("", "")


def _key_text(header: GetHeader) -> str:
    scheme, _, token = (header("authorization") or "").partition(" ")
    return header("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")


def _caller(header: GetHeader) -> str:
    """Returns the caller's name for the scheduler: a part of the API key's hash, which is enough to distinguish keys;
    without a key, the name that the client gives."""
    key = _key_text(header)
    return sha256(key.encode()).hexdigest()[:16] if key else (header("x-caller") or "")[:_LONGEST_CALLER]


def _is_json(content_type: str | None) -> bool:
    kind = (content_type or "").partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")
