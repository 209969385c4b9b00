"""The logs on this machine: the daemon's own, and those of engines, of which the newest are kept."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

from modelrunner.errors import ModelNotFound

LOG_BYTES = 8 << 20  # per file; one older file is kept
ENGINE_LOGS_KEPT = 64
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def daemon_log(logs: Path) -> Path:
    return logs / "daemon.log"


@contextmanager
def logging_to(logs: Path, level: str) -> Iterator[None]:
    """Logs everything to `logs`/daemon.log, and to stderr unless that is the same file, as it is when a command started
    the daemon."""
    logs.mkdir(parents=True, exist_ok=True)
    path = daemon_log(logs)
    handlers: list[logging.Handler] = [RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")]
    if sys.stderr is not None and not _is_same_file(sys.stderr, path):
        handlers.append(logging.StreamHandler())
    root, before, raises = logging.getLogger(), logging.getLogger().level, logging.raiseExceptions
    set_level(level)
    for client in ("httpx", "httpx2"):  # they log each request's URL, which may hold a key
        logging.getLogger(client).setLevel(logging.WARNING)
    logging.raiseExceptions = False  # a full disk or a closed terminal costs log lines, not the daemon
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT))
        root.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(before)
        logging.raiseExceptions = raises


def set_level(level: str) -> None:
    """Sets the level of all loggers without a level of their own."""
    logging.getLogger().setLevel(level.upper())


def engine_log(logs: Path, model_id: str) -> Path:
    """Returns the newest log of the engines that ran with the model: each revision of its configuration writes its own.
    Raises `ModelNotFound` for a model with which no engine has run."""
    digits = model_id.rpartition(":")[2][:16]
    newest = max(logs.glob(f"engine-*-{digits}-*.log"), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise ModelNotFound("no engine has run with this model, so there is no log", param="model")
    return newest


def prune_engine_logs(logs: Path) -> None:
    """Keeps the newest `ENGINE_LOGS_KEPT` logs: every revision of a model's configuration has one of its own."""
    files = sorted(logs.glob("engine-*.log*"), key=lambda path: path.lstat().st_mtime, reverse=True)
    for old in files[2 * ENGINE_LOGS_KEPT :]:  # each log may have a predecessor
        with suppress(OSError):
            old.unlink()


def _is_same_file(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (OSError, ValueError):  # no such path; a stream without a descriptor
        return False
