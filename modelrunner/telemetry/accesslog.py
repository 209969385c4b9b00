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
        lines = "\n".join([self._render(record) for record in records])
        self._handler.handle(logging.makeLogRecord({"msg": lines, "levelno": logging.INFO}))


def _json(record: RequestRecord) -> str:
    return msgspec.json.encode(record).decode()


def _text(record: RequestRecord) -> str:
    second, milliseconds = divmod(int(record.time * 1e3), 1000)
    tokens = record.tokens
    before, after = _alike(record.route, record.model, record.status, record.caller, record.error)
    return (
        f"{_date(second)}{_MILLISECONDS[milliseconds]}{record.request_id}{before}{record.duration:.3f}s"
        f" {tokens.prompt}+{tokens.answer}{after}"
    )


@lru_cache(maxsize=64)
def _alike(route: str, model: str, status: int, caller: str, error: str) -> tuple[str, str]:
    """The parts of a line that many requests share."""
    return f" {route} {model!a} {status} ", f" {caller or '-'} {error or '-'}"


@lru_cache(maxsize=2)
def _date(second: int) -> str:
    return strftime("%Y-%m-%dT%H:%M:%S", gmtime(second))
