"""The questions that the daemon asks a running engine about itself, at the paths that `EngineApi` names."""

import math
import re
from collections.abc import Mapping

import msgspec

from modelrunner.engine.connections import UpstreamPool
from modelrunner.engineapi import EngineApi
from modelrunner.errors import EngineProtocolError
from modelrunner.types import Endpoint

_COUNTERS_LIMIT = 5.0  # seconds
_FIELDS_LIMIT = 5.0
_BATCH_LIMIT = 50.0  # a batch of a long prompt takes a slow processor that long


async def work_done(endpoint: Endpoint, api: EngineApi) -> float | None:
    """Returns the sum of the metrics `EngineApi.work`, None if the engine has none of them. Raises `OSError`
    (`TimeoutError` is one) or `EngineProtocolError` if the engine does not answer."""
    if not api.work or api.metrics is None:
        return None
    status, text = await UpstreamPool(endpoint).fetch("GET", api.metrics, timeout=_COUNTERS_LIMIT)
    return _sum(api.work, text) if status == 200 else None


def _sum(names: tuple[str, ...], text: bytes) -> float | None:
    pattern = rb"^(?:%b)(?:\{[^}\n]*\})? (-?[\d.]+(?:[eE][-+]?\d+)?)" % b"|".join(
        re.escape(name.encode()) for name in names
    )
    values = re.findall(pattern, text, re.MULTILINE)
    total = math.fsum(map(float, values)) if values else None
    return total


async def settled(endpoint: Endpoint, path: str) -> None:
    """Returns once the engine has answered at the path `EngineApi.settled`. Raises `OSError` or
    `EngineProtocolError`."""
    status, _ = await UpstreamPool(endpoint).fetch("GET", path, timeout=_BATCH_LIMIT)
    if not 200 <= status < 300:
        raise EngineProtocolError(f"the engine answered {status} when asked what it still works on")


async def fields_of(endpoint: Endpoint, path: str) -> Mapping[str, frozenset[str]]:
    """Returns what the engine tells at the path `EngineApi.fields`. Raises `OSError` or `EngineProtocolError`."""
    status, answer = await UpstreamPool(endpoint).fetch("GET", path, timeout=_FIELDS_LIMIT)
    try:
        if status == 200:
            return msgspec.json.decode(answer, type=dict[str, frozenset[str]])
    except msgspec.MsgspecError:
        pass
    raise EngineProtocolError(f"the engine answered {status} when asked which fields it reads")
