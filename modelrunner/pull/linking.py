"""Takes a file of another program without a copy of its bytes: by a clone that shares its blocks, or by a hard link."""

import contextlib
import fcntl
import os
from enum import StrEnum
from pathlib import Path

from modelrunner.durable import temporary_name

_FICLONE = 0x40049409  # linux/fs.h


class LinkKind(StrEnum):
    """A reflink shares blocks until one side is changed; a hard link is the same file under a second name."""

    REFLINK = "reflink"
    HARD_LINK = "hard link"
    COPY = "copy"


def take(source: int, target: Path) -> LinkKind:
    """Makes `target` of the open file `source`, whose content, mode and times stay unchanged. Makes nothing and returns
    `COPY` if the file systems allow neither way."""
    if _clone(source, target):
        return LinkKind.REFLINK
    return LinkKind.HARD_LINK if _link(source, target) else LinkKind.COPY


def link_kind(file: Path, folder: Path) -> LinkKind:
    """Returns how `file` could be taken into `folder`, by a trial."""
    target = temporary_name(folder / "probe")
    try:
        source = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return LinkKind.COPY
    try:
        return take(source, target)
    finally:
        os.close(source)
        with contextlib.suppress(OSError):  # the next start removes it
            target.unlink(missing_ok=True)


def _link(source: int, target: Path) -> bool:
    try:
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # The open file itself. Only with a folder does Python call linkat, which can follow the link in /proc.
        os.link(f"/proc/self/fd/{source}", target.name, dst_dir_fd=folder, follow_symlinks=True)
    except (OSError, NotImplementedError):  # another file system, or a file of another user
        return False
    finally:
        os.close(folder)
    return True


def _clone(source: int, target: Path) -> bool:
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        fcntl.ioctl(descriptor, _FICLONE, source)
    except OSError:  # another file system, or one without clones
        with contextlib.suppress(OSError):
            os.unlink(target)
        return False
    finally:
        os.close(descriptor)
    return True
