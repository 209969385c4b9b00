"""Reads the header of a GGUF file at its source by range requests, before the file is downloaded."""

import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from modelrunner.concurrency.threads import in_thread
from modelrunner.errors import InvalidModel, SourceFailed
from modelrunner.store import gguf_model
from modelrunner.store.gguf import read_header
from modelrunner.types import Bundle, ModelFormat, ModelHeader
from modelrunner.web.partial import RemoteFile
from modelrunner.web.session import HubAnswer

# Sizes of the ranges to read until the header is complete, in bytes: 256,000 tokens of vocabulary take 10 MB.
_ENDS = (2 << 20, 8 << 20, 24 << 20)
_FILLED = 8 << 20  # bytes
Ranged = Callable[[str, int], Awaitable[HubAnswer]]
"""Asks for the file with a Range header, `bytes=0-99`; the answer has at most that many bytes."""


async def preview_gguf(file: RemoteFile, ask: Ranged, name: str, folder: Path) -> Bundle | None:
    """Returns the bundle of a model in this one file, without the file; the store does not know its ID. `name` is the
    model's, `folder` a temporary one. Returns None if the file is not GGUF, or its source sends no ranges."""
    header = await _header(file, ask, folder / "header.gguf")
    if header is None:
        return None
    names = ("model.gguf",)
    return Bundle(
        model_id=f"sha256:{file.digest:0<64}",
        references=(name,),
        format=ModelFormat.GGUF,
        directory=folder,
        files={name: folder / name for name in names},
        header=header,
        size=file.size,
        context_length=gguf_model.context_length(header),
        capabilities=gguf_model.capabilities(header, names),
    )


async def _header(file: RemoteFile, ask: Ranged, path: Path) -> ModelHeader | None:
    beginning = b""
    for end in _ENDS:
        try:
            answer = await ask(f"bytes={len(beginning)}-{min(end, file.size) - 1}", end)
        except SourceFailed:
            return None
        if answer.status != 206:
            return None
        beginning += answer.body
        with contextlib.suppress(InvalidModel):
            return await in_thread(lambda _, seen=beginning: _header_in(seen, file.size, path))  # type: ignore[misc]
        if len(beginning) >= file.size:
            break
    return None


def _header_in(beginning: bytes, size: int, path: Path) -> ModelHeader:
    """Writes the beginning into a file of the full size, since the reader checks that offsets lie within it. The bytes
    after it make a header invalid that continues there."""
    with open(path, "wb") as file:
        file.write(beginning)
        file.write(b"\xff" * min(_FILLED, size - len(beginning)))
        file.truncate(max(size, len(beginning)))
    return read_header(path)
