"""Finds the model in a form (multipart/form-data, RFC 7578) without keeping the form: it may hold megabytes of
sound."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from modelrunner.errors import BadRequest

_MOST_PARTS = 256
_LONGEST_HEAD = 8 << 10  # bytes of one part's fields
_LONGEST_NAME = 1 << 10  # bytes of a model's name
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"\\]{1,70})"|([^\s";,]{1,70}))\s*(?:;|$)', re.IGNORECASE)
_NAME = re.compile(
    rb'content-disposition:[ \t]*form-data\b[^\r\n]*?;[ \t]*name=(?:"([^"\r\n]*)"|([^\s;]+))', re.IGNORECASE
)
_PREFIX = b"\r\n--"


class ModelPart(NamedTuple):
    """The part of a form that names the model, and the place of this name in the body."""

    model: str
    start: int
    end: int


def model_part(content_type: str, pieces: Iterable[bytes]) -> ModelPart:
    """Finds the only part with the name `model` in the pieces of a form. At most one piece and a part's head are in
    memory. Raises `BadRequest` for a body that is no such form, or names no model or several."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise BadRequest("the form has no boundary: send multipart/form-data as HTTP libraries make it")
    form = _MultipartReader(_PREFIX + (found[1] or found[2]).encode("latin-1"))
    for piece in pieces:
        form.feed(piece)
    if not form.ended:
        raise BadRequest("the form is cut: its last boundary is missing")
    if form.model is None:
        raise BadRequest("the form has no part `model`", param="model")
    return form.model


class _MultipartReader:
    """Reads a form piece by piece. A part begins after a boundary and ends before the next one."""

    def __init__(self, boundary: bytes) -> None:
        self.model: ModelPart | None = None
        self.ended = False
        self._boundary = boundary
        self._data = b"\r\n"  # the first boundary may begin the body
        self._at = -2  # of `_data` in the body
        self._parts = 0
        self._in_head = self._is_model = False

    def feed(self, piece: bytes) -> None:
        self._data += piece
        while not self.ended and (self._read_head() if self._in_head else self._skip_part()):
            pass
        if self.ended:
            self._data = b""

    def _drop(self, size: int) -> None:
        self._data = self._data[size:]
        self._at += size

    def _skip_part(self) -> bool:
        """Goes on behind the next boundary. Returns False if more data must come first."""
        found = self._data.find(self._boundary)
        end = found + len(self._boundary)
        if self._is_model:
            self._check_length(found)
        elif found < 0:
            self._drop(max(0, len(self._data) - len(self._boundary) - 2))
        if found < 0 or len(self._data) < end + 2:
            return False
        after = self._data[end : end + 2]
        if self._is_model:
            self._take_model(found)
        self._drop(end)
        if after not in (b"\r\n", b"--"):
            raise BadRequest("the form's boundary stands in a part of it")
        self.ended = after == b"--"
        self._in_head = not self.ended
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise BadRequest(f"the form has more than {_MOST_PARTS} parts")
        return True

    def _read_head(self) -> bool:
        end = self._data.find(b"\r\n\r\n")
        if end > _LONGEST_HEAD or (end < 0 and len(self._data) > _LONGEST_HEAD):
            raise BadRequest("a part of the form has too long a head")
        if end < 0:
            return False
        names = [quoted or plain for quoted, plain in _NAME.findall(self._data[:end])]
        self._drop(end + 4)
        self._in_head, self._is_model = False, names == [b"model"]
        if self._is_model and self.model is not None:
            raise BadRequest("`model` must be given once", param="model")
        return True

    def _check_length(self, found: int) -> None:
        if (len(self._data) if found < 0 else found) > _LONGEST_NAME + len(self._boundary):
            raise BadRequest("the form's `model` is too long for a name", param="model")

    def _take_model(self, end: int) -> None:
        try:
            name = self._data[:end].decode()
        except UnicodeDecodeError:
            raise BadRequest("the form's `model` is not UTF-8", param="model") from None
        self.model, self._is_model = ModelPart(name, self._at, self._at + end), False
