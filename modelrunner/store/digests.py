"""Digests: no other text becomes a file name in the store."""

import hashlib
import os
import re
from pathlib import Path
from typing import Self

import msgspec

from modelrunner.errors import InvalidReference

_HEX = re.compile(r"[0-9a-f]{64}")
_PREFIX = "sha256:"


class Digest(msgspec.Struct, frozen=True, order=True, cache_hash=True, gc=False):
    """A sha256, made only from 64 lower-case hexadecimal digits, so no other path can be written in its place. `str()`
    gives the usual form `sha256:HEX`."""

    hex: str

    def __post_init__(self) -> None:
        if _HEX.fullmatch(self.hex) is None:
            raise InvalidReference("a digest is sha256: and 64 lower-case hexadecimal digits", param="digest")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `sha256:HEX`. Raises `InvalidReference`."""
        return cls(text[len(_PREFIX) :] if text.startswith(_PREFIX) else "")

    @classmethod
    def of(cls, data: bytes) -> Self:
        return cls(hashlib.sha256(data).hexdigest())

    @classmethod
    def among(cls, folder: Path) -> set[Self]:
        """Returns the digests that name files or folders in `folder`; other names are skipped."""
        return {digest for name in os.listdir(folder) if (digest := cls.named(name))}

    @classmethod
    def named(cls, text: str) -> Self | None:
        """Returns the digest of 64 lower-case hexadecimal digits; None for any other text."""
        try:
            return cls(text)
        except InvalidReference:
            return None

    def within(self, folder: Path) -> Path:
        """Returns the path of the file or folder of this digest in `folder`."""
        return folder / self.hex

    def __str__(self) -> str:
        return _PREFIX + self.hex
