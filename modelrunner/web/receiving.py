"""Reads the body of an answer in large pieces."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import httpx

_MOST = 1 << 20  # bytes of a piece
_WORTHWHILE = 4 << 20  # bytes for which losing a connection is worth it


async def body_of(response: "httpx.Response") -> AsyncGenerator[bytes, None]:
    """Yields the bytes as they are sent. Raises `httpx.HTTPError`.

    The long body of an answer in HTTP/1.1 with a Content-Length is read from the connection itself, by httpx's
    `network_stream` (https://www.encode.io/httpcore/extensions/): its parser would copy every byte three times. The
    connection is closed afterwards."""
    import httpcore
    import httpx

    length = response.headers.get("Content-Length", "")
    left = int(length) if length.isascii() and length.isdigit() and len(length) < 19 else 0
    stream = response.extensions.get("network_stream")
    plain = response.http_version == "HTTP/1.1" and "Transfer-Encoding" not in response.headers
    async with aclosing(cast("AsyncGenerator[bytes, None]", response.aiter_raw())) as parsed:
        async for data in parsed:
            left -= len(data)
            yield data
            # The parser has returned all of its bytes: the rest is still in the connection.
            if stream is None or not plain or left < _WORTHWHILE:
                continue
            while left:
                try:
                    data = await stream.read(min(left, _MOST))
                except (httpcore.NetworkError, httpcore.TimeoutException) as error:
                    raise httpx.ReadError(str(error)) from error
                if not data:
                    return
                left -= len(data)
                yield data
            return
