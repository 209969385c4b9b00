"""The common parts of all requests of the control plane: the request ID, the key and its limits, errors in one shape,
CORS fields, the record for observers, and the end, after which the client's connection continues without aiohttp. The
gateway has admitted the request: framing, method, Host and Origin need no second check."""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from time import perf_counter, time
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler

from modelrunner.api.revocation import Revocation
from modelrunner.api.scopes import scope_of
from modelrunner.errors import (
    BadRequest,
    ExpectationFailed,
    MethodNotAllowed,
    ModelRunnerError,
    PayloadTooLarge,
    RouteNotFound,
    ShuttingDown,
    UnsupportedMediaType,
)
from modelrunner.gateway.calls import labels
from modelrunner.gateway.connection.handover import HandoverTransport
from modelrunner.gateway.request.observers import CONTROL, LEFT, Observers, RequestRecord
from modelrunner.gateway.request.pipeline import IS_OPEN
from modelrunner.gateway.routes import dialect_of, match, variants
from modelrunner.http.answers import Header
from modelrunner.http.limits import Limits
from modelrunner.keys.allowances import AddressAllowances, count_all
from modelrunner.keys.ring import KeyHolder, Scope
from modelrunner.web.session import public_only

log = logging.getLogger(__name__)

TRANSPORT = web.RequestKey("transport", HandoverTransport)
"""The transport to the client, in every request that has reached the middleware."""
_STARTED = web.RequestKey("started", bool)
_ERROR = web.RequestKey("error", ModelRunnerError)

_UNKNOWN = "unknown"  # one route for all that nothing here answers: clients choose their paths
# What watches the daemon, and what goes on with a request that was counted: in the background, as a stream, as a batch.
_FREE = re.compile(r"/metrics|(/engines)?/v1/(responses|streams|batches)/\{.*").fullmatch
_LOOKING = frozenset({"GET", "HEAD", "OPTIONS"})
_CORS_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
_OF_STATUS: dict[int, type[ModelRunnerError]] = {
    404: RouteNotFound,
    405: MethodNotAllowed,
    413: PayloadTooLarge,
    415: UnsupportedMediaType,
    417: ExpectationFailed,
}


def _transport_of(request: web.BaseRequest) -> HandoverTransport:
    """Returns the transport to the client, and keeps it for the time after the client has left."""
    if TRANSPORT not in request:
        request[TRANSPORT] = cast("HandoverTransport", request.transport)
    return request[TRANSPORT]


def key_of(request: web.BaseRequest) -> KeyHolder | None:
    """Returns the API key of the request, None for the owner of the daemon."""
    return request[TRANSPORT].admitted.key


def check_scope(request: web.BaseRequest, scope: Scope) -> None:
    """Raises `Forbidden` for an API key without the scope, `Unauthorized` for one that has expired."""
    if (key := key_of(request)) is not None:
        key.check(scope)


def owner_of(request: web.BaseRequest) -> str:
    """Returns the owner of the data that the request stores and sees: an `ApiKey.owner`, "" for the daemon's owner."""
    key = key_of(request)
    return key.key.owner if key is not None else ""


def is_admin(request: web.BaseRequest) -> bool:
    """Returns True for the daemon's owner, and for a key with the scope `admin`."""
    key = key_of(request)
    return key is None or Scope.ADMIN in key.key.scopes


def error_response(error: ModelRunnerError, request: web.BaseRequest) -> web.Response:
    """Renders an error in the shape of the path's family."""
    request_id = _transport_of(request).request_id
    request[_ERROR] = error
    headers, body = dialect_of(request.path).error(error, request_id)
    return web.Response(status=error.status, headers={**_text(headers), "X-Request-ID": request_id}, body=body)


@lru_cache(maxsize=256)
def _text(headers: tuple[Header, ...]) -> Mapping[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}


def translated(error: web.HTTPException, request: web.BaseRequest) -> ModelRunnerError:
    """Translates aiohttp's own refusals into our errors."""
    match error:
        case web.HTTPNotFound():
            return RouteNotFound(f"there is no {request.method} {request.path}{_hint(request)}")
        case web.HTTPMethodNotAllowed():
            return MethodNotAllowed(f"{request.path} takes {', '.join(sorted(error.allowed_methods))}")
        case web.HTTPRequestEntityTooLarge():
            return PayloadTooLarge("the body is larger than body_limit allows")
        case _:
            return _OF_STATUS.get(error.status, BadRequest)(error.text or error.reason)


def _hint(request: web.BaseRequest) -> str:
    """Suggests the path that was probably meant, if there is one."""
    resources = list(request.app.router.resources()) if isinstance(request, web.Request) else []
    for path in variants(request.path):
        if path != request.path and (match(path) or any(_leads_to(resource, path) for resource in resources)):
            return f": ask {path}"
    return ""


def _leads_to(resource: web.AbstractResource, path: str) -> bool:
    info = resource.get_info()
    pattern = info.get("pattern")
    return info.get("path") == path or (pattern is not None and pattern.fullmatch(path) is not None)


class RequestEnvelope:
    """The middleware of all requests: it checks the key, counts the request against its limits, follows the end of the
    key, renders errors, and tells the observers. While the daemon ends, only requests that read are answered."""

    def __init__(
        self,
        is_ending: Callable[[], bool],
        addresses: AddressAllowances,
        observers: Observers,
        revocation: Revocation,
    ) -> None:
        self._is_ending = is_ending
        self._addresses = addresses
        self._observers = observers
        self._revocation = revocation

    @web.middleware
    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers a request. One without an answer was left."""
        began, status, transport = perf_counter(), LEFT, _transport_of(request)
        public_only.set(not transport.local)
        response: web.StreamResponse
        try:
            if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
                response = _preflight(request)
            else:
                self._admit(request, transport)
                response = await handler(request)
            status = response.status
        except ConnectionError:
            raise  # the client left; aiohttp closes the connection
        except Exception as error:
            response = _failure(error, request)
        finally:
            if not transport.of_owner:
                self._revocation.end(transport)
            if self._observers.active and not transport.refused:  # the gateway told of it
                self._tell(request, transport, status, perf_counter() - began)
        return response

    def _admit(self, request: web.Request, transport: HandoverTransport) -> None:
        """Raises what keeps a request from its handler."""
        key = transport.admitted.key
        if request.match_info.http_exception is not None and match(request.raw_path.partition("?")[0]) is not None:
            raise web.HTTPMethodNotAllowed(request.method, ["POST"])  # the gateway handles POST
        if self._is_ending() and request.method not in _LOOKING and request.path != "/shutdown":
            raise ShuttingDown("the daemon is shutting down")
        if transport.of_owner:
            return
        if key is not None:
            key.check(scope_of(request.method, request.rel_url.path_safe))  # an encoded slash is a part of a name
        self._revocation.begin(transport)
        if self._addresses.active or key is not None:
            self._count(request, transport)

    def _count(self, request: web.Request, transport: HandoverTransport) -> None:
        """Counts a request against the requests a minute, and not against those under way: who follows a feed may still
        ask a model. What watches the daemon is free: it is needed most while others use up the limits of an address
        that it shares with them, such as a proxy's. So are looks at what the client waits for."""
        if IS_OPEN(transport.admitted.line.path) or _FREE(_pattern(request)):
            return
        key, address = transport.admitted.key, self._addresses.of(transport.peer)
        of_key = key.allowance if key is not None else None
        count_all([allowance for allowance in (address, of_key) if allowance is not None])

    def _tell(self, request: web.Request, transport: HandoverTransport, status: int, duration: float) -> None:
        error, key = request.get(_ERROR), transport.admitted.key
        name = key.key.name if key is not None else ""
        self._observers.tell(
            RequestRecord(
                transport.request_id,
                labels(CONTROL, f"{request.method} {_pattern(request)}", name, name),
                error.status if error is not None else status,
                error.code if error is not None else "",
                duration=duration,
                time=time(),
                peer=transport.peer,
            )
        )


def _failure(error: Exception, request: web.Request) -> web.Response:
    """Answers a request whose handler failed. Raises `ConnectionAbortedError` if the answer has begun: a second head
    would be read as a part of its body."""
    match error:
        case web.HTTPException():
            refusal = translated(error, request)
        case ModelRunnerError():
            refusal = error
        case _:  # our bug: the client gets no details
            refusal = _internal(request)
    if refusal.status == 500:
        id = request[TRANSPORT].request_id
        log.error("request %s: %s %s", id, request.method, request.path, exc_info=error)
    response = error_response(refusal, request)
    if isinstance(error, web.HTTPException) and "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    if request.get(_STARTED):
        raise ConnectionAbortedError from error
    return response


def _pattern(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else _UNKNOWN


async def finish_head(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Completes every head, as aiohttp's `on_response_prepare`; that of a stream while its handler runs. aiohttp closes
    its side after each answer, but the client's header describes the client's own connection."""
    request[_STARTED] = True
    handed_over = request[TRANSPORT]
    response.force_close()
    response.headers.pop("Connection", None)
    if not handed_over.keep_alive:
        response.headers["Connection"] = "close"
    response.headers["Server"] = "modelrunner"
    response.headers.setdefault("X-Request-ID", handed_over.request_id)
    varies = response.headers.get("Vary")
    response.headers.update(_text(handed_over.admitted.cors))
    if varies is not None:
        response.headers["Vary"] += f", {varies}"


def connections(server: web.Server, limits: Limits) -> Callable[[], web.RequestHandler]:
    """Returns a factory of `server`'s protocols, each for one request that was handed over."""
    return partial(
        _OneRequest,
        server,
        loop=asyncio.get_running_loop(),
        access_log=None,  # type: ignore[arg-type]  # None is how aiohttp is told to keep none
        keepalive_timeout=0.0,
        tcp_keepalive=False,
        lingering_time=0.0,
        max_line_size=limits.head,
        max_field_size=limits.head,
        max_headers=limits.header_count,
    )


class _OneRequest(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers requests that reach no handler: those with an invalid URL, and faults in aiohttp."""
        if request.writer.output_size > 0:
            raise ConnectionAbortedError("the answer had begun")
        if status >= 500:
            log.error("request %s failed", _transport_of(request).request_id, exc_info=exc)
            error = _internal(request)
        else:
            first_line = (message or "").strip().partition("\n")[0].rstrip(":")
            error = BadRequest(f"not a valid HTTP request: {first_line or 'it cannot be parsed'}")
        response = error_response(error, request)
        response.headers["Connection"] = "close"
        _transport_of(request).close_after()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        resp, reset = await super().finish_response(request, resp, start_time)
        request[TRANSPORT].answered = not reset
        return resp, reset


def _internal(request: web.BaseRequest) -> ModelRunnerError:
    id = _transport_of(request).request_id
    return ModelRunnerError(f"this is a fault of modelrunner; its log has more under {id}")


def _preflight(request: web.Request) -> web.Response:
    wanted = request.headers.get("Access-Control-Request-Headers", "Content-Type, Authorization, X-API-Key")
    headers = {
        "Access-Control-Allow-Methods": _CORS_METHODS,
        "Access-Control-Allow-Headers": wanted,
        "Access-Control-Max-Age": "600",
    }
    return web.Response(status=204, headers=headers)
