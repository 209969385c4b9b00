"""A head that differs from the one before in its Content-Length alone is not parsed again, and means the same as on a
connection of its own."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.http.responses import NO_HEAD, part_length, same_head
from tests.gateway.harness import Proxy, proxy, request

_PIECES = [b"POST /x HTTP/1.1", b"\r\n", b"\r\n\r\n", b"Content-Length: ", b"content-length: ", b"\r", b" ", b"+", b"5"]
_HEADS = st.lists(st.one_of(st.sampled_from(_PIECES), st.binary(max_size=4)), max_size=12).map(b"".join)
_LENGTHS = [
    b"5",
    b"0",
    b"007",
    b"5 5",
    b"+5",
    b"-1",
    b"5,5",
    b"0x5",
    b"",
    b"\xb2",
    b"1" * 16,
    b"5\r\nContent-Length: 6",
]


@given(first=_HEADS, second=_HEADS, same=st.booleans(), length=st.integers(0, 10**17))
def test_a_recognized_head_has_the_same_parts(first: bytes, second: bytes, same: bool, length: int) -> None:
    """Whatever the bytes are: it is one that would have been split into just these parts."""
    before, after, found = part_length(first[: first.find(b"\r\n\r\n") + 4])
    if found is None:
        before, after = NO_HEAD
    data = before + b"%d" % length + after + second if same else second
    size, end = same_head(data, before, after)
    if end:
        assert end == data.find(b"\r\n\r\n") + 4
        assert part_length(data[:end]) == (before, after, size)
    else:
        assert size == -1
        assert not same or found is None or length >= 10**15


@pytest.mark.parametrize("given_length", _LENGTHS)
async def test_an_odd_length_is_treated_as_on_a_new_connection(folder: Path, kind: str, given_length: bytes) -> None:
    good = request()
    odd = good.replace(b"Content-Length: %d" % len(b'{"model":"m","messages":[]}'), b"Content-Length: " + given_length)
    assert odd != good

    async def status(served: Proxy, *first: bytes) -> int:
        client = await served.connect()
        for each in first:
            assert (await client.ask(each)).status == 200
        return (await client.ask(odd)).status

    async with proxy(folder, kind) as served:
        assert await status(served, good, good) == await status(served)


async def test_bodies_of_other_lengths_are_whole(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        for size in (1, 10, 9, 1000, 99, 100_000, 3):
            asked = request(body={"model": "m", "messages": [], "user": "u" * size})
            assert (await client.ask(asked)).status == 200
            assert served.engine.received[-1].body == asked.partition(b"\r\n\r\n")[2]


async def test_rules_of_access_that_change_count_at_once(folder: Path) -> None:
    async with proxy(folder, "fast", origins=("http://page.test",)) as served:
        client = await served.connect(tcp=True)
        asked = request(Host=served.host(), Origin="http://page.test", Content_Type="application/json")
        assert (await client.ask(asked)).status == 200
        served.pipeline.access.allow((served.host(),), ())
        assert (await client.ask(asked)).status == 403
