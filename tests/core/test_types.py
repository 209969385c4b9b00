"""The small values: what is parsed is what is printed."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from modelrunner.backend import BackendState, BackendStatus
from modelrunner.errors import BadRequest
from modelrunner.types import Endpoint, KeepAlive, RequiredMemory
from modelrunner.units import format_bytes, format_duration, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds", "printed"),
    [
        ("5m", 300, "5m"),
        ("1h30m", 5400, "1h30m"),
        ("90m", 5400, "1h30m"),
        ("1.5s", 1.5, "1.5s"),
        ("250ms", 0.25, "250ms"),
        ("0", 0, "0"),
        ("0s", 0, "0"),
        ("-1", math.inf, "-1"),
        ("-1m", math.inf, "-1"),
        (300, 300, "5m"),
        (0, 0, "0"),
        (-1, math.inf, "-1"),
        (2.5, 2.5, "2.5s"),
    ],
)
def test_keep_alive_reads_go_durations_and_json_numbers(text: str | float, seconds: float, printed: str) -> None:
    keep_alive = KeepAlive.parse(text)
    assert keep_alive.seconds == seconds
    assert str(keep_alive) == printed
    assert KeepAlive.parse(printed) == keep_alive


@pytest.mark.parametrize("text", ["", "abc", "5", "5 m", "m", "1h-30m", "٣s", True, None, [], float("nan")])
def test_keep_alive_refuses_everything_else(text: object) -> None:
    with pytest.raises(BadRequest):
        KeepAlive.parse(text)  # type: ignore[arg-type]


@given(st.integers(min_value=0, max_value=10**9))
def test_a_duration_printed_in_milliseconds_reads_back(milliseconds: int) -> None:
    assert parse_duration(format_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000, abs=6e-4)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 << 30),
        ("8G", 8 << 30),
        ("1.5g", 3 << 29),
        ("512m", 512 << 20),
        ("12", 12),
        (7, 7),
        ("0", 0),
        ("1 KB", 1024),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "-1", "8X", "GiB", "1e99G", "99999999999999999T", -1])
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(BadRequest):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=2**62))
@example(round(999.7 * 2**30))
def test_a_printed_size_is_within_one_percent(count: int) -> None:
    printed = format_bytes(count)
    assert parse_bytes(printed) == pytest.approx(count, rel=0.01)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("Running: llama.cpp b11549", BackendStatus(BackendState.RUNNING, "llama.cpp b11549")),
        ("Installing", BackendStatus(BackendState.INSTALLING)),
        ("Not Installed: binary not found", BackendStatus(BackendState.NOT_INSTALLED, "binary not found")),
        ("Error: on fire", BackendStatus(BackendState.ERROR, "on fire")),
    ],
)
def test_a_status_is_written_as_other_runners_write_it(text: str, status: BackendStatus) -> None:
    assert str(status) == text


def test_an_endpoint_is_one_thing_or_the_other() -> None:
    assert str(Endpoint(host="127.0.0.1", port=80)) == "http://127.0.0.1:80"
    for wrong in ({}, {"host": "h"}, {"port": 1}):
        with pytest.raises(ValueError, match="an endpoint is"):
            Endpoint(**wrong)


def test_memory_fits_device_by_device() -> None:
    need = RequiredMemory(10, (5, 0))
    assert need.fits(RequiredMemory(10, (5,)))
    assert not need.fits(RequiredMemory(10))
    assert not need.fits(RequiredMemory(9, (5, 5)))
    assert need + RequiredMemory(1, (1, 1, 1)) == RequiredMemory(11, (6, 1, 1))
