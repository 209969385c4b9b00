"""Forms with a file, as the calls of sound and of images take them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from secrets import token_hex

from modelrunner.cli.client import RawBody

_PIECE = 1 << 18


def form(name: str, file: Path, texts: Mapping[str, str]) -> RawBody:
    """Returns a form (multipart/form-data, RFC 7578) with the texts, and the file as the part `name`, which is read as
    it is sent."""
    boundary = token_hex(16)
    parts = [f'--{boundary}\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{t}\r\n' for n, t in texts.items()]
    called = json.dumps(f"file{file.suffix if file.suffix.isascii() else ''}")
    parts.append(f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename={called}\r\n\r\n')
    start, end = "".join(parts).encode(), f"\r\n--{boundary}--\r\n".encode()

    def pieces() -> Iterator[bytes]:
        yield start
        with file.open("rb") as opened:
            yield from iter(lambda: opened.read(_PIECE), b"")
        yield end

    size = len(start) + file.stat().st_size + len(end)
    return RawBody(f"multipart/form-data; boundary={boundary}", size, pieces())
