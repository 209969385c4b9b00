"""Bytes and durations as text."""

import re

from modelrunner.errors import BadRequest

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?", re.IGNORECASE | re.ASCII)
_AGE = re.compile(r"([0-9]{1,6})([dw])")
_AGE_UNITS = {"d": 86400.0, "w": 604800.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_DURATION_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_bytes(text: str | int) -> int:
    """Parses `8GiB`, `8G`, `512m` or `1073741824` into bytes. A plain letter is binary (`8G` is `8GiB`), as for `docker
    run -m`, and so is `GB`. Raises `BadRequest`."""
    number: float
    if isinstance(text, int) and not isinstance(text, bool):
        number, unit = text, ""
    else:
        match = _BYTES.fullmatch(str(text).strip())
        if match is None:
            raise BadRequest(f"{text!r} is not a size: write bytes, or a number with K, M, G or T such as 8GiB")
        number, unit = float(match[1]), match[2].lower()
    count = number * 1024 ** " kmgtp".index(unit or " ")
    if not 0 <= count < 2**63:
        raise BadRequest(f"{text!r} is not a size between 0 and 2^63 bytes")
    return int(count)


def format_bytes(count: float) -> str:
    """Returns bytes with a binary unit and three significant digits: `92.1MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            is_whole = unit == "B" or abs(count) >= 999.5  # three digits would be 1e+03
            return f"{count:.0f}{unit}" if is_whole else f"{count:.3g}{unit}"
        count /= 1024
    raise AssertionError


def parse_duration(text: str) -> float:
    """Parses a Go duration (`5m`, `1h30m`, `-1s`, `0`) into seconds, as Go's `time.ParseDuration` does. Raises
    `BadRequest`."""
    rest = text.strip()
    sign = -1.0 if rest.startswith("-") else 1.0
    rest = rest[1:] if rest[:1] in ("-", "+") else rest
    if rest == "0":
        return 0.0
    seconds, position = 0.0, 0
    while (part := _DURATION_PART.match(rest, position)) is not None:
        seconds += float(part[1]) * _DURATION_UNITS[part[2]]
        position = part.end()
    if not rest or position != len(rest):
        raise BadRequest(f'{text!r} is not a duration: write a number with a unit, such as "90s", "5m" or "1h30m"')
    return sign * seconds


def parse_age(text: str) -> float:
    """Parses a number of days or weeks (`30d`, `2w`), or a Go duration, into seconds; never negative. Raises
    `BadRequest`."""
    match = _AGE.fullmatch(text.strip())
    seconds = float(match[1]) * _AGE_UNITS[match[2]] if match else parse_duration(text)
    if seconds < 0:
        raise BadRequest(f"{text!r} is negative")
    return seconds


def format_duration(seconds: float) -> str:
    """Returns the shortest Go duration: `5m`, `1h30m`, `2.5s`, `0`."""
    if seconds == 0:
        return "0"
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if seconds < 1:
        return f"{sign}{seconds * 1000:g}ms"
    hours, rest = divmod(seconds, 3600)
    minutes, rest = divmod(rest, 60)
    rest = round(rest, 3)
    parts = [f"{hours:.0f}h" if hours else "", f"{minutes:.0f}m" if minutes else "", f"{rest:g}s" if rest else ""]
    return sign + "".join(parts)
