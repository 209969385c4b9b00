"""SQLite files of the daemon's own state, each row with a checksum: opened, checked and repaired in the same way.

SQLite finds damage of its own structures only, and some of it only when a query meets it. So the file is checked when
it is first used. The rows of a damaged one that can be read, and whose checksums are right, go into a new file; the old
one is set aside, with an error in the log.
"""

import contextlib
import errno
import logging
import os
import shutil
import sqlite3
import stat
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from modelrunner.durable import discard, set_aside, temporary_name, translated
from modelrunner.errors import InsufficientDisk, StorageFailed

log = logging.getLogger(__name__)

_PAGE = 4096
_COUNT_AT = 28  # the place of the number of pages (https://www.sqlite.org/fileformat.html, 1.3)
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
_SIDES = ("-wal", "-shm")  # files that SQLite keeps beside its own
_WAL_HEAD, _FRAME_HEAD = 32, 24  # bytes (https://www.sqlite.org/fileformat.html, 4.1)


class Database:
    """The SQLite file at `path` with the tables of `schema`, of which none may be `without rowid`. Each has one column
    more than there, `seal`, so an insertion names its columns. With `largest`, writes fail with SQLITE_FULL once the
    file has so many bytes. Every method blocks."""

    def __init__(self, path: Path, schema: str, *, largest: int | None = None) -> None:
        self.path = path
        self._schema = schema
        self._tables = _tables(schema)
        self._triggers = "".join(_triggers(table, columns) for table, columns in self._tables.items())
        self._version = zlib.crc32(schema.encode()) >> 1 or 1
        self._largest = largest
        self._checking = threading.Lock()
        self._is_sound = False  # as far as known
        self._is_seen = False  # before that, nobody writes to the file

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Yields a connection whose changes are all kept, or none if the block raises. A damaged file is repaired
        first; if only the block finds the damage, the next transaction repairs it. Raises `sqlite3.Error`,
        `OSError`."""
        with closing(self._open()) as connection:
            try:
                with connection:
                    yield connection
            except sqlite3.DatabaseError as error:
                if _is_damage(error):
                    self._is_sound = False
                raise

    def _open(self) -> sqlite3.Connection:
        if self._is_sound:
            try:
                return self._connect(self.path)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error) and self.path.exists():
                    raise
        with self._checking:
            self._check()
            self._is_sound = True
            return self._connect(self.path)

    def _connect(self, path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", timeout=5.0, uri=True)
        try:
            connection.create_function("seal", -1, _seal)
            if connection.execute("pragma user_version").fetchone() != (self._version,):
                has_tables = connection.execute("select 1 from sqlite_schema").fetchone()
                raise _damage("it is of another release" if has_tables else "it is empty")
            connection.execute("pragma journal_mode = wal")
            if self._largest is not None:
                connection.execute(f"pragma max_page_count = {self._largest // _PAGE}")
            connection.executescript(self._triggers)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self) -> None:
        """Makes the file if it is missing, and repairs it if it is damaged."""
        witness = self.path.with_name(f"{self.path.name}-made")  # says that there was a file, once it is gone
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(self.path).st_mode):
                set_aside(self.path, "it is not a regular file")
        if not self.path.exists():
            if witness.exists():
                log.error("%s is gone, and all that it held: a new one is made", self.path)
            self._make(self.path)
        elif fault := (not self._is_seen and _unread_changes(Path(f"{self.path}-wal"))) or self._fault():
            self._repair(fault)
        self._is_seen = True
        witness.touch(mode=0o600)

    def _make(self, path: Path) -> None:
        temporary = temporary_name(path)
        try:
            with closing(sqlite3.connect(temporary)) as connection:
                temporary.chmod(0o600)
                connection.executescript(self._schema)
                for table in self._tables:
                    connection.execute(f"alter table {table} add column seal integer")
                connection.execute(f"pragma user_version = {self._version}")
            for side in _SIDES:  # of a file that is gone: SQLite would take what is in them into the new one
                discard(path.with_name(path.name + side))
            os.rename(temporary, path)
        finally:
            discard(temporary)

    def _fault(self) -> str:
        """Returns what is wrong with the file, "" if nothing is."""
        try:
            with closing(self._connect(self.path)) as connection:
                [(answer,), *_] = connection.execute("pragma integrity_check(1)")
                if answer != "ok":
                    return str(answer)
                for table, columns in self._tables.items():
                    query = f"select count(*) from {table} where seal is not {_sealed(columns)}"
                    [(wrong,)] = connection.execute(query)
                    if wrong:
                        return f"{wrong} rows of {table} have a wrong checksum"
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            return str(error)
        return ""

    def _repair(self, fault: str) -> None:
        """Replaces the file by one with the rows that can be read, in one step."""
        new, copies = temporary_name(self.path), []
        earlier = self._of_release(self._version)  # from before another release was used
        try:
            self._make(new)
            for source in (self.path, *([earlier] if earlier.exists() else ())):
                copies.append(copy := temporary_name(self.path))
                for name in ("", "-wal"):
                    with contextlib.suppress(FileNotFoundError):
                        shutil.copyfile(f"{source}{name}", f"{copy}{name}")
            release = _release(copies[0])
            kept = [self._salvage(copy, new) for copy in copies][-1]
            if os.path.exists(f"{new}-wal"):  # SQLite says nothing if the disk is full as it closes a file
                raise OSError(errno.ENOSPC, "there is no room to repair it", str(self.path))
            aside = self._of_release(release)
            if release in (0, self._version) or aside.exists():
                aside = self.path.with_name(f"{self.path.name}.corrupt-{time.time_ns()}")
            os.link(self.path, aside)
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{self.path}-wal", f"{aside}-wal")
            discard(self.path.with_name(f"{self.path.name}-shm"))
            os.rename(new, self.path)
            for side in ("", *_SIDES):
                discard(earlier.with_name(earlier.name + side))
        finally:
            for place in (new, *copies):
                for side in ("", *_SIDES):
                    discard(place.with_name(place.name + side))
        rows = ", ".join(f"{count} of {table}" for table, count in kept.items())
        said = "%s cannot be used (%s): rows that are kept: %s; the old file is %s"
        log.error(said, self.path, fault, rows, aside.name)

    def _of_release(self, release: int) -> Path:
        """Returns where the file of another release is set aside."""
        return self.path.with_name(f"{self.path.name}.release-{release:x}")

    def _salvage(self, damaged: Path, new: Path) -> dict[str, int]:
        """Copies the rows with the right checksum, and returns their number for each table. Tries again with the first
        page of the new file, as the first page has the names and places of the tables."""
        first = new.read_bytes()[:_PAGE]
        with closing(self._connect(new)) as target:
            for again in (False, True):
                if again:
                    pages = os.path.getsize(damaged) // _PAGE
                    with open(damaged, "r+b") as file:
                        file.write(first[:_COUNT_AT] + pages.to_bytes(4, "big") + first[_COUNT_AT + 4 :])
                with closing(sqlite3.connect(damaged)) as source, target:
                    source.create_function("seal", -1, _seal)
                    source.text_factory = lambda data: data.decode("utf-8", "replace")
                    for table, columns in self._tables.items():
                        names = ", ".join(("rowid", *columns))
                        places = ", ".join("?" * (len(columns) + 1))
                        insert = f"insert or ignore into {table} ({names}) values ({places})"
                        target.executemany(insert, _readable(source, table, columns))
            return {table: target.execute(f"select count(*) from {table}").fetchone()[0] for table in self._tables}


@contextmanager
def answered(what: str, folder: Path) -> Iterator[None]:
    """Turns the errors of a transaction into `InsufficientDisk` and `StorageFailed`, as `durable.translated` does with
    an `OSError`."""
    with translated(what, folder):
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
                raise InsufficientDisk(f"{what} failed: the disk is full; make room in {folder}") from error
            raise StorageFailed(f"{what} failed: {error} ({folder})") from error


def _readable(source: sqlite3.Connection, table: str, columns: tuple[str, ...]) -> Iterator[tuple[object, ...]]:
    """Yields rows with the right checksum, from the first one up to the damage, then from the last one down to it."""
    query = f"select rowid, {', '.join(columns)} from {table} where seal is {_sealed(columns)} order by rowid"
    for order in ("", " desc"):
        with contextlib.suppress(sqlite3.DatabaseError):
            yield from source.execute(query + order)


def _release(path: Path) -> int:
    """Returns the release of a file, 0 if it cannot be read."""
    try:
        with closing(sqlite3.connect(path)) as connection:
            return int(connection.execute("pragma user_version").fetchone()[0])
    except sqlite3.DatabaseError:
        return 0


def _unread_changes(wal: Path) -> str:
    """Returns what is wrong with the changes that wait beside a file whose program was killed, "" if nothing is. SQLite
    takes them up to the first wrong checksum, and says nothing of those after it."""
    try:
        data = wal.read_bytes()
    except FileNotFoundError:
        return ""
    if len(data) <= _WAL_HEAD:
        return ""
    magic, _, page, _, *salts, first, second = struct.unpack(">8I", data[:_WAL_HEAD])
    order = ">" if magic & 1 else "<"
    sums = _wal_sums(order, data[: _WAL_HEAD - 8], (0, 0))
    if sums != (first, second):
        return "the head of its last changes cannot be read"
    size = _FRAME_HEAD + page
    for place in range(_WAL_HEAD, len(data) - size + 1, size):
        frame = data[place : place + size]
        _, _, *frame_salts, first, second = struct.unpack(">6I", frame[:_FRAME_HEAD])
        sums = _wal_sums(order, frame[_FRAME_HEAD:], _wal_sums(order, frame[:8], sums))
        if (frame_salts, sums) != (salts, (first, second)):
            own = struct.pack(">2I", *salts)
            rest = sum(data[at + 8 : at + 16] == own for at in range(place, len(data) - size + 1, size))
            return f"{rest} pages of its last changes cannot be read" if rest else ""
    return ""


def _wal_sums(order: str, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    """Returns the sums of the write-ahead log (ibid., 4.2)."""
    first, second = sums
    for one, other in struct.iter_unpack(f"{order}2I", data):
        first = first + one + second & 0xFFFFFFFF
        second = second + other + first & 0xFFFFFFFF
    return first, second


def _tables(schema: str) -> dict[str, tuple[str, ...]]:
    """Returns the columns of each table."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(schema)
        names = [name for (name,) in connection.execute("select name from sqlite_schema where type = 'table'")]
        return {name: tuple(row[1] for row in connection.execute(f"pragma table_info({name})")) for name in names}


def _triggers(table: str, columns: tuple[str, ...]) -> str:
    """Returns the triggers that give each new or changed row its checksum."""
    seal = f"update {table} set seal = {_sealed(columns, 'new.')} where rowid = new.rowid;"
    return (
        f"create temp trigger seal_new_{table} after insert on main.{table} begin {seal} end;"
        f"create temp trigger seal_old_{table} after update of {', '.join(columns)} on main.{table} begin {seal} end;"
    )


def _sealed(columns: tuple[str, ...], row: str = "") -> str:
    """Returns the call that makes the checksum. A number is taken with all its digits: a cast gives 15 of 17."""
    exact = "case typeof({0}) when 'real' then printf('%!.17g', {0}) else {0} end"
    return f"seal({', '.join(f'cast({exact.format(row + column)} as blob)' for column in columns)})"


def _seal(*values: bytes | None) -> int:
    checksum = 0
    for value in values:
        checksum = zlib.crc32(b"-" if value is None else b"%d:%b" % (len(value), value), checksum)
    return checksum


def _damage(message: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(message)
    error.sqlite_errorcode = sqlite3.SQLITE_NOTADB
    return error


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED  # the primary code of an extended code
