"""One route as the document describes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ALWAYS = (400, 401, 403, 404, 413, 415, 429, 500, 503)
"""The statuses that the checks before every route can answer with, and that of a disk that refuses (`StorageFailed`) or
of a fault of ours."""


@dataclass(frozen=True, slots=True)
class Operation:
    """`text` is a sentence or more, the first of which is the summary. `answer`, `body` and the values of `query` are
    types that msgspec makes a JSON Schema of; an answer of several media types, or a body that is not JSON, is a
    mapping of media types to them. None stands for an empty answer, and for no body. `errors` are the statuses beside
    `ALWAYS`, all with the family's error;
    `also` other answers by their status. An `optional` body may be left out. `local` has the fields of a request that
    are served over the Unix socket alone, "" for the whole request, each with a reason: a sentence that lacks its end,
    "only over the Unix socket"."""

    text: str
    answer: Any
    status: int = 200
    body: Any = None
    optional: bool = False
    query: Mapping[str, Any] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    also: Mapping[int, Any] = field(default_factory=dict)
    local: Mapping[str, str] = field(default_factory=dict)
