"""The trace of a request: W3C Trace Context (https://www.w3.org/TR/trace-context/)."""

import re
import secrets

import msgspec

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")


class Trace(msgspec.Struct, frozen=True, gc=False):
    """IDs in hexadecimal: of the trace, the client's span ("" without one), the request's span and the engine's.
    `flags` say whether the client records the trace."""

    trace: str
    parent: str
    span: str
    engine: str
    flags: str = "01"

    @property
    def line(self) -> bytes:
        """The header that the engine gets, with its CR LF."""
        return f"traceparent: 00-{self.trace}-{self.engine}-{self.flags}\r\n".encode()


def begun(traceparent: str | None) -> Trace:
    """Begins the trace of a request, or continues the client's if its header is valid."""
    span, engine = secrets.token_hex(8), secrets.token_hex(8)
    if traceparent is not None and (match := _TRACEPARENT.fullmatch(traceparent)):
        return Trace(match[1], match[2], span, engine, match[3])
    return Trace(secrets.token_hex(16), "", span, engine)
