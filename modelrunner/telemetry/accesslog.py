"""The access log: a line for each request, in a file of its own."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from logging.handlers import RotatingFileHandler
from pathlib import Path
from time import gmtime, strftime
from typing import Literal

import msgspec

from modelrunner.gateway.observers import Observers, RequestRecord

Form = Literal["off", "text", "json"]
LOG_BYTES = 8 << 20  # per file; one older file is kept
_MILLISECONDS = tuple(f".{number:03}Z " for number in range(1000))


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
    return [msgspec.json.encode(record).decode() for record in records]


def _text(records: Sequence[RequestRecord]) -> list[str]:
    """What a line shares with the one before is not formatted again."""
    lines, last, moment, alike = list[str](), 0, "", None
    before = after = ""
    for record in records:
        if (milliseconds := int(record.time * 1e3)) != last:
            last, moment = milliseconds, _date(milliseconds // 1000) + _MILLISECONDS[milliseconds % 1000]
        if (kind := (record.route, record.model, record.status, record.caller, record.error)) != alike:
            alike, (route, model, status, caller, error) = kind, kind
            before, after = f" {route} {_word(model)} {status} ", f" {_word(caller) if caller else '-'} {error or '-'}"
        tokens = record.tokens
        lines.append(
            f"{moment}{record.request_id}{before}{record.duration:.3f}s {tokens.prompt}+{tokens.answer}{after}"
        )
    return lines


def _word(text: str) -> str:
    """What a client wrote, quoted: one word in ASCII that a reader can tell from the others."""
    return ascii(text).replace(" ", r"\x20")


@lru_cache(maxsize=2)
def _date(second: int) -> str:
    return strftime("%Y-%m-%dT%H:%M:%S", gmtime(second))
