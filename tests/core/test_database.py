"""What the daemon keeps in SQLite, after damage."""

import logging
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from modelrunner.database import Database

SCHEMA = "create table things (name text primary key, size real, data blob);"
ROWS = 400


def filled(path: Path) -> dict[str, bytes]:
    rows = {f"name-{number}": random.Random(number).randbytes(300) for number in range(ROWS)}
    with Database(path, SCHEMA).transaction() as database:
        database.executemany("insert into things (name, size, data) values (?, 0.5, ?)", rows.items())
    return rows


def content(path: Path) -> dict[str, bytes]:
    with Database(path, SCHEMA).transaction() as database:
        return dict(database.execute("select name, data from things where size = 0.5"))


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def test_a_new_file_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path / "a.sqlite")
    assert len(content(tmp_path / "a.sqlite")) == ROWS
    assert errors(caplog) == []
    assert (tmp_path / "a.sqlite").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, 0)])
def test_a_file_that_is_gone_or_empty_is_said(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    filled(path := tmp_path / "a.sqlite")
    damage(path)
    assert content(path) == {}
    [error] = errors(caplog)
    assert "a.sqlite" in error
    assert content(path) == {}
    assert len(errors(caplog)) == 1


def test_a_file_that_goes_while_it_is_in_use_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(path := tmp_path / "a.sqlite")
    database = Database(path, SCHEMA)
    for damage in (os.unlink, lambda path: os.truncate(path, 0)):
        with database.transaction() as connection:
            connection.execute("select * from things")
        damage(path)
        with database.transaction() as connection:
            assert connection.execute("select * from things").fetchall() == []
    assert len(errors(caplog)) == 2


@pytest.mark.parametrize("flips", [40, pytest.param(1000, marks=pytest.mark.nightly)])
def test_a_flipped_bit_costs_at_most_two_pages_and_is_said(
    tmp_path: Path, flips: int, caplog: pytest.LogCaptureFixture
) -> None:
    rows = filled(template := tmp_path / "a.sqlite")
    chance = random.Random(flips)
    for number in range(flips):
        shutil.copy(template, path := tmp_path / f"{number}.sqlite")
        place, bit = chance.randrange(template.stat().st_size), chance.randrange(8)
        data = bytearray(path.read_bytes())
        data[place] ^= 1 << bit
        path.write_bytes(data)
        caplog.clear()
        found = content(path)
        assert found.items() <= rows.items(), (place, bit)  # none is another one
        assert len(found) >= ROWS - 26, (
            place,
            bit,
        )  # of 13 rows each: one that pointed to a page costs its neighbour, too
        assert len(found) == ROWS or errors(caplog), (place, bit)


def test_a_write_that_fails_keeps_nothing(tmp_path: Path) -> None:
    filled(path := tmp_path / "a.sqlite")
    with pytest.raises(sqlite3.IntegrityError), Database(path, SCHEMA).transaction() as database:
        database.executemany("insert into things (name, size) values (?, 0.5)", [("new",), ("name-2",)])
    assert len(content(path)) == ROWS


def test_a_file_of_another_release_is_left_as_it_is_under_another_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.sqlite"
    with Database(path, SCHEMA.replace("size real", "size real, more text")).transaction() as database:
        database.execute("insert into things (name, more) values ('a', 'b')")
    before = path.read_bytes()
    assert content(path) == {}
    [error] = errors(caplog)
    aside = path.with_name(error.split()[-1])
    assert "of another release" in error
    assert aside.read_bytes() == before


def test_the_rows_of_a_release_come_back_with_it(tmp_path: Path) -> None:
    path, newer = tmp_path / "a.sqlite", SCHEMA.replace("size real", "size real, more text")
    for schema, name in ((newer, "new"), (SCHEMA, "old"), (newer, "newer"), (SCHEMA, "older")):
        with Database(path, schema).transaction() as database:
            database.execute("insert into things (name, size) values (?, 0.5)", (name,))
    assert set(content(path)) == {"old", "older"}
    with Database(path, newer).transaction() as database:
        assert [*database.execute("select name from things order by name")] == [("new",), ("newer",)]


KILLED = """
import os, sys
from modelrunner.database import Database
held = Database(Path(sys.argv[1]), SCHEMA)
with held.transaction() as reader:
    reader.execute("select * from things").fetchone()
    for number in range(40):
        with Database(Path(sys.argv[1]), SCHEMA).transaction() as connection:
            connection.execute("insert into things (name, size, data) values (?, 0.5, ?)", (str(number), b"x" * 3000))
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("flips", [25, pytest.param(300, marks=pytest.mark.nightly)])
def test_a_flipped_bit_in_the_changes_of_a_killed_daemon_is_said(
    tmp_path: Path, flips: int, caplog: pytest.LogCaptureFixture
) -> None:
    script = f"from pathlib import Path\nSCHEMA = {SCHEMA!r}\n{KILLED}"
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path / "a.sqlite")], check=False).returncode == -9
    template = tmp_path / "a.sqlite-wal"
    chance = random.Random(flips)
    for number in range(flips):
        path = tmp_path / f"{number}.sqlite"
        shutil.copy(tmp_path / "a.sqlite", path)
        wal = bytearray(template.read_bytes())
        if number:
            wal[place := chance.randrange(len(wal))] ^= 1 << chance.randrange(8)
        Path(f"{path}-wal").write_bytes(wal)
        caplog.clear()
        found = content(path)
        assert len(found) == 40 or (number and errors(caplog)), place
        assert number or not errors(caplog)
