"""Uploaded files, and the results of batches: in one folder, each content with a record of its own beside it."""

import asyncio
import logging
import os
import stat
import threading
import time
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

import msgspec

from modelrunner.durable import (
    UnusableFile,
    discard,
    make_folder,
    open_regular,
    set_aside,
    sweep_temporaries,
    sync,
    temporary_name,
    translated,
)
from modelrunner.errors import InsufficientDisk, NotFound, PayloadTooLarge, StorageFailed
from modelrunner.jsonfile import JsonFile
from modelrunner.units import format_bytes

LARGEST = 512 << 20
"""Bytes of one file."""
_RECORD = ".json"
log = logging.getLogger(__name__)


class UploadedFile(msgspec.Struct, frozen=True):
    """`owner` is the name of the API key that made it, "" for the daemon's owner. `created` is in Unix seconds."""

    id: str
    created: float
    owner: str
    filename: str
    purpose: str
    bytes: int


class FileStore:
    """The files in `folder`. `limit` bounds the bytes of all files together: an upload beyond it is refused. The list
    is in memory, so `get` and `all` do not block."""

    def __init__(self, folder: Path, limit: int) -> None:
        """Reads the records of the files. A content that has lost its record gets a new one, for the daemon's owner.
        Blocks. Raises `OSError`."""
        self.limit = limit
        self._folder = folder
        self._taken = 0  # bytes of all uploads so far, without those that failed: uploads that run together see it grow
        self._changing = threading.Lock()
        make_folder(folder)
        sweep_temporaries(folder)
        self._files = dict(_recorded(folder))

    async def upload(
        self, pieces: AsyncIterable[bytes], about: Callable[[], tuple[str, str]], owner: str
    ) -> UploadedFile:
        """Keeps a file once it is complete: then `about` gives its name and its purpose, or raises for one that is not
        to be kept. Raises `PayloadTooLarge`, `InsufficientDisk`, `StorageFailed`."""
        before = self._taken
        kept = await asyncio.to_thread(self._kept)
        id = f"file-{token_hex(12)}"
        temporary, size = temporary_name(self._folder / id), 0
        try:
            with translated("keeping the file", self._folder):
                with _new_file(temporary) as file:
                    async for piece in pieces:
                        size += len(piece)
                        self._taken += len(piece)
                        if size > LARGEST:
                            raise PayloadTooLarge(f"a file may have {LARGEST} bytes")
                        if kept + self._taken - before > self.limit:
                            raise InsufficientDisk(
                                f"the files of batches may have {format_bytes(self.limit)} (files_limit), and those "
                                f"here have {format_bytes(kept)}: delete some of them (DELETE /v1/files/ID)"
                            )
                        await asyncio.to_thread(file.write, piece)
                return await asyncio.to_thread(self._keep, temporary, id, *about(), owner)
        except BaseException:
            self._taken -= size
            raise
        finally:
            await asyncio.to_thread(discard, temporary)

    def write(self, id: str, lines: Iterable[bytes], filename: str, owner: str) -> UploadedFile:
        """Keeps the results of a batch; a file that has this ID is replaced. Blocks. Raises `OSError`."""
        temporary = temporary_name(self._folder / id)
        try:
            with open(temporary, "xb") as file:
                file.writelines(lines)
            return self._keep(temporary, id, filename, "batch_output", owner)
        finally:
            discard(temporary)

    def open(self, file: UploadedFile) -> BufferedReader:
        """Opens the content of a file. Raises `NotFound` for a file that is gone, and `StorageFailed` for a content
        that another program has changed or replaced."""
        try:
            opened = open_regular(self._folder / file.id)
        except FileNotFoundError:
            raise NotFound(f"the content of file {file.id!r} is gone", param="file_id") from None
        except UnusableFile as error:
            raise StorageFailed(f"the content of file {file.id!r} cannot be used: {error.strerror}") from None
        if (size := os.fstat(opened.fileno()).st_size) != file.bytes:
            opened.close()
            raise StorageFailed(f"the content of file {file.id!r} is damaged: {size} bytes of {file.bytes} are here")
        return BufferedReader(opened)

    def get(self, id: str, owner: str) -> UploadedFile:
        """Raises `NotFound`, also for a file of another key; the daemon's owner sees all."""
        file = self._files.get(id)
        if file is None or owner not in ("", file.owner):
            raise NotFound(f"there is no file {id!r}", param="file_id")
        return file

    def all(self, owner: str) -> list[UploadedFile]:
        """Returns the files, the newest first."""
        newest = sorted(self._files.copy().values(), key=lambda file: file.created, reverse=True)
        return [file for file in newest if owner in ("", file.owner)]

    def delete(self, id: str, owner: str) -> None:
        """Blocks. Raises `NotFound`, `StorageFailed`."""
        self.get(id, owner)
        with translated("deleting the file", self._folder), self._changing:
            discard(self._folder / id)
            discard(_record(self._folder, id).path)
            self._files.pop(id, None)

    def _kept(self) -> int:
        """Returns the bytes of all files, including those that are being uploaded."""
        total = 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # deleted meanwhile
                    total += entry.stat(follow_symlinks=False).st_size
        return total

    def _keep(self, temporary: Path, id: str, filename: str, purpose: str, owner: str) -> UploadedFile:
        """Keeps the content before its record: a kill in between leaves a content that gets another record, never a
        record without its content."""
        with open(temporary, "rb") as file:
            sync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        uploaded = UploadedFile(id, time.time(), owner, filename, purpose, size)
        with self._changing:
            temporary.replace(self._folder / id)
            _record(self._folder, id).save(uploaded)
            self._files[id] = uploaded
        return uploaded


def _recorded(folder: Path) -> Iterator[tuple[str, UploadedFile]]:
    """Yields the files of the folder by their IDs."""
    for name in sorted(os.listdir(folder)):
        if name.startswith("file-") and "." not in name:
            yield name, _record(folder, name).load() or _found_again(folder, name)
        elif name.endswith(_RECORD) and not (folder / name.removesuffix(_RECORD)).exists():
            log.error("the content of the file %s is gone", name.removesuffix(_RECORD))
            set_aside(folder / name, "its content is gone")


def _found_again(folder: Path, id: str) -> UploadedFile:
    """Returns the new record of a content. Who made it is not known, so only the daemon's owner sees it."""
    status = os.lstat(folder / id)
    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    file = UploadedFile(id, status.st_mtime, "", f"{id}.jsonl", "batch", size)
    log.error("the file %s (%d bytes) has lost its record: it is listed for the daemon's owner again", id, size)
    _record(folder, id).save(file)
    return file


def _record(folder: Path, id: str) -> JsonFile[UploadedFile]:
    return JsonFile(folder / f"{id}{_RECORD}", UploadedFile)


def _new_file(path: Path) -> BinaryIO:
    """Makes a file. A thread that opens it could not be cancelled with its upload, and would leave it open."""
    return open(path, "xb")
