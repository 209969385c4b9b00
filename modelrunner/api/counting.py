"""Requests of the control plane in the limits of keys and addresses, and in the access log and the counts."""

import re
from time import perf_counter, time

from aiohttp import web
from aiohttp.typedefs import Handler

from modelrunner.api.middleware import error_of, request_id_of, transport_of
from modelrunner.gateway.calls import labels
from modelrunner.gateway.request.observers import CONTROL, Observers, RequestRecord
from modelrunner.gateway.request.pipeline import IS_OPEN
from modelrunner.keys.allowances import AddressAllowances, count_all

_UNKNOWN = "unknown"  # one route for all that nothing here answers: clients choose their paths
_LEFT = 499
# What watches the daemon, and what goes on with a request that was counted: in the background, as a stream, as a batch.
_FREE = re.compile(r"/metrics|(/engines)?/v1/(responses|streams|batches)/\{.*").fullmatch


class ControlRequests:
    """`limit` stands inside the envelope, which has checked the key: what a key refuses costs nothing. `tell` stands
    outside of it, where the answer is known."""

    def __init__(self, addresses: AddressAllowances, observers: Observers) -> None:
        self._addresses = addresses
        self._observers = observers

    @web.middleware
    async def limit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Counts a request against the requests a minute, and not against those under way: who follows a feed may still
        ask a model. What watches the daemon is free: it is needed most while others use up the limits of an address
        that it shares with them, such as a proxy's. So are looks at what the client waits for."""
        transport = transport_of(request)
        if transport is not None and not (IS_OPEN(transport.admitted.line.path) or _FREE(_pattern(request))):
            key, address = transport.admitted.key, self._addresses.of(transport.peer)
            of_key = key.allowance if key is not None else None
            count_all([allowance for allowance in (address, of_key) if allowance is not None])
        return await handler(request)

    @web.middleware
    async def tell(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Tells the observers of a request once its answer has ended. One without an answer was left."""
        if not self._observers.active:
            return await handler(request)
        began, status = perf_counter(), _LEFT
        transport_of(request)  # while it is known
        try:
            response = await handler(request)
            status = response.status
        finally:
            self._record(request, status, perf_counter() - began)
        return response

    def _record(self, request: web.Request, status: int, duration: float) -> None:
        transport, error = transport_of(request), error_of(request)
        if transport is not None and transport.refused:  # the gateway has told of it
            return
        key = transport.admitted.key if transport is not None else None
        name = key.key.name if key is not None else ""
        self._observers.tell(
            RequestRecord(
                request_id_of(request),
                labels(CONTROL, f"{request.method} {_pattern(request)}", name, name),
                error.status if error is not None else status,
                error.code if error is not None else "",
                duration=duration,
                time=time(),
                peer=transport.peer if transport is not None else "",
            )
        )


def _pattern(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else _UNKNOWN
