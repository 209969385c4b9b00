"""Folders that cannot be written and a disk that is full: the path, what is needed, what is free, and what to do."""

import errno
import os
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest

from modelrunner import durable
from modelrunner.errors import InsufficientDisk, StorageFailed
from tests.api.conftest import StartDaemon


@pytest.mark.parametrize(
    ("number", "status", "code", "words"),
    [
        (errno.EACCES, 500, "storage_failed", "make {place} writable for user"),
        (errno.ENOSPC, 507, "insufficient_disk", "are needed and .* free in {cache}: make room"),
    ],
)
@pytest.mark.parametrize("action", ["install", "uninstall"])
async def test_what_the_disk_refuses_a_backend_is_said(
    start_daemon: StartDaemon,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
    number: int,
    status: int,
    code: str,
    words: str,
) -> None:
    daemon = await start_daemon()
    cache = daemon.backend.context.cache
    place = cache / "engine"

    async def fail(*args: Any, **options: Any) -> NoReturn:
        raise OSError(number, os.strerror(number), str(place))

    monkeypatch.setattr(daemon.backend, action, fail)
    async with daemon.unix.post(f"/engines/{action}-backend", json={"backend": "fake"}) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (status, code)
    assert f"the {action} of fake failed" in error["message"]
    assert re.search(words.format(place=place, cache=cache), error["message"])


@pytest.mark.parametrize(
    ("number", "status", "words"), [(errno.ENOSPC, 507, "make room"), (errno.EROFS, 500, "Read-only file system")]
)
async def test_a_configuration_that_cannot_be_kept_says_why(
    start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch, number: int, status: int, words: str
) -> None:
    daemon = await start_daemon(models={"smol": 0})

    def fail(path: Path, data: bytes, **options: Any) -> NoReturn:
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
    place, words = tmp_path / "not" / "there", f"are needed and .* free in {tmp_path}"
    with pytest.raises(InsufficientDisk, match=words), durable.translated("x", place):
        raise OSError(errno.ENOSPC, "No space left on device")
