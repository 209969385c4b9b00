"""The request that an engine gets: a path, a content type and a body.

A JSON body is decoded once and encoded once, however many steps change its members. Any other body passes as it is."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from modelrunner.gateway.uploads import RequestUpload

MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""Decodes a JSON object as far as its members."""
JSON_TYPE = "application/json"
_LARGE = 1 << 20  # bytes above which a member is copied once and not several times
_NULL = b"null"


class EngineRequest:
    """A request for the engine's endpoint `path`. `body` is the client's: JSON, or a `RequestUpload`."""

    __slots__ = ("_body", "_changed", "_members", "_spliced", "content_type", "is_json", "passes", "path")

    def __init__(self, path: str, body: bytes | RequestUpload, content_type: str = JSON_TYPE) -> None:
        self.path = path
        self.content_type = content_type
        self.is_json = isinstance(body, bytes)
        self.passes = True  # the members are the client's, but for those that were set
        self._body = body
        self._members: dict[str, Any] | None = None
        self._changed = False
        self._spliced: list[tuple[int, int, bytes]] = []

    @classmethod
    def of(cls, path: str, members: dict[str, Any]) -> "EngineRequest":
        """Makes a request with a JSON object of these members."""
        request = cls(path, b"")
        request._members, request._changed, request.passes = members, True, False
        return request

    @property
    def upload(self) -> RequestUpload | None:
        """The body, unless it is JSON."""
        return self._body if isinstance(self._body, RequestUpload) else None

    @property
    def members(self) -> Mapping[str, Any]:
        """The members of a JSON body: raw where nothing has changed them. Do not change them here."""
        if self._members is None:
            assert isinstance(self._body, bytes)
            self._members = MEMBERS.decode(self._body)
        return self._members

    def has(self, name: str) -> bool:
        """Returns whether the body has this member, and it is not null."""
        value = self.members.get(name)
        return value is not None and not (isinstance(value, msgspec.Raw) and bytes(value) == _NULL)

    def raw(self, name: str) -> msgspec.Raw | None:
        """Returns a member as JSON, None if it is absent."""
        members = self.members
        value = members.get(name)
        if value is None or isinstance(value, msgspec.Raw):
            return value
        assert self._members is not None
        self._members[name] = raw = msgspec.Raw(msgspec.json.encode(value))
        return raw

    def get(self, name: str) -> Any:
        """Returns a member decoded, None if it is absent. Raises `msgspec.MsgspecError` for a value that cannot be
        decoded, such as 1e400."""
        raw = self.raw(name)
        return None if raw is None else msgspec.json.decode(raw)

    def set(self, changed: Mapping[str, Any]) -> None:
        """Adds or replaces members, and removes those whose new value is None."""
        if changed:
            members = {**self.members, **changed}
            self._members = {name: value for name, value in members.items() if value is not None}
            self._changed = True

    def splice(self, start: int, end: int, data: bytes) -> None:
        """Replaces the bytes from `start` to `end` of an upload as it is sent. They may not overlap with others."""
        self._spliced = sorted([*self._spliced, (start, end, data)])

    def encoded(self) -> bytes:
        """Returns a JSON body: the client's bytes if nothing has changed them."""
        if not self._changed:
            assert isinstance(self._body, bytes)
            return self._body
        members = self.members
        if sum(memoryview(raw).nbytes for raw in members.values() if isinstance(raw, msgspec.Raw)) <= _LARGE:
            return msgspec.json.encode(members)
        return _joined(members)

    def pieces(self) -> tuple[int, Iterator[bytes]]:
        """Returns the size of an upload as it is sent, in bytes, and its pieces. Each call begins anew."""
        upload = self.upload
        assert upload is not None
        added = sum([len(data) - (end - start) for start, end, data in self._spliced])
        return upload.size + added, self._with_splices(upload)

    def _with_splices(self, upload: RequestUpload) -> Iterator[bytes]:
        at = 0
        for start, end, data in self._spliced:
            yield from upload.pieces(at, start)
            yield data
            at = end
        yield from upload.pieces(at)


def _joined(members: Mapping[str, Any]) -> bytes:
    """Encodes the object as msgspec does, but copies a large member once and not several times."""
    pieces: list[Any] = []
    for name, value in members.items():
        raw = value if isinstance(value, msgspec.Raw) else msgspec.json.encode(value)
        pieces += (b",", msgspec.json.encode(name), b":", raw)
    return b"".join((b"{", *pieces[1:], b"}"))
