"""A batch, its state and its lines, and the parser of an input file."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from modelrunner.errors import BadRequest

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MOST_LINES = 50_000
"""As OpenAI's limit."""
_MOST_ERRORS = 100  # of one file that are told


class BatchState(StrEnum):
    """The last four are final."""

    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED)


class LineError(msgspec.Struct, frozen=True):
    """A line of the input file that cannot be asked; `line` counts from 1."""

    code: str
    message: str
    line: int
    param: str | None = None


class Batch(msgspec.Struct, frozen=True):
    """Times are in Unix seconds, None for a step that was not reached. `owner` is the name of the API key that made it,
    "" for the daemon's owner. The counts are of lines: `completed` with an answer, `failed` with an error."""

    id: str
    owner: str
    endpoint: str
    input_file: str
    window: str
    status: BatchState
    created: float
    expires: float
    metadata: dict[str, str] = {}
    errors: tuple[LineError, ...] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file: str | None = None
    error_file: str | None = None
    cancelling: float | None = None
    finalizing: float | None = None
    ended: float | None = None


class Line(msgspec.Struct, frozen=True):
    """One request of a batch; `body` is its JSON."""

    batch: str
    number: int
    custom_id: str
    model: str
    body: bytes


class _InputLine(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _LineBody(msgspec.Struct):
    model: str
    stream: bool | None = None
    background: bool | None = None


def parse(file: Iterable[bytes], endpoint: str, batch: str) -> tuple[list[Line], list[LineError]]:
    """Reads the lines of an input file (JSONL), no more than are needed. Returns its requests and its errors; a file
    with an error is not asked at all."""
    lines: list[Line] = []
    errors: list[LineError] = []
    seen: set[str] = set()
    for number, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            lines.append(_line(text, number, endpoint, batch, seen))
        except (msgspec.MsgspecError, BadRequest, UnicodeDecodeError, RecursionError) as error:
            message = error.message if isinstance(error, BadRequest) else str(error)
            errors.append(LineError("invalid_line", message, number))
        if len(errors) >= _MOST_ERRORS or len(lines) > MOST_LINES:
            break
    if not lines and not errors:
        errors.append(LineError("empty_file", "the file has no line", 1))
    if len(lines) > MOST_LINES:
        errors.append(LineError("too_many_lines", f"a batch may have {MOST_LINES} lines", MOST_LINES + 1))
    return lines, errors


def _line(text: bytes, number: int, endpoint: str, batch: str, seen: set[str]) -> Line:
    found = msgspec.json.decode(text, type=_InputLine)
    body = msgspec.json.decode(found.body, type=_LineBody)
    if found.method != "POST" or found.url != endpoint:
        raise BadRequest(f"the batch is for POST {endpoint}, and this line for {found.method[:20]} {found.url[:100]}")
    if body.stream:
        raise BadRequest("an answer of a batch is not streamed: leave `stream` out")
    if body.background:
        raise BadRequest("a batch waits for its answers: leave `background` out")
    if found.custom_id in seen:
        raise BadRequest(f"custom_id {found.custom_id[:100]!r} was given to an earlier line")
    seen.add(found.custom_id)
    return Line(batch, number, found.custom_id, body.model, bytes(found.body))
