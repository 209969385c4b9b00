"""The states of the backends. A backend may have to run its engine to learn its state, so a thread asks it, once for
all callers at the same time."""

import asyncio

from modelrunner.backend import BackendStatus
from modelrunner.concurrency.joint import JointWork
from modelrunner.plugins.registry import BackendRegistry


class Statuses:
    def __init__(self, registry: BackendRegistry) -> None:
        self._registry = registry
        self._asking: JointWork[None, dict[str, BackendStatus]] | None = None

    async def __call__(self) -> dict[str, BackendStatus]:
        """Returns the states by the backend's name."""
        if self._asking is None or self._asking.task.done():
            self._asking = JointWork(lambda report: asyncio.to_thread(self._registry.statuses), stops_alone=False)
        return await self._asking.follow()
