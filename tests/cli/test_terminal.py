"""Answers on a terminal: whole words, and no end that never comes."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.utils import get_cwidth

from modelrunner.cli.terminal import Wrapper, repeats

WORDS = st.lists(st.text("abcdefgh,.-", min_size=1, max_size=9), min_size=1, max_size=40)


def screen(written: str) -> list[str]:
    """The lines of a terminal that obeys `ESC [ n D` and `ESC [ K`."""
    lines, at = [""], 0
    for token in re.findall(r"\x1b\[(\d+)D|(\x1b\[K)|(\n)|(.)", written):
        back, erase, newline, character = token
        if back:
            at = max(0, at - int(back))
        elif erase:
            lines[-1] = lines[-1][:at]
        elif newline:
            lines.append("")
            at = 0
        else:
            lines[-1] = lines[-1][:at] + character + lines[-1][at + 1 :]
            at += 1
    return lines


def wrapped(pieces: list[str], columns: int) -> list[str]:
    wrapper = Wrapper(lambda: columns)
    return screen("".join(wrapper.feed(piece) for piece in pieces))


@given(WORDS, st.integers(12, 60), st.integers(1, 7))
def test_no_word_is_broken_and_no_line_too_long_however_the_text_is_cut(
    words: list[str], columns: int, size: int
) -> None:
    text = " ".join(words)
    lines = wrapped([text[i : i + size] for i in range(0, len(text), size)], columns)
    assert [word for line in lines for word in line.split()] == words
    assert all(len(line) < columns for line in lines)


@given(st.text("日本語", min_size=1, max_size=60))
def test_wide_characters_break_anywhere(text: str) -> None:
    lines = wrapped([text], 21)
    assert "".join(lines) == text
    assert all(get_cwidth(line) <= 20 for line in lines)


def test_a_word_longer_than_a_line_is_left_to_the_terminal() -> None:
    assert "".join(wrapped(["x" * 50], 20)) == "x" * 50


def test_every_character_is_written_when_it_comes() -> None:
    wrapper = Wrapper(lambda: 80)
    assert wrapper.feed("half an") == "half an"


def test_code_keeps_its_lines() -> None:
    code = "```python\nprint('a very long line of code that is wider than the terminal')\n```\n"
    assert "\n".join(wrapped([code], 20)) == code


PASSAGE = "".join(f"It has a reason, number {n}. " for n in range(10))


@pytest.mark.parametrize("passage", ["a", "Yes. ", "The capital of France is Paris.\n", "0123456789" * 6, PASSAGE])
def test_an_answer_that_says_the_same_again_and_again_repeats(passage: str) -> None:
    assert repeats("It begins well. " + passage * 700)


def test_ordinary_answers_do_not_repeat() -> None:
    table = "".join(f"| {number} | {number * number} |\n" for number in range(200))
    assert not repeats(table)
    assert not repeats("short " * 20)
    assert not repeats(PASSAGE * 5)
    assert not repeats("")
