"""Where a key stands in a TOML file."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.config.tomlplaces import place

TEXT = """\
# keep_alive = "no"
keep_alive = "5m"
origins = [
  "max_wait",
  "b",  # a ] in a comment
]
hosts = '''
max_wait = 3
'''
[models."ai/smol"]  # a table
  context-size = 1
speculative = { draft_model = "num_tokens", num_token = 0 }
a."b.c".d = 3

[backends."llama.cpp"]
threads = 0
[[rows]]
y = 1
"""


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("keep_alive", (2, 1)),
        ("origins/1", (3, 1)),
        ("hosts", (7, 1)),
        ("max_wait", None),
        ("models/ai\\smol/context-size", (11, 3)),
        ("models/ai\\smol/speculative/num_token", (12, 45)),
        ("models/ai\\smol/speculative/missing", (12, 1)),
        ("models/ai\\smol/missing", (10, 10)),
        ("models/ai\\smol/a/b.c/d", (13, 9)),
        ("models/other", (10, 2)),
        ("backends/llama.cpp/threads", (16, 1)),
        ("rows/y", (18, 1)),
    ],
)
def test_a_key_or_the_table_that_it_is_missing_from(key: str, expected: tuple[int, int] | None) -> None:
    assert place(TEXT, [part.replace("\\", "/") for part in key.split("/")]) == expected


_names = st.text("abc-", min_size=1, max_size=6)


@given(st.lists(_names, min_size=1, max_size=6, unique=True), st.data())
def test_every_key_of_a_file_is_found_on_its_line(names: list[str], data: Any) -> None:
    values = ["1", '"x"', "[\n1,\n2]", '"""\nabc\n"""', "true"]
    lines = [f"{name} = {data.draw(st.sampled_from(values))}" for name in names]
    text = "\n".join(lines)
    assert set(tomllib.loads(text)) == set(names)
    line = 1
    for name, written in zip(names, lines, strict=True):
        assert place(text, [name]) == (line, 1)
        line += written.count("\n") + 1


def test_a_long_list_does_not_hide_a_key_behind_it() -> None:
    """In time proportional to the text: 100,000 lines took hours when each was parsed with all before it."""
    text = 'origins = [\n  ["x = 1"], # ]\n' + '  "https://a.example",\n' * 100_000 + "]\nmax_queue = 0\n"
    assert place(text, ["max_queue"]) == (100_004, 1)
