"""The files of the page, as they go over the wire."""

import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STATIC = Path(__file__).with_name("static")
PAGE, DOCS = "index.html", "docs.html"
# One plain segment: no name leads to another folder, or to another route.
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*\.(css|html|js|svg|txt)")
_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
# Nothing runs but our own scripts, nothing is sent or fetched but to and from this daemon, and no page frames this one.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
# Swagger UI writes styles into its elements.
DOCS_POLICY = POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the page, plain and compressed with gzip. `etag` is strong (RFC 9110, 8.8.3), so it names the plain
    bytes only; `gzip_etag` names the compressed ones."""

    content_type: str
    plain: bytes
    gzip: bytes
    etag: str
    gzip_etag: str


@cache
def read(name: str) -> StaticFile | None:
    """Returns the file with this name, None without one. Read and compressed once."""
    if not _NAME.fullmatch(name):
        return None
    try:
        plain = (STATIC / name).read_bytes()
    except FileNotFoundError:
        return None
    digest = hashlib.sha256(plain).hexdigest()[:32]
    small = gzip.compress(plain, 9, mtime=0)
    return StaticFile(_TYPES[name.rpartition(".")[2]], plain, small, f'"{digest}"', f'"{digest}-gzip"')
