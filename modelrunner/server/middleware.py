"""What every answer of the control plane has in common: a request ID, errors in one shape, and the check of Host and
Origin with the CORS headers that follow from it."""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.typedefs import Handler, Middleware

from modelrunner.errors import (
    BadRequest,
    ExpectationFailed,
    HeadersTooLarge,
    MethodNotAllowed,
    ModelRunnerError,
    PayloadTooLarge,
    RouteNotFound,
    ShuttingDown,
    UnsupportedMediaType,
)
from modelrunner.proxy.access import Access
from modelrunner.proxy.aiolane import refuse_oddities
from modelrunner.proxy.dialects.dialect import Header
from modelrunner.proxy.render import harmless_id, new_request_id
from modelrunner.proxy.routes import dialect_of, match, variants
from modelrunner.proxy.wire import cors

log = logging.getLogger(__name__)

_REQUEST_ID = web.RequestKey("request_id", str)
_ORIGIN: web.RequestKey[str | None] = web.RequestKey("origin")
_STARTED = web.RequestKey("started", bool)

_LOOKING = frozenset({"GET", "HEAD", "OPTIONS"})
_CORS_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
_OF_STATUS: dict[int, type[ModelRunnerError]] = {
    404: RouteNotFound,
    405: MethodNotAllowed,
    413: PayloadTooLarge,
    415: UnsupportedMediaType,
    417: ExpectationFailed,
    431: HeadersTooLarge,
}


def request_id_of(request: web.BaseRequest) -> str:
    """The client's own where it sent a harmless one, else a new one; the same for the whole request."""
    if _REQUEST_ID not in request:
        request[_REQUEST_ID] = harmless_id(request.headers.get("X-Request-ID")) or new_request_id()
    return request[_REQUEST_ID]


def is_local(request: web.BaseRequest) -> bool:
    """True for a request that came over the Unix socket."""
    if request.transport is None:
        return False
    connection = request.transport.get_extra_info("socket")
    return connection is not None and connection.family == socket.AF_UNIX


def error_response(error: ModelRunnerError, request: web.BaseRequest) -> web.Response:
    """In the shape of the family that the path belongs to."""
    request_id = request_id_of(request)
    headers, body = dialect_of(request.path).error(error, request_id)
    return web.Response(status=error.status, headers={**_text(headers), "X-Request-ID": request_id}, body=body)


def _text(headers: Iterable[Header]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}


def translated(error: web.HTTPException, request: web.BaseRequest) -> ModelRunnerError:
    """aiohttp's own refusals in our words."""
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
    """Names the path that was probably meant, if there is one."""
    resources = list(request.app.router.resources()) if isinstance(request, web.Request) else []
    for path in variants(request.path):
        if path != request.path and (match(path) or any(_leads_to(resource, path) for resource in resources)):
            return f": ask {path}"
    return ""


def _leads_to(resource: web.AbstractResource, path: str) -> bool:
    found = resource.get_info()
    pattern = found.get("pattern")
    return found.get("path") == path or (pattern is not None and pattern.fullmatch(path) is not None)


def envelope(access: Access, is_ending: Callable[[], bool]) -> Middleware:
    """The outermost middleware. While the daemon ends, what looks is answered and what begins something is refused."""

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            refuse_oddities(request)
            request[_ORIGIN] = _allowed_origin(access, request)
            if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
                return _preflight(request)
            if is_ending() and request.method not in _LOOKING and request.path != "/shutdown":
                raise ShuttingDown("the daemon is shutting down")
            return await handler(request)
        except web.HTTPException as error:
            response = error_response(translated(error, request), request)
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except ModelRunnerError as error:
            if error.status == 500:
                log.exception("request %s: %s %s", request_id_of(request), request.method, request.path)
            response = error_response(error, request)
        except ConnectionError:
            raise  # the client left; aiohttp closes the connection
        except Exception as fault:  # a bug of ours: logged with its request ID, and not a word of it to the client
            log.exception("request %s: %s %s", request_id_of(request), request.method, request.path)
            response = error_response(_internal(request), request)
            if request.get(_STARTED):
                raise ConnectionAbortedError from fault
        if request.get(_STARTED):  # a second head would be read as part of the body: cut instead
            raise ConnectionAbortedError
        return response

    return handle


async def finish_head(request: web.Request, response: web.StreamResponse) -> None:
    """An `on_response_prepare` signal: streams have their head sent inside the handler, so it is completed here."""
    request[_STARTED] = True
    response.headers["Server"] = "modelrunner"
    response.headers.setdefault("X-Request-ID", request_id_of(request))
    response.headers.update(_text(cors(request.get(_ORIGIN))))


def connections(server: web.Server, **options: Any) -> Callable[[], web.RequestHandler]:
    """A protocol factory like `server`'s own whose connections answer what no handler ever sees, such as a request
    that cannot be parsed, in our shape too."""
    loop = asyncio.get_running_loop()
    return lambda: _Connection(server, loop=loop, **options)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionAbortedError("the answer had begun")
        if status >= 500:
            log.error("request %s failed", request_id_of(request), exc_info=exc)
            error = _internal(request)
        else:
            error = _unparsable(exc, status)(f"not a valid HTTP request: {_first_line(message)}")
        response = error_response(error, request)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # raised before any middleware ran: an unknown Expect
            resp = error_response(translated(resp, request), request)
        return await super().finish_response(request, resp, start_time)


def _unparsable(exc: BaseException | None, status: int) -> type[ModelRunnerError]:
    """aiohttp's parser says 400 to everything."""
    match exc:
        case LineTooLong():
            return HeadersTooLarge
        case BadHttpMessage(message=str(text)) if "Too many headers" in text:
            return HeadersTooLarge
        case _:
            return _OF_STATUS.get(status, BadRequest)


def _first_line(message: str | None) -> str:
    return (message or "").strip().partition("\n")[0].rstrip(":") or "it cannot be parsed"


def _internal(request: web.BaseRequest) -> ModelRunnerError:
    return ModelRunnerError(f"this is a fault of modelrunner; its log has more under {request_id_of(request)}")


def _allowed_origin(access: Access, request: web.Request) -> str | None:
    target = request.raw_path
    authority = request.url.authority if not target.startswith("/") and target != "*" else None
    return access.check(request.headers.get("Host"), request.headers.get("Origin"), authority, local=is_local(request))


def _preflight(request: web.Request) -> web.Response:
    wanted = request.headers.get("Access-Control-Request-Headers", "Content-Type, Authorization, X-API-Key")
    headers = {
        "Access-Control-Allow-Methods": _CORS_METHODS,
        "Access-Control-Allow-Headers": wanted,
        "Access-Control-Max-Age": "600",
    }
    return web.Response(status=204, headers=headers)
