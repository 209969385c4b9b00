"""Requests that were being answered when their engine died: who was there once is asked again alone, who was there
twice is not sent to that model's engine again. So one request that crashes the engine each time costs the others a
retry, and not the model."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256

from modelrunner.errors import EngineFailed
from modelrunner.types import RunnerKey

_MOST = 1024  # bodies that are remembered, the longest unseen is forgotten first
_TOO_MANY = 2  # engines that may die over one body before it is set aside

Suspect = tuple[RunnerKey, str, bytes]


class Quarantine:
    """Bodies are kept as digests, for the configuration of the model that they met: another one is another chance.
    `alert` is True while anybody is suspected; while nobody is, a request need not be looked at."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[Suspect, set[str]] = OrderedDict()
        self._turns: dict[RunnerKey, asyncio.Lock] = {}
        self.alert = False

    def check(self, key: RunnerKey, path: str, body: bytes) -> None:
        """Raises `EngineFailed` for what is set aside."""
        deaths = len(self._deaths.get(_suspect(key, path, body), ()))
        if deaths >= _TOO_MANY:
            raise EngineFailed(
                f"this request was being answered when the engine died, {deaths} times, and is not tried again: "
                "change the request, or the model's configuration"
            )

    def died(self, key: RunnerKey, runner: str, path: str, body: bytes) -> None:
        """The engine of `runner` died over it. Other requests with the same body count as one."""
        suspect = _suspect(key, path, body)
        self._deaths.setdefault(suspect, set()).add(runner)
        self._deaths.move_to_end(suspect)
        self.alert = True
        if len(self._deaths) > _MOST:
            self._deaths.popitem(last=False)

    def answered(self, key: RunnerKey, path: str, body: bytes) -> None:
        """It was not the one."""
        self._deaths.pop(_suspect(key, path, body), None)
        self.alert = bool(self._deaths)
        if not self.alert:
            self._turns.clear()

    async def turn(self, key: RunnerKey) -> Callable[[], None]:
        """Waits until no other suspect is being asked again: the next death shows who it was. What is returned ends the
        turn, and may be called more than once."""
        lock = self._turns.setdefault(key, asyncio.Lock())
        await lock.acquire()
        ended = False

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                lock.release()

        return end


def _suspect(key: RunnerKey, path: str, body: bytes) -> Suspect:
    return key, path, sha256(body).digest()
