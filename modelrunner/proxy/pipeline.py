"""From the parts of a request to an exchange with a runner. Both lanes stand on it, so that they mean the same."""

import logging
from collections.abc import Callable
from hashlib import sha256
from time import perf_counter
from typing import Any, Protocol

from modelrunner.errors import (
    ExpectationFailed,
    LengthRequired,
    Misdirected,
    ModelRunnerError,
    PayloadTooLarge,
    Unavailable,
    UnsupportedMediaType,
    UpgradeRefused,
)
from modelrunner.proxy.access import Access
from modelrunner.proxy.decode import decode
from modelrunner.proxy.exchange import Exchange
from modelrunner.proxy.inference import Inference, Sink, Terms
from modelrunner.proxy.limits import Limits
from modelrunner.proxy.quarantine import Quarantine
from modelrunner.proxy.record import Hooks, Record
from modelrunner.proxy.render import harmless_id
from modelrunner.proxy.routes import Route
from modelrunner.scheduler import Lease, Scheduler, Target
from modelrunner.types import KeepAlive, Mode

log = logging.getLogger("modelrunner.access")

HEADERS = frozenset(
    (
        *("host", "origin", "content-type", "content-encoding", "upgrade", "expect", "authorization"),
        *("x-api-key", "x-caller", "x-preload-only", "x-priority", "x-progress", "x-request-id"),
    )
)
"""What is asked of a request's head, in lower case. None of them may be given twice."""
GetHeader = Callable[[str], str | None]
"""One of these by its name in lower case, None where the request does not have it."""
_LONGEST_CALLER = 64


class Resolve(Protocol):
    """From (backend or None, model as the client wrote it, mode) to what the scheduler is asked for. `stage` is what
    requests wait for that are not resolved yet."""

    stage: str

    def known(self, backend: str | None, model: str, mode: Mode) -> Target | None:
        """What was resolved before and still holds, at the cost of a look-up."""

    async def prepare(self, backend: str | None, model: str, mode: Mode) -> None:
        """Does off the event loop what a call would have to read from disk."""

    def __call__(self, backend: str | None, model: str, mode: Mode) -> Target: ...


class Pipeline:
    """`active` counts the requests under way, `buffered` the bytes of their bodies."""

    def __init__(
        self, resolve: Resolve, scheduler: Scheduler, access: Access, limits: Limits, hooks: Hooks | None = None
    ) -> None:
        self._resolve = resolve
        self._scheduler = scheduler
        self.access = access
        self.limits = limits
        self.hooks = hooks
        self.quarantine = Quarantine()
        self.active = 0
        self.buffered = 0

    # what a lane asks, in this order

    def origin(self, header: GetHeader, authority: str | None, *, local: bool) -> str | None:
        """The allowed Origin of the request, if it has one. `authority` is the host of an absolute target. Raises
        `Forbidden`."""
        return self.access.check(header("host"), header("origin"), authority, local=local)

    def terms(self, route: Route, header: GetHeader, authority: str | None, *, local: bool) -> Terms:
        """Judges a head before its body is read, but for the length that it announces. Raises `Forbidden`,
        `UpgradeRefused`, `ExpectationFailed`, `UnsupportedMediaType`."""
        origin = self.origin(header, authority, local=local)
        if header("upgrade") is not None:
            raise UpgradeRefused("this server speaks HTTP/1.1 and nothing else on a connection")
        if (header("expect") or "100-continue").lower() != "100-continue":
            raise ExpectationFailed("only 100-continue can be expected here")
        if header("content-encoding") not in (None, "identity"):
            raise UnsupportedMediaType("compressed bodies are not taken: send the JSON as it is")
        # A page can send other types without asking first; programs (curl -d) say what they like.
        if origin is not None and not _is_json(header("content-type")):
            raise UnsupportedMediaType("send the body as application/json")
        return Terms(
            route,
            origin,
            harmless_id(header("x-request-id")),
            _caller(header),
            (header("x-priority") or "").lower() == "batch",
            (header("x-preload-only") or "").lower() == "true",
            header("x-progress") == "events",
        )

    def buffer(self, size: int, whole: int) -> None:
        """Counts `size` bytes of a body in, of which there are `whole` at least. Raises `LengthRequired` for a body of
        less than none, `PayloadTooLarge`, and `Unavailable` where all bodies together are too much."""
        if whole < 0:
            raise LengthRequired("the request has no body: send JSON with a Content-Length")
        if whole > self.limits.body:
            raise PayloadTooLarge(f"the body has {whole} bytes; body_limit allows {self.limits.body}")
        if self.buffered + size > self.limits.total_body:
            raise Unavailable("too much is being sent at this moment; try again")
        self.buffered += size

    def unbuffer(self, size: int) -> None:
        """Counts bytes of a body out that will not be asked with."""
        self.buffered -= size

    def exchange(self, terms: Terms, body: bytes, request_id: str, sink: Sink) -> Exchange:
        """To be started by the lane. The body counts as buffered until the exchange is over. Raises `BadRequest`."""
        arrived = perf_counter()
        fields = decode(body)
        keep = None if fields.keep_alive is None else KeepAlive.parse(fields.keep_alive)
        ask = Inference(terms, fields.model, fields.stream is True, keep, body, request_id, arrived)
        self.active += 1
        return Exchange(self, ask, sink)

    # what an exchange asks

    def lease_now(self, ask: Inference) -> Lease | None:
        """A lease for which nothing has to be waited. Raises what `lease` raises."""
        route = ask.terms.route
        target = self._resolve.known(route.backend, ask.model, route.mode)
        if route.runner is not None:
            return self._lease_runner(ask, route.runner, target)
        return None if target is None else self._scheduler.warm(target, ask.keep_alive, ask.terms.batch)

    async def lease(self, ask: Inference) -> Lease:
        """Raises whatever resolving and scheduling raise."""
        route = ask.terms.route
        await self._resolve.prepare(route.backend, ask.model, route.mode)
        target = self._resolve(route.backend, ask.model, route.mode)
        if route.runner is not None:
            lease = self._lease_runner(ask, route.runner, target)
            assert lease is not None
            return lease
        return await self._scheduler.acquire(target, ask.keep_alive, ask.terms.caller, ask.terms.batch)

    def _lease_runner(self, ask: Inference, runner_id: str, target: Target | None) -> Lease | None:
        """The one runner, if it serves the model; None while the model is not resolved."""
        lease = self._scheduler.lease_runner(runner_id)
        try:
            key = lease.runner.key
            if key.mode is not ask.terms.route.mode:
                raise Misdirected(f"runner {runner_id} serves {key.mode}; ask /v1/ for {ask.terms.route.mode}")
            if target is not None:
                lease.runner.check_model(target.key.model_id)
                return lease
        except BaseException:
            lease.release()
            raise
        lease.release()
        return None

    def progress(self, ask: Inference) -> dict[str, Any]:
        """What a waiting request waits for: `stage`, in a word or two, and how long, as far as that is known."""
        target = self._resolve.known(ask.terms.route.backend, ask.model, ask.terms.route.mode)
        return {"stage": self._resolve.stage} if target is None else self._scheduler.insight.progress(target)

    def over(self, ask: Inference, lease: Lease | None, status: int, error: ModelRunnerError | None) -> None:
        """Called once for every exchange."""
        self.active -= 1
        self.buffered -= len(ask.body)
        if self.hooks is not None or log.isEnabledFor(logging.DEBUG):
            self._report(ask, lease, status, error)

    def _report(self, ask: Inference, lease: Lease | None, status: int, error: ModelRunnerError | None) -> None:
        record = Record(
            request_id=ask.request_id,
            path=ask.terms.route.path,
            model=ask.model,
            runner=lease.runner.id if lease is not None else None,
            status=status,
            queued=lease.waited - lease.loaded if lease is not None else 0.0,
            loading=lease.loaded if lease is not None else 0.0,
            duration=perf_counter() - ask.arrived,
            error=error.code if error is not None else None,
            body=ask.body,
        )
        log.debug(
            "%s %s %s %d %.3fs%s",
            record.request_id,
            record.path,
            ascii(record.model),
            record.status,
            record.duration,
            f" {record.error}" if record.error else "",
        )
        if self.hooks is not None:
            self.hooks.finished(record)


def _caller(header: GetHeader) -> str:
    """Who asks: the owner of an API key, of which a part of the hash is enough to tell one from another; else whom the
    client names."""
    scheme, _, token = (header("authorization") or "").partition(" ")
    key = header("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")
    return sha256(key.encode()).hexdigest()[:16] if key else (header("x-caller") or "")[:_LONGEST_CALLER]


def _is_json(content_type: str | None) -> bool:
    kind = (content_type or "").partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")
