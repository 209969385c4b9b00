"""Points in time as text."""

from datetime import UTC, datetime

_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))


def span(seconds: float) -> str:
    """Returns the largest unit, rounded: "4 minutes"."""
    for name, size in _UNITS:
        count = round(seconds / size)
        if count >= 1:
            return f"{count} {name}" + ("s" if count > 1 else "")
    return "now"


def relative(moment: datetime, now: datetime) -> str:
    """Returns "3 hours ago", "in 4 minutes" or "now"."""
    seconds = (moment - now).total_seconds()
    text = span(abs(seconds))
    return text if text == "now" else f"in {text}" if seconds > 0 else f"{text} ago"


def ago(unix: float) -> str:
    """Returns the time since then, "" for 0, which stands for an unknown time."""
    return "" if not unix else relative(datetime.fromtimestamp(unix, UTC), datetime.now(UTC))


def until(rfc3339: str | None) -> str:
    """Returns the time from now, "never" for None."""
    return relative(datetime.fromisoformat(rfc3339), datetime.now(UTC)) if rfc3339 else "never"
