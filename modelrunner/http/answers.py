"""Header fields of an answer: their type, and those for web pages of other origins."""

Header = tuple[bytes, bytes]
"""Name and value of one header field of an answer."""

_EXPOSED = (
    b"X-Request-ID, Server-Timing, Retry-After, X-Modelrunner-Variant, X-Modelrunner-Ignored, X-Modelrunner-Model, "
    b"X-Modelrunner-Truncated, X-Modelrunner-Cache, X-Modelrunner-Stream"
)
_VARY: tuple[Header, ...] = ((b"Vary", b"Origin"),)


def cors(origin: str | None) -> tuple[Header, ...]:
    """Returns the CORS fields of an answer to an allowed `origin`; None for a client that is no web page."""
    if origin is None:
        return _VARY
    return (
        *_VARY,
        (b"Access-Control-Allow-Origin", origin.encode("latin-1")),
        (b"Access-Control-Expose-Headers", _EXPOSED),
    )
