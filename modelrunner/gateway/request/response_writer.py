"""Passes on answers that are translated, or get new chunks, on their way to the client."""

from modelrunner.errors import EngineProtocolError
from modelrunner.gateway.calls import Sink, Translation
from modelrunner.gateway.headers import chunk


class ResponseWriter:
    """Passes an engine's body to `sink`, through the `translation` if there is one. With `framing`, it makes chunks."""

    def __init__(self, sink: Sink, translation: Translation | None, *, framing: bool) -> None:
        self._sink = sink
        self._translation = translation
        self._framing = framing

    def write(self, data: bytes) -> None:
        """Passes on a piece of the engine's body. Raises `EngineProtocolError` if it cannot be translated."""
        if self._translation is not None:
            try:
                data = self._translation.piece(data)
            except EngineProtocolError as error:
                self._sink.write(self._framed(error.written))
                raise
        self._sink.write(self._framed(data))

    def end(self) -> None:
        """Ends the answer once the engine's body is complete. Raises `EngineProtocolError`."""
        data = self._translation.end() if self._translation is not None else b""
        self._sink.write(self._framed(data) + b"0\r\n\r\n" if self._framing else data)

    def _framed(self, data: bytes) -> bytes:
        """Returns the data in chunks, if this writer makes them: one, or one for each line."""
        if not self._framing or not data:
            return data
        if self._translation is not None and self._translation.chunk_per_line:
            return b"".join(map(chunk, data.splitlines(keepends=True)))
        return chunk(data)
