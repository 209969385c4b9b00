"""Admission of a request: from its head and body to an exchange. Inference and control plane share it, so that the same
rules hold for both."""

import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from time import perf_counter, time

import msgspec

from modelrunner.errors import (
    ExpectationFailed,
    ModelRunnerError,
    Unauthorized,
    UnsupportedMediaType,
)
from modelrunner.gateway.access import Access
from modelrunner.gateway.calls import Fields, Inference, InferenceHead, Route, Sink, client_of, labels
from modelrunner.gateway.headers import harmless_id
from modelrunner.gateway.request.exchange import Exchange, Exchanges
from modelrunner.gateway.request.in_flight import InFlight
from modelrunner.gateway.request.leases import AliasChooser, Leases, Resolve
from modelrunner.gateway.request.observers import CONTROL, RequestRecord, shortened
from modelrunner.gateway.request.work import Interceptor, Recorder, UnderWay
from modelrunner.gateway.response_store import ResponseStore
from modelrunner.gateway.routes import dialect_of, match
from modelrunner.gateway.uploads import RequestUpload
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
IS_OPEN = re.compile(r"/|/health|/ready|/openapi\.json|/(docs|ui(/[a-z0-9][a-z0-9.-]*)?)").fullmatch
"""Matches a path that needs no API key: monitors have none, and the document and the files of the page hold no data. It
matches no path with `..` or an escape, which the router could resolve to another route."""


class Pipeline:
    """Requests on their way. It is the `Preparing` of the dialects."""

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
        spool: Path | None = None,
    ) -> None:
        """`keys` are the API keys; without them, everybody owns the daemon. `responses` keeps the responses of OpenAI's
        API, `recorder` keeps bodies; with `tracing`, each request gets a trace. Large uploads go through files in the
        folder `spool`."""
        self.access = access
        self.limits = limits
        self.keys = keys
        self.responses = responses
        self.leases = Leases(resolve, scheduler)
        self.in_flight = InFlight(limits, tracing=tracing)
        self.exchanges = Exchanges(self.leases, self.in_flight, self)
        self.observers = self.in_flight.observers
        self.running = self.in_flight.running
        self.addresses = AddressAllowances()
        """The limits of the requests of each client's address."""
        self.spool = spool
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
        self.leases.aliases = aliases

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

    def inference_head(
        self, route: Route, header: GetHeader, target: str, origin: str | None, key: KeyHolder | None = None
    ) -> InferenceHead:
        """Returns what an admitted inference request's head says. `target` is its path with the query. Raises
        `UnsupportedMediaType`."""
        # A page can send other types without a preflight; programs (curl -d) often send a wrong type.
        if origin is not None and not route.uploads and not _is_json(header("content-type")):
            raise UnsupportedMediaType("send the body as application/json")
        return InferenceHead(
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
            header("content-type") or "",
            target.partition("?")[2],
        )

    def read(self, head: InferenceHead, body: bytes | RequestUpload) -> Fields:
        """Returns the fields of a body. Raises `BadRequest`."""
        if isinstance(body, RequestUpload):
            return head.route.dialect.read_upload(body, head.content_type, head.query)
        return head.route.dialect.read(body)

    def exchange(
        self,
        head: InferenceHead,
        body: bytes | RequestUpload,
        request_id: str,
        sink: Sink,
        fields: Fields | None = None,
        *,
        peer: str = "",
        interceptors: tuple[Interceptor, ...] = (),
    ) -> UnderWay:
        """Makes an exchange, or the work of an interceptor, which the caller starts. `fields` are those of a body that
        is decoded already. The body counts as buffered until the work ends. `peer` is the client's address.
        `interceptors` are asked before those of the pipeline. Raises `BadRequest`, `RateLimited`; `Unauthorized` and
        `Forbidden` for the API key."""
        arrived = perf_counter()
        json, upload = (b"", body) if isinstance(body, RequestUpload) else (body, None)
        fields = fields or (head.route.dialect.read(json) if upload is None else self.read(head, upload))
        if fields.stream and not head.route.streams:
            fields = msgspec.structs.replace(fields, stream=None)
        keep = None if fields.keep_alive is None else KeepAlive.parse(fields.keep_alive)
        aliases = self.leases.aliases
        alias = aliases.find(head.route.dialect.name, fields.model) if aliases is not None else None
        counted: tuple[Allowance, ...] = ()
        if head.key is not None or self.addresses.active:
            counted = self._counted(head.key, peer, len(json), arrived)
        only_loads = head.preload or fields.only_loads
        ask = Inference(
            head, fields, keep, json, request_id, arrived, only_loads, counted, alias, peer=peer, upload=upload
        )
        streams = self._streams if head.resumable else ()
        return self._work(ask, sink, (*interceptors, *streams, *self._interceptors))

    def go_on(self, ask: Inference, sink: Sink) -> UnderWay:
        """Makes the work on a request that goes on without its client. It counts with the same allowances. Raises
        `Unavailable` if all bodies together are too large."""
        size = len(ask.body) + ask.held
        self.in_flight.buffer(client_of(ask.head, ask.peer), size, len(ask.body))
        arrived = perf_counter()
        for allowance in ask.counted:
            allowance.begin(len(ask.body), arrived)
        return self._work(msgspec.structs.replace(ask, arrived=arrived), sink, ())

    async def unload(self, ask: Inference) -> None:
        """Ends the runners of the request's model once they are free. Raises as `Leases.lease`."""
        await self.leases.unload(ask)

    def _work(self, ask: Inference, sink: Sink, interceptors: tuple[Interceptor, ...]) -> UnderWay:
        tap = None
        if self._recorder is not None and ((target := self.leases.known(ask)) is None or target.recording):
            sink = tap = self._recorder.tap(ask, sink)
        work: UnderWay | None = None
        for interceptor in interceptors:
            if (work := interceptor.take(ask, sink)) is not None:
                break
        work = work or Exchange(self.exchanges, ask, sink)
        if tap is None:
            return work
        tap.work = work
        return tap

    def _counted(self, key: KeyHolder | None, peer: str, size: int, now: float) -> tuple[Allowance, ...]:
        """Counts a request, and returns the allowances that count it. Raises `RateLimited`, `Unauthorized` and
        `Forbidden`."""
        if key is not None and not key.may_always_ask:
            key.check(Scope.INFERENCE)
        address = self.addresses.of(peer)  # None on the Unix socket
        counted = (*(() if address is None else (address,)), *(() if key is None else (key.allowance,)))
        begin_all(counted, size, now)
        return counted

    def refusal(
        self, error: ModelRunnerError, request_id: str, path: str, head: InferenceHead | None = None, peer: str = ""
    ) -> tuple[tuple[Header, ...], bytes]:
        """Returns headers and body of the answer to a request that gets no exchange, in the shape of the path's
        family. `head` are those of its head, if that was admitted; `peer` is the client's address."""
        dialect = dialect_of(path)
        family = dialect.name if head is not None or match(path) is not None else CONTROL
        if self.observers.active:
            who = (head.caller, head.labels.key) if head is not None else ("", "")
            of = labels(family, shortened(path), *who)
            self.observers.tell(RequestRecord(request_id, of, error.status, error.code, peer=peer, time=time()))
        return dialect.error(error, request_id)


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
