"""Reads tar archives that may be hostile (POSIX.1-2001 pax and ustar, GNU's long names), as a stream.

A member's name is only passed on, never used as a path here. Python's tarfile is not used: it keeps headers of any size
in memory, and follows links.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from modelrunner.errors import InvalidModel

BLOCK = 512
_MOST_MEMBERS = 10_000
_LONGEST_NAME = 1024
_LONGEST_EXTENSION = 1 << 16  # bytes of a pax header, or of a GNU long name
_MOST_RECORDS = 100  # in a pax header: programs write a few for a file's times and owner, and some for its attributes
_LONGEST_LENGTH = 20  # digits of the length of a record, and a space
_MOST_EXTENSIONS = 8  # before one member: programs write one of each kind
_PIECE = 1 << 20
_FILE, _FOLDER = b"0\x007", b"5"
_PAX, _PAX_OF_ALL, _LONG_NAME = b"x", b"g", b"L"
_SPARSE = "GNU.sparse"
_GZIP = 16 + zlib.MAX_WBITS
_MOST_GZIP_MEMBERS = 1000
_LEAST_OF_GZIP_MEMBER = 4096  # bytes of an archive for each further member


class Stream(Protocol):
    """A source of bytes. `read` may return less than was asked for, b"" only at the end."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(slots=True)
class Member:
    """A regular file; `size` is in bytes. Its name is relative, without `.` and `..`."""

    name: str
    size: int
    _left: int
    _stream: Stream

    def pieces(self) -> Iterator[bytes]:
        """Yields the content, once, before the next member is asked for. Raises `InvalidModel` if it is cut."""
        while self._left:
            piece = self._stream.read(min(_PIECE, self._left))
            if not piece:
                raise InvalidModel("the archive ends in the middle of a file")
            self._left -= len(piece)
            yield piece

    def skip(self) -> None:
        for _ in self.pieces():
            pass

    def content(self, limit: int) -> bytes:
        """Returns the content. Raises `InvalidModel` for more than `limit` bytes."""
        if self.size > limit:
            raise InvalidModel(f"the archive's file {self.name[:80]!r} has {self.size} bytes, more than {limit}")
        return b"".join(self.pieces())


def members(stream: Stream, *, limit: int) -> Iterator[Member]:
    """Yields the regular files of the archive, in its order; folders are skipped. The unread rest of a member is
    skipped with the next one. Raises `InvalidModel` for links, devices and sparse files, for names that lead out of a
    folder or come twice, and for more than 10,000 members or, with pax headers and long names, `limit` bytes in all."""
    seen: set[str] = set()
    total = count = extensions = 0
    attributes: dict[bytes, dict[str, str]] = {}
    while (block := _block(stream)) is not None:
        kind, size, name = block[156:157], _number(block[124:136]), _name(block)
        count += 1
        if count > _MOST_MEMBERS:
            raise InvalidModel(f"the archive has more than {_MOST_MEMBERS} members")
        if kind in (_PAX, _PAX_OF_ALL, _LONG_NAME):
            extensions += 1
            if extensions > _MOST_EXTENSIONS:
                raise InvalidModel(f"the archive has more than {_MOST_EXTENSIONS} headers before one file")
            data = _extension(stream, size)
            total += size
            attributes.pop(kind, None)
            if kind == _PAX:
                attributes[kind] = _records(data)
            elif kind == _LONG_NAME:
                attributes[kind] = {"path": _text(data.rstrip(b"\0"))}
            continue
        for own in attributes.values():
            name, size = own.get("path", name), _size(own.get("size"), size)
            if any(key.startswith(_SPARSE) for key in own):
                raise InvalidModel("the archive has a sparse file, which no model needs")
        attributes, extensions = {}, 0
        total += size
        if total > limit:
            raise InvalidModel(f"the archive unpacks to more than {limit} bytes")
        member = Member(_clean(name), size, size, stream)
        if kind and kind in _FILE:
            if member.name.casefold() in seen:
                raise InvalidModel(f"the archive has the file {member.name[:80]!r} twice")
            seen.add(member.name.casefold())
            yield member
        elif kind != _FOLDER:
            raise InvalidModel(f"the archive has a link or a device, {member.name[:80]!r}, which no model needs")
        member.skip()
        _pad(stream, size)


def _block(stream: Stream) -> bytes | None:
    """Returns the next header; None at the archive's end."""
    block = b""
    while len(block) < BLOCK and (piece := stream.read(BLOCK - len(block))):
        block += piece
    if not block or not any(block):
        return None
    if len(block) < BLOCK:
        raise InvalidModel("the archive ends in the middle of a header")
    blanked = block[:148] + b" " * 8 + block[156:]
    if _number(block[148:156]) != sum(blanked):
        raise InvalidModel("it is damaged, or not a tar archive")
    return block


def _pad(stream: Stream, size: int) -> None:
    """Skips the padding: content ends where a block ends."""
    left = -size % BLOCK
    while left and (piece := stream.read(left)):
        left -= len(piece)


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU's binary form, for sizes of 8 GiB and more
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    else:
        digits = field.strip(b" \0")
        if not all(48 <= digit <= 55 for digit in digits):
            raise InvalidModel("it is damaged, or not a tar archive")
        value = int(digits or b"0", 8)
    return _size(str(value) if value < 1 << 64 else "x", 0)


def _size(text: str | None, default: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidModel("the archive has a file with an invalid size")
    return int(text)


def _name(block: bytes) -> str:
    name, prefix = _text(block[:100].split(b"\0")[0]), b""
    if block[257:263] == b"ustar\0":
        prefix = block[345:500].split(b"\0")[0]
    return f"{_text(prefix)}/{name}" if prefix else name


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidModel("the archive has a name that is not UTF-8") from None


def _extension(stream: Stream, size: int) -> bytes:
    if size > _LONGEST_EXTENSION:
        raise InvalidModel(f"the archive has a header of {size} bytes")
    data = b"".join(Member("", size, size, stream).pieces())
    _pad(stream, size)
    return data


def _records(data: bytes) -> dict[str, str]:
    """Returns those of the records `LENGTH KEY=VALUE\\n`, which follow one another, that are needed here."""
    records = {}
    start = count = 0
    while start < len(data):
        head, _, _ = data[start : start + _LONGEST_LENGTH].partition(b" ")
        end = start + _size(head.decode("ascii", "replace"), 0)
        record = data[start + len(head) + 1 : end]
        if not start + len(head) + 1 < end <= len(data) or record[-1:] != b"\n":
            raise InvalidModel("the archive has a damaged header")
        count += 1
        if count > _MOST_RECORDS:
            raise InvalidModel(f"the archive has a header with more than {_MOST_RECORDS} records")
        key, _, value = record[:-1].partition(b"=")
        name, text = _text(key), _text(value)
        if name in ("path", "size") or name.startswith(_SPARSE):
            records[name] = text
        start = end
    return records


def _clean(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if len(name) > _LONGEST_NAME or name.startswith("/") or ".." in parts or not name.replace("\\", "").isprintable():
        raise InvalidModel(f"the archive has a file whose name leads out of the folder: {name[:80]!r}")
    return "/".join(parts)


class Gunzipped:
    """The content of a gzip stream (RFC 1952), which may have several members, read a piece at a time. Each member
    costs a new start, so a stream of more members than any program writes is refused."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._inflate = zlib.decompressobj(_GZIP)
        self._pending = b""
        self._count, self._most = 1, _MOST_GZIP_MEMBERS

    def read(self, size: int, /) -> bytes:
        """Returns `size` bytes, fewer only at the end. Raises `InvalidModel` for a stream that is damaged."""
        data = bytearray()
        while size > len(data):
            if not self._pending:
                self._pending = self._stream.read(_PIECE)
                self._most += len(self._pending) // _LEAST_OF_GZIP_MEMBER
            if self._inflate.eof:
                if not self._pending:
                    return bytes(data)
                self._pending = self._pending.lstrip(b"\0")  # padding after a member
                if not self._pending:
                    continue
                self._begin_member()
            try:
                piece = self._inflate.decompress(self._pending, size - len(data))
            except zlib.error:
                raise InvalidModel("its archive is damaged: it cannot be unpacked") from None
            if not piece and not self._pending and not self._inflate.eof:
                raise InvalidModel("its archive is damaged: it ends too early")
            data += piece
            self._pending = self._inflate.unconsumed_tail or self._inflate.unused_data
        return bytes(data)

    def _begin_member(self) -> None:
        self._count += 1
        if self._count > self._most:
            raise InvalidModel("its archive has too many gzip members: pack it as one")
        self._inflate = zlib.decompressobj(_GZIP)
