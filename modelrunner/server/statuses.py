"""What the backends say of themselves. A backend may have to ask its engine, so that is done in a thread, and once for
all who want to know at the same moment."""

import asyncio

from modelrunner.backend import BackendStatus
from modelrunner.registry import BackendRegistry


class Statuses:
    def __init__(self, registry: BackendRegistry) -> None:
        self._registry = registry
        self._asking: asyncio.Task[dict[str, BackendStatus]] | None = None

    async def __call__(self) -> dict[str, str]:
        """By the backend's name, as people read them."""
        if self._asking is None:
            self._asking = asyncio.create_task(asyncio.to_thread(self._registry.statuses))
            self._asking.add_done_callback(self._asked)
        statuses = await asyncio.shield(self._asking)
        return {name: str(status) for name, status in statuses.items()}

    def _asked(self, asked: "asyncio.Task[dict[str, BackendStatus]]") -> None:
        self._asking = None
        if not asked.cancelled():
            asked.exception()  # whoever still waits is told
