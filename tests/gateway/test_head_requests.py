"""HEAD: the head of the answer to GET, and no byte more (RFC 9110, 9.3.2)."""

import asyncio
from pathlib import Path

import pytest

from tests.gateway.harness import proxy, request
from tests.waiting import HUNG


@pytest.mark.parametrize("path", ["/lines?count=1", "/lines?count=300", "/lines?count=0", "/health", "/nothing"])
async def test_no_body_follows_a_head(folder: Path, kind: str, path: str) -> None:
    """It would be read as the next answer on the connection."""
    async with proxy(folder, kind) as served:
        client = await served.connect()
        await client.send(request(path, b"", method="HEAD", Content_Length="") + request("/headers"))
        async with asyncio.timeout(HUNG):
            head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404 " if path == "/nothing" else b"HTTP/1.1 200 ")
        assert (await client.answer()).json()[0] == "content-length"
