"""Which of the store's folders what comes goes to. A disk that fails costs no more than itself: the next one is taken.

All of it blocks: it asks the disks."""

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
    """Where a pull goes: `name` is that of its folder for partial files. Unless the place is `fixed`, the model goes
    where most of its files are already."""

    place: ModelFolder
    name: str
    fixed: bool

    @property
    def folder(self) -> Path:
        return self.partial / self.name

    @property
    def partial(self) -> Path:
        """The folder for what comes to the place."""
        return self.place.data / "partial"


def targets_of(store: Store, wanted: PullSpec, name: str) -> list[PullTarget]:
    """Where a pull may go, the best first: on with what has begun to come, else as `Store.places` has it. Raises as
    that."""
    try:
        places = store.places(str(wanted.reference), wanted.folder)
    except FolderMissing:  # it may be back
        store.look()
        places = store.places(str(wanted.reference), wanted.folder)
    begun: dict[ModelFolder, bool] = {}
    for place in places:
        with suppress(OSError):
            begun[place] = _is_there(place.data / "partial" / name)
    usable = list(begun) or places  # of none, the attempt says what is wrong
    fixed = wanted.folder is not None
    targets = [PullTarget(place, name, fixed or place is not usable[0]) for place in usable]
    return sorted(targets, key=lambda target: not begun.get(target.place))


def roomy(store: Store, size: int) -> Path:
    """The `partial` of the first folder that has room for so many bytes, or else of the first that can be used. Raises
    `StorageFailed` where none can."""
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
    """Whether files can be made there."""
    try:
        probe = temporary_name(place.partial / "probe")
        probe.touch(mode=0o600, exist_ok=False)
        discard(probe)
    except (FolderMissing, OSError):
        return False
    return True


def remove_all(paths: Iterable[Path]) -> None:
    """Removes what is there. What stays is swept after a week."""
    for path in paths:
        with suppress(OSError):
            discard(path)


def _is_there(path: Path) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
