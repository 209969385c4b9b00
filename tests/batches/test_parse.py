"""The input file of a batch, whatever is in it."""

import json
from io import BytesIO

from hypothesis import given
from hypothesis import strategies as st

from modelrunner.batches.batch import MOST_LINES, parse

CHAT = "/v1/chat/completions"


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    lines, errors = parse(BytesIO(data), CHAT, "b")
    assert lines or errors


@given(st.lists(st.text(min_size=1, max_size=20), unique=True, min_size=1, max_size=20), st.booleans())
def test_lines_are_kept_as_they_are(names: list[str], empty_lines: bool) -> None:
    bodies = [{"model": "m", "messages": [{"role": "user", "content": name}]} for name in names]
    text = [
        json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body})
        for name, body in zip(names, bodies, strict=True)
    ]
    lines, errors = parse(("\n\n" if empty_lines else "\n").join(text).encode().splitlines(keepends=True), CHAT, "b")
    assert not errors
    assert [line.custom_id for line in lines] == names
    assert [json.loads(line.body) for line in lines] == bodies


def test_too_many_lines() -> None:
    one = '{"custom_id":"%d","method":"POST","url":"/v1/embeddings","body":{"model":"m","input":"x"}}'
    data = "\n".join(one % number for number in range(MOST_LINES + 1)).encode()
    _, errors = parse(BytesIO(data), "/v1/embeddings", "b")
    assert [error.code for error in errors] == ["too_many_lines"]


def test_no_more_is_read_than_is_needed() -> None:
    """A file of empty or surplus lines fits in memory."""
    one = b'{"custom_id":"%d","method":"POST","url":"/v1/embeddings","body":{"model":"m","input":"x"}}'
    file = iter([one % number for number in range(MOST_LINES + 10)])
    parse(file, "/v1/embeddings", "b")
    assert len(list(file)) == 9
