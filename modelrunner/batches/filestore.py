"""Uploaded files, and the results of batches: contents in a folder, and a list of them in SQLite."""

import asyncio
import os
import time
from collections.abc import AsyncIterable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

import msgspec

from modelrunner.database import Database
from modelrunner.durable import discard, sync, temporary_name
from modelrunner.errors import InsufficientDisk, NotFound, PayloadTooLarge
from modelrunner.units import format_bytes

LARGEST = 512 << 20
"""Bytes of one file."""
SCHEMA = "create table if not exists files (id text primary key, created real, owner text, about blob);"


class UploadedFile(msgspec.Struct, frozen=True):
    """`owner` is the name of the API key that made it, "" for the daemon's owner. `created` is in Unix seconds."""

    id: str
    created: float
    owner: str
    filename: str
    purpose: str
    bytes: int


class FileStore:
    """`database` has the table of `SCHEMA`. `limit` bounds the bytes of all files together: an upload beyond it is
    refused."""

    def __init__(self, folder: Path, database: Database, limit: int) -> None:
        self.limit = limit
        self._folder = folder
        self._database = database
        self._taken = 0  # bytes of all uploads so far, without those that failed: uploads that run together see it grow

    async def upload(
        self, pieces: AsyncIterable[bytes], about: Callable[[], tuple[str, str]], owner: str
    ) -> UploadedFile:
        """Keeps a file once it is complete: then `about` gives its name and its purpose, or raises for one that is not
        to be kept. Raises `PayloadTooLarge`, `InsufficientDisk`, `OSError`."""
        await asyncio.to_thread(self._folder.mkdir, mode=0o700, exist_ok=True)
        before = self._taken
        kept = await asyncio.to_thread(self._kept)
        id = f"file-{token_hex(12)}"
        temporary, size = temporary_name(self._folder / id), 0
        try:
            with _made(temporary) as file:
                async for piece in pieces:
                    size += len(piece)
                    self._taken += len(piece)
                    if size > LARGEST:
                        raise PayloadTooLarge(f"a file may have {LARGEST} bytes")
                    if kept + self._taken - before > self.limit:
                        raise InsufficientDisk(
                            f"the files of batches may have {format_bytes(self.limit)} (files_limit), and those here "
                            f"have {format_bytes(kept)}: delete some of them (DELETE /v1/files/ID)"
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
        self._folder.mkdir(mode=0o700, exist_ok=True)
        temporary = temporary_name(self._folder / id)
        try:
            with open(temporary, "xb") as file:
                file.writelines(lines)
            return self._keep(temporary, id, filename, "batch_output", owner)
        finally:
            discard(temporary)

    def open(self, id: str) -> BinaryIO:
        """Opens the content of a file. Blocks. Raises `NotFound`, `OSError`."""
        try:
            return open(self._folder / id, "rb")
        except FileNotFoundError:
            raise NotFound(f"there is no file {id!r}", param="file_id") from None

    def get(self, id: str, owner: str) -> UploadedFile:
        """Blocks. Raises `NotFound`, also for a file of another key; the daemon's owner sees all."""
        with self._database.transaction() as database:
            row = database.execute("select about from files where id = ?", (id,)).fetchone()
        found = msgspec.json.decode(row[0], type=UploadedFile) if row else None
        if found is None or owner not in ("", found.owner):
            raise NotFound(f"there is no file {id!r}", param="file_id")
        return found

    def all(self, owner: str) -> list[UploadedFile]:
        """Returns the files, the newest first. Blocks."""
        with self._database.transaction() as database:
            rows = database.execute("select about from files order by created desc").fetchall()
        found = [msgspec.json.decode(about, type=UploadedFile) for (about,) in rows]
        return [file for file in found if owner in ("", file.owner)]

    def delete(self, id: str, owner: str) -> None:
        """Blocks. Raises `NotFound`, `OSError`."""
        self.get(id, owner)
        with self._database.transaction() as database:
            database.execute("delete from files where id = ?", (id,))
        discard(self._folder / id)

    def _kept(self) -> int:
        """Returns the bytes of all files, including those that are being uploaded."""
        total = 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # deleted meanwhile
                    total += entry.stat().st_size
        return total

    def _keep(self, temporary: Path, id: str, filename: str, purpose: str, owner: str) -> UploadedFile:
        """Keeps the content before the name: a kill in between leaves a file that no list names, never a name without
        its content."""
        with open(temporary, "rb") as file:
            sync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        temporary.replace(self._folder / id)
        made = UploadedFile(id, time.time(), owner, filename, purpose, size)
        with self._database.transaction() as database:
            row = (id, made.created, owner, msgspec.json.encode(made))
            database.execute("insert or replace into files values (?, ?, ?, ?)", row)
        return made


def _made(path: Path) -> BinaryIO:
    """Makes a file. A thread that opens it could not be cancelled with its upload, and would leave it open."""
    return open(path, "xb")
