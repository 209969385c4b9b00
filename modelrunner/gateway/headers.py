"""The header lines that the answers of every family share."""

import itertools
import re
import secrets
from functools import lru_cache

from modelrunner.gateway.calls import EVENT_STREAM
from modelrunner.http.answers import Header

_HANDED_ON = {
    b"content-type": b"Content-Type",
    b"retry-after": b"Retry-After",
    b"content-language": b"Content-Language",
}
_CLIENT_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_UNSAFE = re.compile(r"[^\w.-]", re.ASCII)
_LONGEST, _MOST = 64, 32  # characters of an ignored field's name, and names: clients choose them


def harmless_id(text: str | None) -> str | None:
    """Returns the client's request ID if it is safe in logs and headers."""
    return text if text is not None and _CLIENT_ID.fullmatch(text) else None


_PROCESS = secrets.token_hex(6)
_numbers = itertools.count()


def new_request_id() -> str:
    """Returns twelve random digits of the process, then ten that count."""
    return f"{_PROCESS}{next(_numbers):010x}"


def id_line(request_id: str) -> bytes:
    """Returns the line of a request's ID in the answer's head, and in the request to the engine."""
    return b"X-Request-ID: %b\r\n" % request_id.encode()


def server_timing(queue: float, load: float, proxy: float) -> bytes:
    """Returns the line of the Server-Timing header; all times are in seconds."""
    milliseconds = (queue * 1e3, load * 1e3, max(0.0, proxy) * 1e3)
    return b"Server-Timing: queue;dur=%.1f, load;dur=%.1f, proxy;dur=%.3f\r\n" % milliseconds


def chunk(data: bytes) -> bytes:
    """Returns `data`, which is not empty, as one chunk (RFC 9112, 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


@lru_cache(maxsize=256)
def engine_headers(
    headers: tuple[Header, ...], variant: str, ignored: tuple[str, ...], model: str
) -> tuple[Header, ...]:
    """Returns the engine's headers that the client may see, and our own, as of `own_headers`."""
    fields = [(_HANDED_ON[name], value) for name, value in headers if name in _HANDED_ON]
    if any(value.startswith(b"text/event-stream") for _, value in fields):
        fields += EVENT_STREAM[1:]
    return (*fields, *own_headers(variant, ignored, model))


def own_headers(
    variant: str, ignored: tuple[str, ...] = (), model: str = "", lost: tuple[str, ...] = ()
) -> tuple[Header, ...]:
    """Returns our own fields. `variant` says how the runner differs from its configuration, "" if it does not;
    `ignored` are the fields that the engine ignores; `model` is the model that was chosen for an alias, or the preset
    that another one's engine serves, or ""; `lost` is what was dropped of a request that was too long."""
    headers: tuple[Header, ...] = ()
    if variant:
        headers += ((b"X-Modelrunner-Variant", " ".join(variant.split()).encode("ascii", "replace")),)
    if model:
        headers += ((b"X-Modelrunner-Model", model.encode("ascii", "replace")),)
    for field, names in ((b"X-Modelrunner-Ignored", ignored), (b"X-Modelrunner-Truncated", lost)):
        if names:
            shown = ", ".join([_UNSAFE.sub("?", name[:_LONGEST]) for name in names[:_MOST]])
            headers += ((field, shown.encode()),)
    return headers


def one_line_each(headers: tuple[Header, ...]) -> tuple[Header, ...]:
    """Returns the fields with repeated names joined to lists, one line for each name (RFC 9110, 5.3)."""
    lines: dict[bytes, bytes] = {}
    for name, value in headers:
        lines[name] = lines[name] + b", " + value if name in lines else value
    return tuple(lines.items())
