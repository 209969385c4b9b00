"""The daemon's client for other machines: what it leaves when a request is given up."""

import asyncio

import pytest

from modelrunner.web.session import new_client
from tests.waiting import HUNG


async def test_a_request_that_is_given_up_in_its_handshake_leaves_no_connection() -> None:
    hello, gone = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        hello.set()
        while await reader.read(4096):
            pass
        gone.set()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"https://127.0.0.1:{port}/"
    async with server, new_client(url) as client:
        asking = asyncio.create_task(client.get(url))
        await asyncio.wait_for(hello.wait(), HUNG)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await asking
        await asyncio.wait_for(gone.wait(), HUNG)
    assert caught.value.__traceback__ is not None  # it holds what the request had until now
