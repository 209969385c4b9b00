"""SQLite files of the daemon's own state: opened the same way everywhere, and set aside where they are damaged."""

import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from modelrunner.durable import set_aside

log = logging.getLogger(__name__)

_PAGE = 4096
_DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


class Database:
    """The SQLite file at `path`, whose tables `schema` makes where they are missing. With `largest`, writes fail with
    SQLITE_FULL once the file has so many bytes. Every method blocks."""

    def __init__(self, path: Path, schema: str, *, largest: int | None = None) -> None:
        self.path = path
        self._schema = schema
        self._largest = largest
        self._replacing = threading.Lock()
        self._was_opened = False

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Yields a connection whose changes are all kept, or none if the block raises. A damaged file is set aside
        first, with an error in the log; if only the block finds the damage, the next transaction gets a new file.
        Raises `sqlite3.Error`, `OSError`."""
        with closing(self._open()) as connection:
            inode = self.path.stat().st_ino
            try:
                with connection:
                    yield connection
            except sqlite3.DatabaseError as error:
                if _is_damage(error):
                    with self._replacing:
                        if self.path.exists() and self.path.stat().st_ino == inode:
                            set_aside(self.path, error)
                raise

    def _open(self) -> sqlite3.Connection:
        try:
            if self._was_opened:
                return self._connect()
            with self._replacing:  # SQLite does not wait for another connection that changes the journal too
                connection = self._connect()
                self._was_opened = True
                return connection
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
        with self._replacing:  # another thread may have set it aside meanwhile
            try:
                return self._connect()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                set_aside(self.path, error)
                return self._connect()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=5.0)
        try:
            self.path.chmod(0o600)
            connection.execute("pragma journal_mode = wal")
            if self._largest is not None:
                connection.execute(f"pragma max_page_count = {self._largest // _PAGE}")
            connection.executescript(self._schema)
        except BaseException:
            connection.close()
            raise
        return connection


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED  # the primary code of an extended code
