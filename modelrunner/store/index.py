"""index.json: which models there are and what they are called. It is replaced whole, and never because it could not be
read: then it is set aside and made again from the manifests."""

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from modelrunner import durable
from modelrunner.store.digests import Digest

log = logging.getLogger(__name__)


class Record(msgspec.Struct, frozen=True):
    """`tags` are normal forms; `created` is when the model came here, in Unix seconds."""

    id: str
    tags: list[str]
    created: int


class _File(msgspec.Struct, frozen=True):
    models: list[Record]


class Index:
    """The file, and beside it the version before the last change, for the names in case the file is lost."""

    def __init__(self, folder: Path, manifests: Path) -> None:
        self._path = folder / "index.json"
        self._previous = folder / "index.json.old"
        self._manifests = manifests

    @property
    def exists(self) -> bool:
        return self._path.exists()

    def load(self) -> list[Record]:
        """Raises `OSError`."""
        records = _read(self._path)
        return self._rebuild() if records is None else records

    def save(self, records: Iterable[Record]) -> None:
        """Durable when it returns. Raises `OSError`; then the file is as before."""
        data = msgspec.json.encode(_File(list(records)))
        if self.exists:
            self._previous.unlink(missing_ok=True)
            os.link(self._path, self._previous)
        durable.write(self._path, msgspec.json.format(data, indent=2))

    def _rebuild(self) -> list[Record]:
        known = {record.id: record for record in _read(self._previous) or []}
        if self.exists:
            aside = self._path.with_name(f"index.json.corrupt-{time.time_ns()}")
            os.rename(self._path, aside)
            log.error("the index of models could not be read: it is now %s, and made again from the manifests", aside)
        return [known.get(str(id)) or self._nameless(id) for id in sorted(Digest.among(self._manifests))]

    def _nameless(self, id: Digest) -> Record:
        return Record(str(id), [], int(id.within(self._manifests).stat().st_mtime))


def _read(path: Path) -> list[Record] | None:
    """None if it is not there or makes no sense."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).models
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
