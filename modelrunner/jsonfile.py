"""One value in one file that survives a crash, as JSON with a checksum, with one policy for a damaged file."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from modelrunner import durable
from modelrunner.errors import StorageFailed

T = TypeVar("T")
log = logging.getLogger(__name__)


class _Envelope(msgspec.Struct, frozen=True):
    """`sha256` is the digest of the bytes of `content`."""

    sha256: str
    content: msgspec.Raw


class JsonFile(Generic[T]):
    """One value of the type `T` in one file, as JSON with a checksum.

    A file that is damaged, of another shape, or not regular is set aside with an error in the log, and the caller goes
    on without it; one that is `required` stays where it is, and `load` raises. A `cache` can be computed again: its
    writes are not synced, and a disk error is logged instead of raised. `check` may raise `ValueError` for an
    impossible value of the right type.
    """

    def __init__(
        self,
        path: Path,
        type: type[T],
        *,
        cache: bool = False,
        required: bool = False,
        check: Callable[[T], None] | None = None,
    ) -> None:
        self.path = path
        self._type = type
        self._cache = cache
        self._required = required
        self._check = check

    def load(self) -> T | None:
        """Returns the value; None without a usable file. Raises `OSError`, and `StorageFailed` for a required file that
        is damaged."""
        try:
            return self._decoded(durable.read(self.path))
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, ValueError, RecursionError, durable.UnusableFile) as error:
            reason = error
        except OSError as error:
            if not self._cache:
                raise
            log.warning("%s cannot be read (%s): its content is computed again", self.path, error)
            return None
        if self._required:
            raise StorageFailed(
                f"{self.path} is damaged ({reason}): bring back a copy, or remove it to start without it"
            )
        durable.set_aside(self.path, reason)
        return None

    def save(self, value: T) -> int:
        """Replaces the file, makes its folder if needed, and returns its size in bytes. Raises `OSError`, with the old
        value kept."""
        content = msgspec.json.encode(value)
        if not self._cache:  # a person may want to read it
            content = msgspec.json.format(content, indent=1)
        data = msgspec.json.encode(_Envelope(hashlib.sha256(content).hexdigest(), msgspec.Raw(content)))
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            durable.write(self.path, data, synced=not self._cache)
        except OSError as error:
            if not self._cache:
                raise
            log.warning("%s cannot be written (%s): its content is computed again", self.path, error)
        return len(data)

    def _decoded(self, data: bytes) -> T:
        sealed = msgspec.json.decode(data, type=_Envelope)
        content = bytes(sealed.content)
        if hashlib.sha256(content).hexdigest() != sealed.sha256:
            raise ValueError("its checksum is wrong")
        value = msgspec.json.decode(content, type=self._type)
        if self._check is not None:
            self._check(value)
        return value
