"""From the parts of a request to an exchange with a runner. Both lanes stand on it, so that they mean the same."""

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

from modelrunner.errors import (
    ExpectationFailed,
    LengthRequired,
    Misdirected,
    PayloadTooLarge,
    Unavailable,
    UnsupportedMediaType,
    UpgradeRefused,
)
from modelrunner.proxy.access import Access
from modelrunner.proxy.decode import decode
from modelrunner.proxy.exchange import Exchange
from modelrunner.proxy.inference import Inference, Sink
from modelrunner.proxy.limits import Limits
from modelrunner.proxy.quarantine import Quarantine
from modelrunner.proxy.record import Hooks, Record
from modelrunner.proxy.render import Header, new_request_id
from modelrunner.proxy.routes import Route
from modelrunner.scheduler import Lease, Scheduler, Target
from modelrunner.types import Mode

log = logging.getLogger("modelrunner.access")

HEADERS = frozenset(
    (
        *("host", "origin", "content-type", "content-encoding", "upgrade", "expect"),
        *("x-request-id", "x-preload-only", "x-progress"),
    )
)
"""What is asked of a request's head, in lower case. None of them may be given twice."""


class Resolve(Protocol):
    """From (backend or None, model as the client wrote it, mode) to what the scheduler is asked for."""

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
        self._access = access
        self.limits = limits
        self.hooks = hooks
        self.quarantine = Quarantine()
        self.active = 0
        self.buffered = 0

    # what a lane asks, in this order

    def origin(self, header: Callable[[str], str | None], authority: str | None, *, local: bool) -> str | None:
        """The allowed Origin of the request, if it has one. Raises `Forbidden`."""
        return self._access.check(header("host"), header("origin"), authority, local=local)

    def admit(self, header: Callable[[str], str | None], length: int | None) -> None:
        """Judges a head before its body is read. `length` is None for a body in chunks, -1 for none at all. Raises
        `UpgradeRefused`, `ExpectationFailed`, `LengthRequired`, `PayloadTooLarge`, `UnsupportedMediaType`."""
        if header("upgrade") is not None:
            raise UpgradeRefused("this server speaks HTTP/1.1 and nothing else on a connection")
        if (header("expect") or "100-continue").lower() != "100-continue":
            raise ExpectationFailed("only 100-continue can be expected here")
        if length == -1:
            raise LengthRequired("the request has no body: send JSON with a Content-Length")
        if length is not None and length > self.limits.body:
            raise PayloadTooLarge(f"the body has {length} bytes; body_limit allows {self.limits.body}")
        if header("content-encoding") not in (None, "identity"):
            raise UnsupportedMediaType("compressed bodies are not taken: send the JSON as it is")
        # A page can send other types without asking first; programs (curl -d) say what they like.
        if header("origin") is not None and not _is_json(header("content-type")):
            raise UnsupportedMediaType("send the body as application/json")

    def buffer(self, size: int) -> None:
        """Counts bytes of a body in (or out, below 0). Raises `Unavailable` where all bodies together are too much."""
        if size > 0 and self.buffered + size > self.limits.total_body:
            raise Unavailable("too much is being sent at this moment; try again", retry_after=1.0)
        self.buffered += size

    def inference(
        self,
        route: Route,
        body: bytes,
        header: Callable[[str], str | None],
        request_id: str,
        *,
        headers: tuple[Header, ...] = (),
    ) -> Inference:
        """The request, found good. Raises `BadRequest`."""
        arrived = perf_counter()
        fields = decode(body)
        return Inference(
            route,
            fields.model,
            bool(fields.stream),
            fields.keep(),
            body,
            request_id,
            arrived,
            preload=(header("x-preload-only") or "").lower() == "true",
            progress=header("x-progress") == "events",
            headers=headers,
        )

    def exchange(self, ask: Inference, sink: Sink) -> Exchange:
        """To be started by the lane. The body counts as buffered until the exchange is over."""
        self.active += 1
        return Exchange(self, ask, sink)

    # what an exchange asks

    def lease_now(self, ask: Inference) -> Lease | None:
        """A lease for which nothing has to be waited. Raises what `lease` raises."""
        route = ask.route
        target = self._resolve.known(route.backend, ask.model, route.mode)
        if route.runner is not None:
            return self._lease_runner(ask, route.runner, target)
        return None if target is None else self._scheduler.warm(target, ask.keep_alive)

    async def lease(self, ask: Inference) -> Lease:
        """Raises whatever resolving and scheduling raise."""
        route = ask.route
        await self._resolve.prepare(route.backend, ask.model, route.mode)
        target = self._resolve(route.backend, ask.model, route.mode)
        if route.runner is not None:
            lease = self._lease_runner(ask, route.runner, target)
            assert lease is not None
            return lease
        return await self._scheduler.acquire(target, ask.keep_alive)

    def _lease_runner(self, ask: Inference, runner_id: str, target: Target | None) -> Lease | None:
        """The one runner, if it serves the model; None while the model is not resolved."""
        lease = self._scheduler.lease_runner(runner_id)
        try:
            key = lease.runner.key
            if key.mode is not ask.route.mode:
                raise Misdirected(f"runner {runner_id} serves {key.mode}; ask /v1/ for {ask.route.mode}")
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
        target = self._resolve.known(ask.route.backend, ask.model, ask.route.mode)
        return {"stage": "queued"} if target is None else self._scheduler.insight.progress(target)

    def over(self, exchange: Exchange, ask: Inference, lease: Lease | None) -> None:
        """Called once for every exchange."""
        self.active -= 1
        self.buffered -= len(ask.body)
        if self.hooks is not None or log.isEnabledFor(logging.DEBUG):
            self._report(exchange, ask, lease)

    def _report(self, exchange: Exchange, ask: Inference, lease: Lease | None) -> None:
        record = Record(
            request_id=ask.request_id,
            path=ask.route.path,
            model=ask.model,
            runner=lease.runner.id if lease is not None else None,
            status=exchange.status,
            queued=lease.waited - lease.loaded if lease is not None else 0.0,
            loading=lease.loaded if lease is not None else 0.0,
            duration=perf_counter() - ask.arrived,
            error=exchange.error.code if exchange.error is not None else None,
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


def request_id(header: Callable[[str], str | None]) -> str:
    """The client's own where it sent a harmless one, else a new one."""
    return new_request_id(header("x-request-id"))


def _is_json(content_type: str | None) -> bool:
    kind = (content_type or "").partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")
