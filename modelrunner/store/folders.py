"""The folders of models: the ones that can be used now, and the models of those that cannot.

A disk that is not mounted leaves an empty folder, and the mounted disk would hide files that are written there. So a
folder must exist before it is used, and a folder that has had models is used again only while they are there.
"""

import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from modelrunner.config import lockfile
from modelrunner.errors import ModelRunnerError
from modelrunner.jsonfile import JsonFile
from modelrunner.store.catalog import Catalog, Entry
from modelrunner.store.digests import Digest
from modelrunner.store.folder import ModelFolder
from modelrunner.store.references import Reference
from modelrunner.store.startup import FORMAT_FILE
from modelrunner.store.union import AbsentFolder

_MOUNT = "mount its disk, then run `modelrunner reload`"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _OpenFolder:
    """An open folder, and the descriptor of its lock."""

    folder: ModelFolder
    lock: int

    @property
    def is_there(self) -> bool:
        """Returns False if the folder is gone, or another file system is mounted over it."""
        try:
            return os.path.samestat(os.fstat(self.lock), os.lstat(self.folder.data / lockfile.NAME))
        except OSError:
            return False


class _KnownModel(msgspec.Struct, frozen=True, array_like=True):
    """The values that are kept of a model while its folder is away: host, path, tag and revision of each name, the
    time when it was stored, in Unix seconds, and the version of its record."""

    tags: list[tuple[str, str, str, str]]
    created: int
    version: int


class Folders:
    """All folders of models. `home` is in use for as long as the daemon runs, under the daemon's own lock; each other
    folder has a lock of its own. `places` are all of them, the preferred first. Not locked: `Store` lets one call at a
    time change it."""

    def __init__(self, home: ModelFolder, places: Sequence[Path], open: Callable[[Path], ModelFolder]) -> None:
        self._home = home
        self._open_folder = open
        self._held: dict[Path, _OpenFolder] = {}
        self._absent: dict[Path, AbsentFolder] = {}
        self._file = JsonFile(home.data / "state" / "folders.json", dict[str, dict[str, _KnownModel]], cache=True)
        self._known = self._file.load() or {}
        self.set_places(places)

    def set_places(self, places: Sequence[Path]) -> None:
        """Sets the folders. The home is added as the last one if it is not among them. Folders that are left out are
        closed, and their models are forgotten."""
        self.places: tuple[Path, ...] = tuple(
            dict.fromkeys((*places, *([] if self._home.data in places else [self._home.data])))
        )
        for path in self._held.keys() - set(self.places):
            self._release(path)
        known = {path: models for path, models in self._known.items() if Path(path) in self.places}
        if known != self._known:
            self._known = known
            self._file.save(known)
        self._absent = {path: folder for path, folder in self._absent.items() if path in self.places}

    def look(self) -> bool:
        """Opens the folders that can be used now and closes those that cannot. Returns whether any folder changed."""
        before = self.present, self.absent
        for path in self.places:
            if path in self._held and not self._held[path].is_there:
                self._release(path)
            if path not in self._held and path != self._home.data:
                self._try(path)
        return before != (self.present, self.absent)

    @property
    def is_current(self) -> bool:
        """Returns False if a look might find a change. Changes nothing, so it needs no lock."""
        held, absent = self._held.copy(), self.absent
        return all(each.is_there for each in held.values()) and all(self._fault(a.path) == a.reason for a in absent)

    @property
    def present(self) -> tuple[ModelFolder, ...]:
        open = {self._home.data: self._home} | {path: held.folder for path, held in self._held.items()}
        return tuple(open[path] for path in self.places if path in open)

    @property
    def absent(self) -> tuple[AbsentFolder, ...]:
        return tuple(self._absent.values())

    def remember(self, folder: ModelFolder, ids: Iterable[Digest]) -> None:
        """Stores the models' names for the time when the folder is away. A failure is logged."""
        if folder.is_home:
            return
        known, entries = self._known.setdefault(str(folder.data), {}), folder.catalog.entries
        for id in ids:
            known.pop(id.hex, None)
            if id in entries:
                tags = [(tag.host, tag.path, tag.tag, tag.revision) for tag in entries[id].tags]
                known[id.hex] = _KnownModel(tags, entries[id].created, entries[id].version)
        self._file.save(self._known)

    def _try(self, path: Path) -> None:
        reason = self._fault(path)
        if not reason:
            try:
                held = self._held[path] = self._hold(path)
                self._absent.pop(path, None)
                self._known[str(path)] = {}
                self.remember(held.folder, held.folder.catalog.entries)
                return
            except ModelRunnerError as error:
                reason = f"cannot be used: {error.message}"
            except OSError as error:
                reason = f"cannot be used: {error.strerror}"
        if path not in self._absent or self._absent[path].reason != reason:
            log.warning("the folder %s %s", path, reason)
            self._absent[path] = AbsentFolder(path, reason, self._had(path, reason))

    def _had(self, path: Path, reason: str) -> Catalog:
        damage = f"the folder {path} {reason}"
        return Catalog(
            Entry(
                id,
                tuple(Reference(host, path, tag, None, revision) for host, path, tag, revision in kept.tags),
                kept.created,
                b"{}",
                None,
                damage,
                version=kept.version,
                absent=True,
            )
            for hex, kept in self._known.get(str(path), {}).items()
            if (id := Digest.named(hex))
        )

    def _fault(self, path: Path) -> str:
        """Returns the reason why the folder cannot be used, as far as it shows without opening it."""
        if not os.path.isdir(path):  # also False if the disk gives an error
            return f"is not there: {_MOUNT}; a new folder must be made by hand"
        if str(path) in self._known and not os.path.exists(path / FORMAT_FILE):
            return f"is empty, and it had models: {_MOUNT}, or take it out of model_dirs"
        return ""

    def _hold(self, path: Path) -> _OpenFolder:
        """Opens and locks the folder. Raises `OSError`, `ModelRunnerError`."""
        lock = os.open(path / lockfile.NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _OpenFolder(self._open_folder(path), lock)
        except BlockingIOError:
            os.close(lock)
            raise ModelRunnerError("a daemon uses it already") from None
        except BaseException:
            os.close(lock)
            raise

    def _release(self, path: Path) -> None:
        held = self._held.pop(path)
        os.close(held.lock)

    def close(self) -> None:
        """Closes all folders."""
        for path in list(self._held):
            self._release(path)
