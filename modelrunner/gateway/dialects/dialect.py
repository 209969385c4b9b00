"""The parts that most API families share."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from modelrunner.engine.runner import Runner
from modelrunner.errors import ModelRunnerError
from modelrunner.http.answers import Header

WITH_ENGINE = ("", "/engines", "/engines/{backend}", "/runners/{runner}")
"""The path prefixes of the calls of an engine's own API."""


def streamed(answer: type, media_type: str = "text/event-stream") -> Mapping[str, Any]:
    """Describes an answer of this type in JSON, or a stream if the client asks for one."""
    return {"application/json": answer, media_type: Any}


def refusal_headers(error: ModelRunnerError) -> tuple[Header, ...]:
    """Returns the headers of every family's errors: when to try again, or that a retry is useless."""
    headers: tuple[Header, ...] = ()
    if error.retry_after is not None:
        headers += ((b"Retry-After", b"%d" % max(1, ceil(min(error.retry_after, 1e6)))),)  # never too early
    if error.status == 401:
        headers += ((b"WWW-Authenticate", b"Bearer"),)
    if error.permanent:
        headers += ((b"x-should-retry", b"false"),)
    return headers


def engine_model(runner: Runner, model: str) -> str:
    """The name by which the engine knows the model: `model`, unless the engine checks names and has others."""
    names = runner.names
    return model if names is None or model in names else names[0]
