"""Small exchanges with a running engine, for a backend's `after_ready` and `before_stop`."""

import json
from typing import Any

from modelrunner.engine.connections import UpstreamPool
from modelrunner.errors import EngineProtocolError
from modelrunner.types import Endpoint


async def fetch(endpoint: Endpoint, method: str, path: str, body: bytes = b"", *, timeout: float) -> tuple[int, bytes]:
    """Returns the status and the body of one exchange on a connection of its own. `timeout`, in seconds, covers all of
    it. Raises `OSError` (`TimeoutError` is one) or `EngineProtocolError`."""
    return await UpstreamPool(endpoint).fetch(method, path, body, timeout=timeout)


async def ask(
    endpoint: Endpoint, method: str, path: str, body: object = None, *, timeout: float
) -> tuple[int, dict[str, Any] | list[Any]]:
    """Sends and receives JSON, and otherwise does as `fetch`. It also raises `EngineProtocolError` for an answer that
    is not JSON."""
    sent = b"" if body is None else json.dumps(body).encode()
    status, raw = await fetch(endpoint, method, path, sent, timeout=timeout)
    try:
        answer = json.loads(raw)
    except ValueError:
        answer = None
    if not isinstance(answer, dict | list):
        raise EngineProtocolError(f"the engine's answer to {method} {path} is not JSON")
    return status, answer
