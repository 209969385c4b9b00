"""Disks that fail, and a look at who asks them."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# What pathlib, shutil and `os.path` come down to, where a path is given.
_CALLS = (
    "stat",
    "lstat",
    "statvfs",
    "mkdir",
    "open",
    "scandir",
    "listdir",
    "unlink",
    "rename",
    "link",
    "rmdir",
    "utime",
    "chmod",
)


def before_each(patch: pytest.MonkeyPatch, folders: tuple[Path, ...], act: Callable[[str, Path], None]) -> None:
    """Calls `act` with the name and the path before each call of the system for something in one of the folders."""

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **named: Any) -> Any:
            given = Path(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else None
            if given is not None and any(given.is_relative_to(folder) for folder in folders):
                act(name, given)
            return real(path, *args, **named)

        return call

    for name in _CALLS:
        patch.setattr(os, name, wrapped(name, getattr(os, name)))


def die(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """From now on the disk of the folder gives an error for everything."""

    def fail(name: str, path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    before_each(patch, (folder,), fail)


def asked_on_this_thread(patch: pytest.MonkeyPatch, *folders: Path) -> list[str]:
    """Grows by each call for something in the folders that the thread of the caller makes."""
    asked: list[str] = []
    thread = threading.current_thread()

    def note(name: str, path: Path) -> None:
        if threading.current_thread() is thread:
            asked.append(f"{name} {path}")

    before_each(patch, folders, note)
    return asked


def fill(patch: pytest.MonkeyPatch, full: set[Path]) -> None:
    """Nothing is free in the folders of the set, which may change later on."""
    real = shutil.disk_usage

    def disk_usage(path: Any) -> Any:
        found = real(path)
        return found._replace(free=0) if any(Path(path).is_relative_to(folder) for folder in full) else found

    patch.setattr(shutil, "disk_usage", disk_usage)
