"""The access log: a line for each request, in a file of its own."""

from functools import lru_cache
from pathlib import Path
from time import gmtime, strftime
from typing import Literal

import msgspec

from modelrunner.gateway.request.observers import Observers, RequestRecord
from modelrunner.rotatedfile import RotatedFile

Form = Literal["off", "text", "json"]
LOG_BYTES = 16 << 20
"""Of the file and one older file together."""


class AccessLog:
    """An `Observer` that writes `path`. It is off until `use`."""

    def __init__(self, path: Path, observers: Observers) -> None:
        self._path = path
        self._observers = observers
        self._render = _text
        self._file: RotatedFile | None = None

    def use(self, form: Form) -> None:
        """Switches to another form of the lines, or off."""
        self.close()
        if form != "off":
            self._render = _json if form == "json" else _text
            self._file = RotatedFile(self._path, LOG_BYTES, "the access log")
            self._observers.add(self)

    def close(self) -> None:
        self._observers.remove(self)
        if self._file is not None:
            self._file.close()
            self._file = None

    def finished(self, record: RequestRecord) -> None:
        assert self._file is not None
        self._file.write(self._render(record))


def _json(record: RequestRecord) -> bytes:
    return msgspec.json.encode(record.flat()) + b"\n"


def _text(record: RequestRecord) -> bytes:
    labels, tokens = record.labels, record.tokens
    second, milliseconds = divmod(int(record.time * 1e3), 1000)
    caller = _word(labels.caller) if labels.caller else "-"
    return (
        f"{_date(second)}.{milliseconds:03}Z {record.request_id} {labels.route} {_word(record.model)} {record.status} "
        f"{record.duration:.3f}s {tokens.prompt}+{tokens.answer} {caller} {record.error or '-'} {record.peer or '-'}\n"
    ).encode()


def _word(text: str) -> str:
    """Quotes a client's text to one word in ASCII, which a reader can separate from the others."""
    return ascii(text).replace(" ", r"\x20")


@lru_cache(maxsize=2)
def _date(second: int) -> str:
    return strftime("%Y-%m-%dT%H:%M:%S", gmtime(second))
