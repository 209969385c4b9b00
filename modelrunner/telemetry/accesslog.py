"""The access log: a line for each request, in a file of its own."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from logging.handlers import RotatingFileHandler
from pathlib import Path
from time import gmtime, strftime
from typing import Literal

import msgspec

from modelrunner.gateway.request.observers import Observers, RequestRecord

Form = Literal["off", "text", "json"]
LOG_BYTES = 8 << 20  # per file; one older file is kept
_MILLISECONDS = tuple(f".{number:03}Z " for number in range(1000))
_SECONDS = tuple(f"0.{number:03}s " for number in range(1000))


class AccessLog:
    """An `Observer` that writes `path`. It is off until `use`."""

    def __init__(self, path: Path, observers: Observers) -> None:
        self._path = path
        self._observers = observers
        self._render = _text
        self._handler: RotatingFileHandler | None = None

    def use(self, form: Form) -> None:
        """Switches to another form of the lines, or off. Raises `OSError`."""
        self.close()
        if form != "off":
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._render = _json if form == "json" else _text
            self._handler = RotatingFileHandler(self._path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
            self._observers.add(self)

    def close(self) -> None:
        self._observers.remove(self)
        if self._handler is not None:
            self._handler.close()
            self._handler = None

    def finished(self, records: Sequence[RequestRecord]) -> None:
        assert self._handler is not None
        lines = "\n".join(self._render(records))
        self._handler.handle(logging.makeLogRecord({"msg": lines, "levelno": logging.INFO}))


def _json(records: Sequence[RequestRecord]) -> list[str]:
    return [msgspec.json.encode(record.flat()).decode() for record in records]


def _text(records: Sequence[RequestRecord]) -> list[str]:
    """Returns the lines. Parts that a line shares with the line before are not formatted again."""
    lines, last, moment, alike = list[str](), 0, "", None
    before = after = ""
    for record in records:
        if (milliseconds := int(record.time * 1e3)) != last:
            last, moment = milliseconds, _date(milliseconds // 1000) + _MILLISECONDS[milliseconds % 1000]
        if alike is None or not (
            record.asked is alike.asked
            and record.model == alike.model
            and record.status == alike.status
            and record.error == alike.error
            and record.peer == alike.peer
        ):
            alike, asked = record, record.asked
            caller = _word(asked.caller) if asked.caller else "-"
            before = f" {asked.route} {_word(record.model)} {record.status} "
            after = f" {caller} {record.error or '-'} {record.peer or '-'}"
        tokens, milliseconds = record.tokens, int(record.duration * 1e3)
        took = _SECONDS[milliseconds] if milliseconds < 1000 else f"{record.duration:.3f}s "
        lines.append(f"{moment}{record.request_id}{before}{took}{tokens.prompt}+{tokens.answer}{after}")
    return lines


def _word(text: str) -> str:
    """Quotes a client's text to one word in ASCII, which a reader can separate from the others."""
    return ascii(text).replace(" ", r"\x20")


@lru_cache(maxsize=2)
def _date(second: int) -> str:
    return strftime("%Y-%m-%dT%H:%M:%S", gmtime(second))
