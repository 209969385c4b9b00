"""Models on their way to a host: who sends them, and how fast."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

from modelrunner.cluster.messages import HostAddress
from modelrunner.store.layout import ModelArchive

_PIECE = 256 << 10  # bytes: larger ones make requests wait, smaller ones cost more


class Sender(Protocol):
    """A host, as far as it can send models."""

    name: str
    where: HostAddress

    @property
    def is_usable(self) -> bool: ...

    def keeps(self, model_id: str) -> bool: ...


class SendTurns:
    """Who sends a model: a host that keeps it, rather than the head, whose clients would wait. Each sends a model to
    one host at a time, so that of many that lack it the second one gets it from the first, and then both send it."""

    def __init__(self, hosts: Callable[[], Iterable[Sender]] = lambda: ()) -> None:
        self._hosts = hosts
        self._taken: set[tuple[str, str]] = set()
        self._change = asyncio.Condition()

    @asynccontextmanager
    async def turn(self, model_id: str) -> AsyncIterator[Sender | None]:
        """Waits for one that can send the model, and keeps it meanwhile: a host, or None for the head."""
        async with self._change:
            while not (free := self._free(model_id)):
                await self._change.wait()
            taken = free[0].name if free[0] else "", model_id
            self._taken.add(taken)
        try:
            yield free[0]
        finally:
            async with self._change:
                self._taken.discard(taken)
                self._change.notify_all()

    def _free(self, model_id: str) -> list[Sender | None]:
        having = [host for host in self._hosts() if host.is_usable and host.keeps(model_id)]
        senders: list[Sender | None] = [host for host in having if (host.name, model_id) not in self._taken]
        return senders if ("", model_id) in self._taken else [*senders, None]


async def rest_of(archive: ModelArchive, offset: int, is_busy: Callable[[], bool]) -> AsyncIterator[bytes]:
    """Yields the archive from the byte `offset` on, in pieces so small that other work of the event loop does not wait
    long for one. While the sender `is_busy` with requests, it rests after each as long as that took: half of the
    processor, and of the network, is left to them."""
    done, blocks = 0, archive.pieces()
    while (block := await asyncio.to_thread(next, blocks, b"")) or done < archive.size:
        for start in range(max(0, offset - done), len(block), _PIECE):
            began = time.monotonic()
            yield block[start : start + _PIECE]
            await asyncio.sleep(time.monotonic() - began if is_busy() else 0)
        done += len(block)
