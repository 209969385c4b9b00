"""A batch, its state and its lines, and the parser of an input file."""

from codecs import BOM_UTF8
from collections.abc import Iterator
from enum import StrEnum
from typing import BinaryIO

import msgspec

from modelrunner.errors import BadRequest

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MOST_LINES = 50_000
"""As OpenAI's limit."""
LONGEST_LINE = 32 << 20
"""Bytes of one line, as many as the body of a request has by default."""
_LONGEST_ID = 512  # characters of a custom_id
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


class InputErrors(Exception):
    """An input file with `errors`, of which nothing is asked."""

    def __init__(self, errors: tuple[LineError, ...]) -> None:
        super().__init__(f"{len(errors)} lines cannot be asked")
        self.errors = errors


def parse(file: BinaryIO, endpoint: str, batch: str) -> Iterator[Line]:
    """Yields the requests of an input file (JSONL), which is read no further than needed. Raises `InputErrors` at its
    end."""
    errors: list[LineError] = []
    seen: set[str] = set()
    number = 0
    while (text := file.readline(LONGEST_LINE + 1)) and len(errors) < _MOST_ERRORS:
        number += 1
        text = text if number > 1 else text.removeprefix(BOM_UTF8)
        if len(text) > LONGEST_LINE:
            errors.append(LineError("invalid_line", f"a line may have {LONGEST_LINE} bytes", number))
            break
        if not text.strip():
            continue
        if len(seen) == MOST_LINES:
            errors.append(LineError("too_many_lines", f"a batch may have {MOST_LINES} lines", number))
            break
        try:
            yield _line(text, number, endpoint, batch, seen)
        except (msgspec.MsgspecError, BadRequest, UnicodeDecodeError, RecursionError) as error:
            message = error.message if isinstance(error, BadRequest) else str(error)
            errors.append(LineError("invalid_line", message, number))
    if not seen and not errors:
        errors.append(LineError("empty_file", "the file has no line", 1))
    if errors:
        raise InputErrors(tuple(errors))


def _line(text: bytes, number: int, endpoint: str, batch: str, seen: set[str]) -> Line:
    line = msgspec.json.decode(text, type=_InputLine)
    body = msgspec.json.decode(line.body, type=_LineBody)
    if line.method != "POST" or line.url != endpoint:
        raise BadRequest(f"the batch is for POST {endpoint}, and this line for {line.method[:20]} {line.url[:100]}")
    if body.stream:
        raise BadRequest("an answer of a batch is not streamed: leave `stream` out")
    if body.background:
        raise BadRequest("a batch waits for its answers: leave `background` out")
    if len(line.custom_id) > _LONGEST_ID:
        raise BadRequest(f"a custom_id may have {_LONGEST_ID} characters")
    if line.custom_id in seen:
        raise BadRequest(f"custom_id {line.custom_id[:100]!r} was given to an earlier line")
    seen.add(line.custom_id)
    return Line(batch, number, line.custom_id, body.model, bytes(line.body))
