"""Chooses the store's folder for a new file. A disk that fails makes only its own folder unusable: the next one is
taken.

All functions here ask the disks, so they block."""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from modelrunner.durable import discard, temporary_name
from modelrunner.errors import FolderMissing, StorageFailed
from modelrunner.pull.source import PullSpec
from modelrunner.store import Store
from modelrunner.store.files import with_spare
from modelrunner.store.folder import ModelFolder


@dataclass(frozen=True, slots=True)
class PullTarget:
    """The folder for a pull: `name` is that of its folder for partial files. Unless the place is `fixed`, the model is
    stored in the folder that has most of its files already."""

    place: ModelFolder
    name: str
    fixed: bool

    @property
    def folder(self) -> Path:
        return self.partial / self.name

    @property
    def partial(self) -> Path:
        """Returns the folder for the pull's partial files."""
        return self.place.data / "partial"


def targets_of(store: Store, wanted: PullSpec, name: str) -> list[PullTarget]:
    """Returns the folders for a pull, the best first: one that holds its partial files, then those of `Store.places`.
    Raises the errors of `Store.places`."""
    try:
        places = store.places(str(wanted.reference), wanted.folder)
    except FolderMissing:  # it may have come back
        store.look()
        places = store.places(str(wanted.reference), wanted.folder)
    begun: dict[ModelFolder, bool] = {}
    for place in places:
        with suppress(OSError):
            begun[place] = _is_there(place.data / "partial" / name)
    usable = list(begun) or places  # without a usable one, the attempt reports the fault
    fixed = wanted.folder is not None
    targets = [PullTarget(place, name, fixed or place is not usable[0]) for place in usable]
    return sorted(targets, key=lambda target: not begun.get(target.place))


def roomy(store: Store, size: int) -> Path:
    """Returns the `partial` of the first folder that has room for `size` bytes, or else of the first that can be used.
    Raises `StorageFailed` if no folder can be used."""
    usable: list[Path] = []
    faults: list[str] = []
    for place in store.places():
        try:
            partial, free = place.partial, shutil.disk_usage(place.data).free
        except FolderMissing as error:
            faults.append(error.message)
        except OSError as error:
            faults.append(f"{place.data}: {error.strerror or error}")
        else:
            if free > with_spare(size):
                return partial
            usable.append(partial)
    if not usable:
        raise StorageFailed(f"no folder for models can be used: {'; '.join(faults)}")
    return usable[0]


def is_usable(place: ModelFolder) -> bool:
    """Returns whether files can be made in the folder."""
    try:
        probe = temporary_name(place.partial / "probe")
        probe.touch(mode=0o600, exist_ok=False)
        discard(probe)
    except (FolderMissing, OSError):
        return False
    return True


def remove_all(paths: Iterable[Path]) -> None:
    """Removes the files and folders that exist. The weekly sweep removes those that cannot be removed now."""
    for path in paths:
        with suppress(OSError):
            discard(path)


def _is_there(path: Path) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
