import io
import sys
import unicodedata
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.cli import output
from modelrunner.cli.progressdisplay import amount, follow
from modelrunner.cli.times import relative
from modelrunner.errors import ModelRunnerError
from modelrunner.wire import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@given(st.text())
def test_nothing_that_a_terminal_acts_upon_is_left(text: str) -> None:
    left = [c for c in output.clean(text) if unicodedata.category(c) == "Cc" and c not in "\n\t"]
    assert left == []


@given(st.text(st.characters(exclude_categories=["Cc", "Cf"])))
def test_ordinary_text_is_not_touched(text: str) -> None:
    assert output.clean(text) == text


def test_what_is_shown_for_them() -> None:
    assert output.clean("a\x1b[31mb\x07\x9b\r\n\t\u202ec") == "a\\x1b[31mb\\x07\\x9b\n\t\\u202ec"


def test_only_a_terminal_is_protected() -> None:
    assert output.shown("\x1b[0m", Terminal()) == "\\x1b[0m"
    assert output.shown("\x1b[0m", io.StringIO()) == "\x1b[0m"


def test_what_is_laid_out_for_people_is_safe_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe may end at a terminal, as that of `head` does."""
    evil = "\x1b]0;owned\x07"
    output.table(("NAME",), [(evil,)])
    output.fields([(evil, evil)])
    output.heading(evil)
    output.note(evil)
    output.report(evil)
    out, err = capsys.readouterr()
    assert (out.count("\\x1b]0;owned\\x07"), err.count("\\x1b]0;owned\\x07")) == (4, 2)
    assert "\x1b" not in out + err


def test_styles_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert output.styled("x", output.RED, Terminal()) == "\x1b[31mx\x1b[0m"
    assert output.styled("x", output.RED, io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.styled("x", output.RED, Terminal()) == "x"


def test_a_table_has_columns_and_one_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("NAME", "SIZE"), [("a", "1"), ("long\nname", "22")])
    assert capsys.readouterr().out == "NAME       SIZE\na          1\nlong name  22\n"
    output.table(("NAME", "SIZE"), [])
    assert capsys.readouterr().out == "NAME  SIZE\n"


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.report("it failed\nbadly: do this", retry_after=2)
    assert capsys.readouterr().err == "error: it failed badly: do this; try again in 2 s\n"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (Progress("progress", "", total=92 << 20, current=12 << 20, rate=4 << 20), "12MiB of 92MiB, 4MiB/s, 20s left"),
        (Progress("progress", "", total=92 << 20, current=92 << 20, rate=4 << 20), "92MiB of 92MiB, 4MiB/s"),
        (Progress("progress", "", total=92 << 20), "0B of 92MiB"),
        (Progress("progress", "", total=7, current=3), "step 3 of 7"),
        (Progress("progress", "", current=2048), "2KiB"),
        (Progress("progress", ""), ""),
    ],
)
def test_amounts(line: Progress, text: str) -> None:
    assert amount(line) == text


def test_progress_into_a_pipe_is_a_line_for_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    many = [Progress("progress", "Downloading x", total=5000, current=n, phase="downloading") for n in range(1000)]
    last = Progress("success", "x is here")
    assert (
        follow([Progress("progress", "Looking up x"), *many, Progress("warning", "slow"), last], "the pull of x")
        == last
    )
    assert capsys.readouterr().err == ("Looking up x\nDownloading x: 0B of 4.88KiB\nwarning: slow\nx is here\n")


def test_progress_on_a_terminal_is_a_bar_and_escapes_names(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    lines = [Progress("success", "Downloading [b]x\x1b]0;title\x07", total=92 << 20, current=46 << 20, rate=1 << 20)]
    follow(lines, "the pull of x")
    assert "Downloading [b]x\\x1b]0;title\\x07" in terminal.getvalue()
    assert "46MiB of 92MiB, 1MiB/s, 46s left" in terminal.getvalue()
    assert "\x1b]0;title" not in terminal.getvalue()


def test_the_bar_says_what_is_done_before_the_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes of an uninstallation until it is over."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")

    def lines() -> Iterator[Progress]:
        seen.append(screen.getvalue())
        yield Progress("success", "done")

    seen: list[str] = []
    follow(lines(), "the uninstall of vllm", "uninstall vllm")
    assert "uninstall vllm" in seen[0]


def test_an_error_in_the_middle_of_progress_is_raised() -> None:
    def broken() -> Iterator[Progress]:
        yield Progress("progress", "x")
        raise ModelRunnerError("no")

    with pytest.raises(ModelRunnerError, match="no"):
        follow(broken(), "the pull of x")


@pytest.mark.parametrize("lines", [[], [Progress("progress", "Downloading x")]])
def test_progress_without_a_result_is_an_error(lines: list[Progress]) -> None:
    with pytest.raises(ModelRunnerError, match="the pull of x ended without a result"):
        follow(lines, "the pull of x")


def test_times_as_people_say_them() -> None:
    now = datetime(2025, 1, 1, tzinfo=UTC)
    said = {
        timedelta(0): "now",
        timedelta(seconds=-1): "1 second ago",
        timedelta(minutes=4, seconds=50): "in 5 minutes",
        timedelta(hours=-3): "3 hours ago",
        timedelta(days=400): "in 400 days",
    }
    assert {delta: relative(now + delta, now) for delta in said} == said


ROWS = [("docker.io/ai/a-rather-long-name:latest", "completion", "ready", "1.5GiB", "0123456789ab")] * 2
HEADINGS = ("MODEL NAME", "MODE", "STATE", "SIZE", "ID")


def table_on(columns: int, monkeypatch: pytest.MonkeyPatch, stdout: io.StringIO) -> list[str]:
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    output.table(HEADINGS, ROWS, expendable=("ID", "MODE"))
    return stdout.getvalue().splitlines()


@pytest.mark.parametrize("columns", [30, 40, 60, 80, 200])
def test_a_table_fits_its_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    lines = table_on(columns, monkeypatch, Terminal())
    assert len(lines) == 3
    assert max(map(len, lines)) <= columns
    assert ("ID" in lines[0]) == (columns >= 80)
    assert "ready" in lines[1]


def test_a_pipe_gets_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = table_on(30, monkeypatch, io.StringIO())
    assert lines[1].split() == list(ROWS[0])


def test_no_colour_leaves_the_cursor_alone_but_not_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert output.moves_cursor(Terminal())
    assert not output.has_styles(Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert not output.moves_cursor(Terminal())


@pytest.mark.parametrize(
    ("stream", "tell"),
    [
        ("stdout", lambda: output.say("a model")),
        ("stderr", lambda: output.note("done")),
        ("stderr", lambda: output.report("there is no b", retry_after=2.0)),
    ],
)
def test_a_line_is_one_write_which_no_other_thread_tears(
    monkeypatch: pytest.MonkeyPatch, stream: str, tell: Callable[[], None]
) -> None:
    class Writes(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    written: list[str] = []
    monkeypatch.setattr(sys, stream, Writes())
    tell()
    [line] = filter(None, written)
    assert line.endswith("\n")
