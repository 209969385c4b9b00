"""A request's body while it arrives, however it is cut: by length and in chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.errors import BadRequest
from modelrunner.http.requests import RequestBody

REST = b"POST /next HTTP/1.1\r\n"
PIECES = st.lists(st.binary(min_size=1, max_size=40), max_size=6)


def read(body: RequestBody, data: bytes, cuts: list[int]) -> tuple[bytes, bytes]:
    """The body and what follows it, of data that comes in pieces."""
    found, rest, at = b"", b"", 0
    for cut in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        if body.done:
            rest += data[at:cut]
        else:
            piece, rest = body.take(data[at:cut])
            found += piece
        at = cut
    return found, rest


@given(PIECES, st.lists(st.integers(0, 400)), st.sampled_from([b"", b";a=b"]), st.booleans())
def test_chunks_are_joined(pieces: list[bytes], cuts: list[int], extension: bytes, trailer: bool) -> None:
    data = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    data += b"0\r\n" + (b"X: y\r\n" if trailer else b"") + b"\r\n"
    body = RequestBody(None)
    assert read(body, data + REST, cuts) == (b"".join(pieces), REST)
    assert (body.done, body.size) == (True, sum(map(len, pieces)))


@given(st.binary(max_size=200), st.lists(st.integers(0, 300)))
def test_a_length_is_kept(data: bytes, cuts: list[int]) -> None:
    body = RequestBody(len(data))
    if data:
        assert read(body, data + REST, cuts) == (data, REST)
    assert (body.done, body.size) == (True, len(data))


@pytest.mark.parametrize(
    "data",
    [b"g\r\n", b"\r\n", b"-1\r\n", b"1\r\nxy", b"1\r\nx\n", b"1\n", b"0\r\nno field\r\n\r\n", b"1;\0\r\n",
     b"1" * 16 + b"\r\n", b"1;" + b"x" * 5000, b"0\r\n" + b"X: y\r\n" * 5000, b"0\r\n folded: x\r\n\r\n"],
)  # fmt: skip
@pytest.mark.parametrize("step", [1, 10_000_000])
def test_what_is_not_in_chunks_is_refused(data: bytes, step: int) -> None:
    with pytest.raises(BadRequest):
        read(RequestBody(None), data + b"x" * 5000, list(range(0, len(data) + 5000, step)))
