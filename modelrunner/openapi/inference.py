"""The operations of the gateway's routes, as their families describe them."""

from collections.abc import Iterator

from modelrunner.gateway.calls import Dialect
from modelrunner.gateway.routes import all_routes
from modelrunner.openapi.operation import Operation

_ERRORS = (411, 412, 421, 422, 501, 502, 504, 507)


def inference_operations() -> Iterator[tuple[Dialect, str, str, str, Operation]]:
    """Yields (family, method, path, scope, operation) of each route."""
    for pattern, call, route in all_routes():
        operation = Operation(call.text, call.answer, body=call.body, errors=_ERRORS)
        yield route.dialect, "POST", pattern, "inference", operation
