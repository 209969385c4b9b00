"""Folders that cannot be written and a disk that is full: the path, what is needed, what is free, and what to do. A
file stands for a folder that cannot be written, which root always can."""

import errno
import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from modelrunner import durable
from modelrunner.errors import InsufficientDisk, StorageFailed
from tests.fakes import FakeBackend
from tests.server.conftest import Daemon, StartDaemon


async def install(daemon: Daemon) -> tuple[int, dict[str, Any]]:
    async with daemon.unix.post("/engines/install-backend", json={"backend": "fake"}) as answer:
        return answer.status, (await answer.json())["error"]


def use(daemon: Daemon, folder: Path) -> None:
    """Another cache for the backend."""
    object.__setattr__(daemon.backend.context, "cache", folder)


async def test_a_cache_that_cannot_be_written_is_named_before_the_download(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = await start_daemon()
    (tmp_path / "file").touch()
    use(daemon, tmp_path / "file" / "cache")
    status, error = await install(daemon)
    assert (status, error["code"]) == (500, "storage_failed")
    assert str(tmp_path / "file") in error["message"]


async def test_an_engine_that_does_not_fit_says_what_is_needed_and_free(
    start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBackend, "install_room", 1 << 60)
    status, error = await install(await start_daemon())
    assert (status, error["code"]) == (507, "insufficient_disk")
    assert "are needed and" in error["message"]
    assert f"free in {tmp_path}" in error["message"]


@pytest.mark.parametrize(
    ("number", "status", "words"), [(errno.ENOSPC, 507, "make room"), (errno.EROFS, 500, "Read-only file system")]
)
async def test_a_configuration_that_cannot_be_kept_says_why(
    start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch, number: int, status: int, words: str
) -> None:
    daemon = await start_daemon(models={"smol": 0})

    def fail(path: Path, data: bytes) -> NoReturn:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(durable, "write", fail)
    async with daemon.unix.post("/engines/_configure", json={"model": "smol", "context-size": 256}) as answer:
        assert answer.status == status
        message = (await answer.json())["error"]["message"]
    assert words in message
    assert str(daemon.settings.data_dir) in message


def test_what_a_disk_says_is_told_with_the_path_and_the_remedy(tmp_path: Path) -> None:
    words = f"^x failed: Permission denied .*{tmp_path}/f.*: make .* writable"
    with pytest.raises(StorageFailed, match=words), durable.translated("x", tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "f"))
    with pytest.raises(InsufficientDisk, match=f"are needed and .* free in {tmp_path}"):
        durable.require_room("x", tmp_path / "not" / "there", 1 << 60)
