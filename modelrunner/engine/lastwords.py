"""Picks the part of an engine's log that is worth repeating in a message."""

_LINES = 3
_LONGEST = 400


def is_echo(line: str) -> bool:
    """True for a log line that only our own health checks have caused. It is neither progress nor a reason."""
    return "/health" in line


def last_words(tail: str) -> str:
    """The last three lines of a log, joined to one of at most 400 characters that a terminal can print."""
    told = [line for line in tail.splitlines() if not is_echo(line)]
    lines = [" ".join("".join(c if c.isprintable() else " " for c in line).split()) for line in told]
    return " | ".join([line for line in lines if line][-_LINES:])[-_LONGEST:]
