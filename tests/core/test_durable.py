"""Files that survive: what `write` and `JsonFile` promise."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner import durable
from modelrunner.jsonfile import JsonFile
from tests.store.samples import deep_folder

VALUE = {"a": [1, 2], "b": []}


@pytest.fixture
def file(tmp_path: Path) -> JsonFile[dict[str, list[int]]]:
    return JsonFile(tmp_path / "state" / "value.json", dict[str, list[int]])


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


ODD: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "socket": make_socket,
}


def test_a_value_comes_back(file: JsonFile[dict[str, list[int]]]) -> None:
    assert file.load() is None
    file.save(VALUE)
    assert file.load() == VALUE
    assert [path.name for path in file.path.parent.iterdir()] == ["value.json"]


def test_a_value_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    file = JsonFile(tmp_path / "value.json", str)
    file.save("before")
    with pytest.raises(OSError, match="could not be read back"):
        file.save("x" * (64 << 20))
    assert file.load() == "before"


def test_a_file_has_its_permissions_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed, umask = [], os.umask(0o077)
    rename = os.rename

    def noted(old: Path, new: Path) -> None:
        renamed.append(os.stat(old).st_mode & 0o777)
        rename(old, new)

    monkeypatch.setattr(os, "rename", noted)
    try:
        durable.write(tmp_path / "a", b"x", mode=0o644)
        durable.write(tmp_path / "b", b"x")
    finally:
        os.umask(umask)
    assert renamed == [0o644, 0o600]


def test_every_flipped_bit_is_found(file: JsonFile[dict[str, list[int]]]) -> None:
    file.save(VALUE)
    data = file.path.read_bytes()
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        file.path.write_bytes(damaged)
        assert file.load() is None
        assert not file.path.exists()
    assert len([path for path in file.path.parent.iterdir() if durable.is_set_aside(path)]) == len(data) * 8


@given(
    st.recursive(
        st.integers(-(2**63), 2**63) | st.text() | st.none(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_any_value_comes_back(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    file = JsonFile[object](tmp_path_factory.getbasetemp() / "any.json", object)
    file.save(value)
    assert file.load() == value


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("cache", [False, True])
def test_what_is_no_file_is_set_aside_and_never_followed(tmp_path: Path, odd: str, cache: bool) -> None:
    file = JsonFile(tmp_path / "value.json", dict[str, list[int]], cache=cache)
    ODD[odd](file.path)
    assert file.load() is None
    assert [durable.is_set_aside(path) for path in tmp_path.iterdir()] == [True]
    ODD[odd](file.path)
    file.save(VALUE)
    assert file.load() == VALUE


def test_a_value_of_endless_depth_is_set_aside(tmp_path: Path) -> None:
    file = JsonFile(tmp_path / "value.json", dict[str, list[int]])
    file.path.write_bytes(b'{"sha256": "x", "content": ' + b"[" * 100_000)
    assert file.load() is None
    assert [durable.is_set_aside(path) for path in tmp_path.iterdir()] == [True]


def test_a_folder_of_any_depth_is_removed(tmp_path: Path) -> None:
    with deep_folder(tmp_path / "deep"):
        durable.discard(tmp_path / "deep")
        assert list(tmp_path.iterdir()) == []


def test_a_check_is_part_of_the_type(tmp_path: Path) -> None:
    def check(value: int) -> None:
        if value < 0:
            raise ValueError("it is negative")

    file = JsonFile(tmp_path / "value.json", int, check=check)
    file.save(-1)
    assert file.load() is None


def test_a_cache_on_a_disk_that_fails_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").touch()
    file = JsonFile(tmp_path / "state" / "value.json", int, cache=True)
    assert file.load() is None
    file.save(1)
    assert "cannot be written" in caplog.text
    with pytest.raises(OSError, match="exists"):
        JsonFile(file.path, int).save(1)


@pytest.mark.parametrize("before", [None, b"before"])
@pytest.mark.parametrize("failing", range(1, 4))
def test_an_error_means_that_nothing_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes | None, failing: int
) -> None:
    """Whichever sync fails, and all that follow."""
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    calls = 0
    real = os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= failing:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if failing > 2:
        durable.write(path, b"after")
        assert path.read_bytes() == b"after"
        return
    with pytest.raises(OSError, match="Input/output"):
        durable.write(path, b"after")
    assert (path.read_bytes() if path.exists() else None) == before
    assert [found for found in tmp_path.iterdir() if found != path] == []


def test_a_folder_in_the_place_of_a_folder_is_no_link(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "folder"
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    assert durable.make_folder(folder)
    assert not folder.is_symlink()
    assert not durable.make_folder(folder)
