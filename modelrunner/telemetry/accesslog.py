"""The access log: a line for each request, in a file of its own."""

import logging
from functools import lru_cache
from logging.handlers import RotatingFileHandler
from pathlib import Path
from time import gmtime, strftime
from typing import Literal

import msgspec

from modelrunner.gateway.request.observers import Observers, RequestRecord

Form = Literal["off", "text", "json"]
LOG_BYTES = 8 << 20  # per file; one older file is kept


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

    def finished(self, record: RequestRecord) -> None:
        assert self._handler is not None
        self._handler.handle(logging.makeLogRecord({"msg": self._render(record), "levelno": logging.INFO}))


def _json(record: RequestRecord) -> str:
    return msgspec.json.encode(record.flat()).decode()


def _text(record: RequestRecord) -> str:
    labels, tokens = record.labels, record.tokens
    second, milliseconds = divmod(int(record.time * 1e3), 1000)
    caller = _word(labels.caller) if labels.caller else "-"
    return (
        f"{_date(second)}.{milliseconds:03}Z {record.request_id} {labels.route} {_word(record.model)} {record.status} "
        f"{record.duration:.3f}s {tokens.prompt}+{tokens.answer} {caller} {record.error or '-'} {record.peer or '-'}"
    )


def _word(text: str) -> str:
    """Quotes a client's text to one word in ASCII, which a reader can separate from the others."""
    return ascii(text).replace(" ", r"\x20")


@lru_cache(maxsize=2)
def _date(second: int) -> str:
    return strftime("%Y-%m-%dT%H:%M:%S", gmtime(second))
