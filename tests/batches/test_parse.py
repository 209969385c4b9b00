"""The input file of a batch, whatever is in it."""

import json
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.batches.batch import LONGEST_LINE, MOST_LINES, InputErrors, Line, LineError, parse

CHAT = "/v1/chat/completions"


def parsed(data: bytes, endpoint: str) -> tuple[list[Line], list[LineError]]:
    lines: list[Line] = []
    try:
        lines += parse(BytesIO(data), endpoint, "b")
    except InputErrors as found:
        return lines, list(found.errors)
    return lines, []


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    lines, errors = parsed(data, CHAT)
    assert lines or errors


@given(st.lists(st.text(min_size=1, max_size=20), unique=True, min_size=1, max_size=20), st.booleans())
def test_lines_are_kept_as_they_are(names: list[str], empty_lines: bool) -> None:
    bodies = [{"model": "m", "messages": [{"role": "user", "content": name}]} for name in names]
    text = [
        json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body})
        for name, body in zip(names, bodies, strict=True)
    ]
    lines, errors = parsed(("\n\n" if empty_lines else "\n").join(text).encode(), CHAT)
    assert not errors
    assert [line.custom_id for line in lines] == names
    assert [json.loads(line.body) for line in lines] == bodies


def test_too_many_lines() -> None:
    one = '{"custom_id":"%d","method":"POST","url":"/v1/embeddings","body":{"model":"m","input":"x"}}'
    data = "\n".join(one % number for number in range(MOST_LINES + 1)).encode()
    _, errors = parsed(data, "/v1/embeddings")
    assert [error.code for error in errors] == ["too_many_lines"]


def test_no_more_is_read_than_is_needed() -> None:
    """A file of one endless line, or of surplus lines, fits in memory."""
    one = b'{"custom_id":"%d","method":"POST","url":"/v1/embeddings","body":{"model":"m","input":"x"}}\n'
    surplus = BytesIO(b"".join(one % number for number in range(MOST_LINES + 10)))
    endless = BytesIO(b'{"custom_id":"' + b"x" * (2 * LONGEST_LINE))
    for file, code in ((surplus, "too_many_lines"), (endless, "invalid_line")):
        with pytest.raises(InputErrors) as found:
            list(parse(file, "/v1/embeddings", "b"))
        assert [error.code for error in found.value.errors] == [code]
        assert file.tell() < len(file.getvalue())
