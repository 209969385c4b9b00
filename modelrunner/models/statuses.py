"""The states of the backends. A backend may have to run its engine to learn its own, so they are asked in a thread, and
once for all callers at the same moment."""

import asyncio

from modelrunner.backend import BackendStatus
from modelrunner.plugins.registry import BackendRegistry


class Statuses:
    def __init__(self, registry: BackendRegistry) -> None:
        self._registry = registry
        self._asking: asyncio.Task[dict[str, BackendStatus]] | None = None

    async def __call__(self) -> dict[str, BackendStatus]:
        """By the backend's name."""
        if self._asking is None:
            self._asking = asyncio.create_task(asyncio.to_thread(self._registry.statuses))
            self._asking.add_done_callback(self._asked)
        return await asyncio.shield(self._asking)

    def _asked(self, asked: "asyncio.Task[dict[str, BackendStatus]]") -> None:
        self._asking = None
        if not asked.cancelled():
            asked.exception()  # the callers get it
