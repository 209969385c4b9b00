"""Batches whose files were damaged while no daemon ran: nothing is lost without a word, and nothing else is touched."""

import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from modelrunner.batches.batch import Batch, BatchState
from modelrunner.batches.batchstore import BatchStore, LineAnswer, open_store
from modelrunner.batches.filestore import FileStore
from modelrunner.errors import StorageFailed

CHAT = "/v1/chat/completions"
LINES = 60  # of each batch
PER_PUSH, ALL = 25, 300  # flips


def body(number: int) -> bytes:
    content = f"what is {number}? " * 20
    request = {"model": f"m{number % 2}", "messages": [{"role": "user", "content": content}]}
    return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": request}).encode()


def answer_all(store: BatchStore, most: int = 10_000) -> None:
    """Answers lines that wait, and ends what has none."""
    for batch in store.unfinished():
        for model in ("m0", "m1"):
            lines = store.waiting(model, {batch.id: 0}, most)
            store.record([LineAnswer(line, 200, b'{"to": "%s"}' % line.custom_id.encode(), "r") for line in lines])
        counted = store.get(batch.id, "")
        if counted.completed + counted.failed == counted.total:
            store.finish(counted)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """Three batches: one is over, one has half of its answers, one has none."""
    state = tmp_path / "template"
    state.mkdir()
    store, files = open_store(state, 1 << 30)

    def add(name: str) -> Batch:
        file = files.write(f"file-{name}", [body(number) + b"\n" for number in range(LINES)], name, "kim")
        return store.create(file.id, CHAT, "24h", 1e6, {}, "kim")

    add("one")
    answer_all(store)
    add("two")
    answer_all(store, LINES // 4)
    add("three")
    return state


def check(state: Path) -> None:
    """All batches are here, and end with an answer to each line."""
    store, files = open_store(state, 1 << 30)
    assert len(files.all("kim")) == 4
    assert len(store.all("kim")) == 3
    for _ in range(3):
        answer_all(store)
    for batch in store.all("kim"):
        assert (batch.status, batch.total, batch.completed, batch.failed) == (BatchState.COMPLETED, LINES, LINES, 0)
        assert batch.output_file is not None
        with files.open(files.get(batch.output_file, "kim")) as output:
            results = [json.loads(line) for line in output]
        assert [one["custom_id"] for one in results] == [f"line-{number}" for number in range(LINES)]
        assert all(one["response"]["body"]["to"] == one["custom_id"] for one in results)


@pytest.mark.parametrize("flips", [PER_PUSH, pytest.param(ALL, marks=pytest.mark.nightly)])
def test_one_flipped_bit_loses_nothing(tmp_path: Path, template: Path, flips: int) -> None:
    chance = random.Random(flips)
    size = (template / "batches.sqlite").stat().st_size
    for number in range(flips):
        shutil.copytree(template, state := tmp_path / str(number))
        with open(state / "batches.sqlite", "r+b") as file:
            file.seek(place := chance.randrange(size))
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
        check(state)
        shutil.rmtree(state)


@pytest.mark.parametrize("place", range(0, 100, 4))
def test_a_flip_in_the_head_loses_no_answer(tmp_path: Path, template: Path, place: int) -> None:
    """SQLite's own head is the first 100 bytes."""
    with open(template / "batches.sqlite", "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x40]))
    store, _ = open_store(template, 1 << 30)
    assert sorted(batch.completed for batch in store.all("")) == [0, LINES // 2, LINES]


def gone(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    os.truncate(path, 0)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [gone, empty, cut, link, fifo, folder])
def test_without_the_database_its_lines_are_asked_again(
    template: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(template / "batches.sqlite")
    check(template)
    assert any("batches.sqlite" in record.message for record in caplog.records if record.levelno == logging.ERROR)


def test_lines_that_are_lost_for_good_are_counted(template: Path) -> None:
    store, files = open_store(template, 1 << 30)
    files.delete("file-two", "kim")
    (template / "batches.sqlite").unlink()
    store, files = open_store(template, 1 << 30)
    for _ in range(3):
        answer_all(store)
        for batch in store.unfinished():
            if not any(store.waiting(model, {batch.id: 0}, 1) for model in ("m0", "m1")):
                store.finish(batch)
    ends = {batch.input_file: batch for batch in store.all("kim")}
    assert [ends[f"file-{name}"].status for name in ("one", "two", "three")] == ["completed", "failed", "completed"]
    [error] = ends["file-two"].errors
    assert (error.code, error.message.partition(" were lost")[0]) == ("lines_lost", f"{LINES} lines")


def test_a_content_without_its_record_is_listed_again(template: Path, caplog: pytest.LogCaptureFixture) -> None:
    (template / "files/file-one.json").write_bytes(b"{}")
    _, files = open_store(template, 1 << 30)
    assert "file-one" in {file.id for file in files.all("")}
    assert "file-one" not in {file.id for file in files.all("kim")}  # nobody knows whose it was
    assert "file-one" in caplog.text


@pytest.mark.parametrize("damage", [empty, cut, link, fifo, folder])
def test_a_content_that_was_replaced_is_an_error(template: Path, damage: Callable[[Path], None]) -> None:
    _, files = open_store(template, 1 << 30)
    damage(template / "files/file-three")
    with pytest.raises(StorageFailed, match="file-three"):
        files.open(files.get("file-three", "kim"))
    check_others(files)


def check_others(files: FileStore) -> None:
    for name in ("file-one", "file-two"):
        with files.open(files.get(name, "kim")) as content:
            assert len(content.readlines()) == LINES
