"""The log of an engine as values: however it is cut, the lines are the same; the files stay within their limit."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.processes.log import EngineLog
from tests.fakes import FakeClock

NOWHERE = Path("/dev/null")


def lines_of(chunks: list[bytes]) -> list[str]:
    lines: list[str] = []
    log = EngineLog(NOWHERE, 1 << 20, lines.append)
    for chunk in chunks:
        log.feed(chunk)
    log.close()
    return lines


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=8))
def test_portions_make_no_difference(data, cuts):
    places = [0, *sorted(cuts), len(data)]
    portions = [data[a:b] for a, b in pairwise(places)]
    assert lines_of(portions) == lines_of([data])


def test_progress_bars_and_long_lines():
    assert lines_of([b"10%\r20%\r\ndone\n\nx"]) == ["10%", "20%", "done", "x"]
    assert lines_of([b"a" * 5000, b"b" * 5000, b"\nnext\n"]) == ["a" * 4096, "next"]


@given(st.lists(st.binary(min_size=1, max_size=100), min_size=1, max_size=30), st.integers(200, 1000))
def test_files_hold_the_end_within_the_limit(tmp_path_factory, chunks, limit):
    folder = tmp_path_factory.mktemp("log")
    log = EngineLog(folder / "e.log", limit, None)
    for chunk in chunks:
        log.feed(chunk)
        assert sum(file.stat().st_size for file in folder.iterdir()) <= limit
    log.close()
    written = b"".join(file.read_bytes() for file in sorted(folder.iterdir(), reverse=True))
    everything = b"".join(chunks)
    assert everything.endswith(written)
    assert len(written) >= min(len(everything), limit // 2 - 100)


def test_a_portion_larger_than_the_files_leaves_its_end(tmp_path):
    log = EngineLog(tmp_path / "e.log", 100, None)
    log.feed(bytes(range(200)))
    log.close()
    assert (tmp_path / "e.log").read_bytes() == bytes(range(150, 200))


def test_a_fifo_in_its_place_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "e.log")
    log = EngineLog(tmp_path / "e.log", 1 << 20, None)
    log.feed(b"words")
    assert log.tail() == "words"
    log.close()


def test_last_words_are_the_last_16_kib(tmp_path):
    log = EngineLog(tmp_path / "e.log", 1 << 20, None)
    for number in range(10_000):
        log.feed(b"%06d\n" % number)
    log.close()
    assert len(log.tail()) == 16 << 10
    assert log.tail().endswith("009999\n")


def test_a_symbolic_link_is_not_followed(tmp_path, caplog):
    (tmp_path / "e.log").symlink_to(tmp_path / "precious")
    log = EngineLog(tmp_path / "e.log", 1 << 20, None)
    log.feed(b"hello\n")
    log.close()
    assert not (tmp_path / "precious").exists()
    assert "not written for now" in caplog.text


def test_a_full_disk_costs_the_file_alone(caplog):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    lines: list[str] = []
    log = EngineLog(Path("/dev/full"), 1 << 20, lines.append)
    log.feed(b"one\ntwo\n")
    log.close()
    assert (lines, log.tail()) == (["one", "two"], "one\ntwo\n")
    assert caplog.text.count("not written for now") == 1


def test_a_log_that_could_not_be_written_is_tried_again(tmp_path, caplog):
    """A file in place of its folder stands for a disk that is full for a while."""
    clock = FakeClock()
    folder = tmp_path / "logs"
    folder.touch()
    log = EngineLog(folder / "e.log", 1 << 20, None, clock)
    log.feed(b"lost\n")
    folder.unlink()
    log.feed(b"lost too\n")
    clock.advance(10)
    log.feed(b"kept\n")
    log.feed(b"and this\n")
    log.close()
    assert (folder / "e.log").read_bytes() == b"kept\nand this\n"
    assert log.tail() == "lost\nlost too\nkept\nand this\n"
    assert caplog.text.count("is not written for now") == 1
