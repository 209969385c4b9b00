"""Finds the words in a form (multipart/form-data, RFC 7578) that the gateway reads, without keeping the form: it may
hold megabytes of sound."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from modelrunner.errors import BadRequest

_MOST_PARTS = 256
_LONGEST_HEAD = 8 << 10  # bytes of one part's fields
_LONGEST_WORD = 1 << 10  # bytes of a model's name
_WORDS = frozenset({"model", "response_format", "stream"})
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_QUOTED = r"\"(?:[^\"\\]|\\.)*+\""
_VALUE = re.compile(rf"[ \t]*+([^\s;]++)[ \t]*+((?:;[ \t]*+{_TOKEN}=(?:{_TOKEN}|{_QUOTED})[ \t]*+)*+);?[ \t]*+")
_PARAMETER = re.compile(rf";[ \t]*+({_TOKEN})=({_QUOTED}|{_TOKEN})")
_PLAIN_BOUNDARY = re.compile(r"[ -!#-\[\]-~]{1,70}")
_FIELD = re.compile(rf"({_TOKEN}):([\t -\x7e\x80-\xff]*)")


class FormWord(NamedTuple):
    """A short text that a part of a form has, and its place in the body."""

    text: str
    start: int
    end: int


def words_of(content_type: str, pieces: Iterable[bytes]) -> Mapping[str, FormWord]:
    """Finds the parts `model`, `response_format` and `stream` in the pieces of a form; of the last two those that have
    a word of UTF-8. At most one piece and a part's head are in memory. Raises `BadRequest` for a body that is no such
    form, names no model, or has one of them twice."""
    form = _MultipartReader(_boundary(content_type))
    for piece in pieces:
        form.feed(piece)
    if not form.ended:
        raise BadRequest("the form is cut: its last boundary is missing")
    if "model" not in form.words:
        raise BadRequest("the form has no part `model`", param="model")
    return form.words


def _boundary(content_type: str) -> bytes:
    parameters = _parameters(content_type)
    if parameters is None or not _PLAIN_BOUNDARY.fullmatch(boundary := parameters.get("boundary", "")):
        raise BadRequest("the form has no boundary: send multipart/form-data as HTTP libraries make it")
    return boundary.encode("latin-1")


def _parameters(value: str) -> dict[str, str] | None:
    """Returns the parameters of a field's value, their names in lower case, None if readers may differ about them: they
    are malformed, or one is given twice."""
    match = _VALUE.fullmatch(value)
    if match is None:
        return None
    pairs = [(name.lower(), text) for name, text in _PARAMETER.findall(match[2])]
    names = {name for name, _ in pairs}
    return {name: text.strip('"') for name, text in pairs} if len(names) == len(pairs) else None


def _part_name(head: bytes) -> str:
    """Returns the name of the part with these fields. Raises `BadRequest` for a head that two readers may read
    differently: with folded or repeated fields, or a name in another encoding (`name*`)."""
    lines = [_FIELD.fullmatch(line) for line in head.decode("latin-1").split("\r\n")]
    dispositions = [line[2] for line in lines if line is not None and line[1].lower() == "content-disposition"]
    parameters = _parameters(dispositions[0]) if len(dispositions) == 1 and None not in lines else None
    if parameters is None or "name" not in parameters or "name*" in parameters or "\\" in parameters["name"]:
        raise BadRequest("a part of the form has a malformed head: send multipart/form-data as HTTP libraries make it")
    return parameters["name"]


class _MultipartReader:
    """Reads a form piece by piece. A part begins after a boundary and ends before the next one. What some readers take
    for a boundary and others do not is refused: a line that begins with it after a bare LF, or right after a part's
    head."""

    def __init__(self, boundary: bytes) -> None:
        self.words: dict[str, FormWord] = {}
        self.ended = False
        self._boundary = b"\n--" + boundary
        self._data = b"\r\n"  # the first boundary may begin the body
        self._at = -2  # of `_data` in the body
        self._parts = 0
        self._in_head = False
        self._word = ""  # the part that is read, if its word is looked for
        self._seen: set[str] = set()

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
        at = self._data.find(self._boundary)
        end = at + len(self._boundary)
        if not self._parts and ((at < 0 and len(self._data) > len(self._boundary) + 4) or at > 3):
            raise BadRequest("the form does not begin with its boundary")
        if self._word:
            self._check_length(at)
        if not self._word and at < 0 and self._parts:
            self._drop(max(0, len(self._data) - len(self._boundary) - 1))
        if at < 0 or len(self._data) < end + 2:
            return False
        after = self._data[end : end + 2]
        if self._data[max(0, at - 1) : at] != b"\r" or after not in (b"\r\n", b"--"):
            raise BadRequest("the form's boundary stands in a part of it")
        if self._word:
            self._take_word(at - 1)
        self._drop(end)
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
        name = _part_name(self._data[2:end])
        self._drop(end + 3)  # the last LF stays: a boundary may not follow at once
        self._in_head, self._word = False, name if name in _WORDS else ""
        if self._word in self._seen:
            raise BadRequest(f"`{name}` must be given once", param=name)
        self._seen.update({self._word} - {""})
        return True

    def _check_length(self, size: int) -> None:
        if (len(self._data) if size < 0 else size) > _LONGEST_WORD + len(self._boundary):
            self._is_no_word("too long for a name")

    def _take_word(self, end: int) -> None:
        try:
            text = self._data[1:end].decode()
        except UnicodeDecodeError:
            self._is_no_word("not UTF-8")
        else:
            self.words[self._word] = FormWord(text, self._at + 1, self._at + end)
        self._word = ""

    def _is_no_word(self, why: str) -> None:
        if self._word == "model":
            raise BadRequest(f"the form's `model` is {why}", param="model")
        self._word = ""
