"""Checks which folders of models are there, without waiting for a disk that does not answer."""

import asyncio
import time

from modelrunner.concurrency.joint import JointWork
from modelrunner.concurrency.threads import Pool
from modelrunner.store import Store
from modelrunner.store.union import AbsentFolder

WAIT = 1.0
"""Seconds that a check may take before its callers continue with the result of the last one."""
_THREADS = Pool("looking at folders", 1, prompt=False)


class FolderLooks:
    """Callers share a check that is under way. A disk that never answers occupies one thread of its own."""

    def __init__(self, store: Store, wait: float = WAIT) -> None:
        self._store = store
        self._wait = wait
        self._look: JointWork[None, None] | None = None
        self._begun = 0.0

    async def absent(self) -> tuple[AbsentFolder, ...]:
        """Returns the folders that cannot be used now, or those of the last look if the disks take longer than
        `wait`."""
        await self.look()
        return self._store.absent()

    async def look(self) -> None:
        """Looks at the folders, for at most `wait`."""
        if len(self._store.folders) > 1:
            if self._look is None or self._look.task.done():
                self._begun = time.monotonic()
                self._look = JointWork(self._looked, stops_alone=False)
            look = self._look.task
            await asyncio.wait({look}, timeout=max(0.0, self._begun + self._wait - time.monotonic()))
            if look.done():
                look.result()

    @property
    def trouble(self) -> str:
        """Returns a sentence while a look takes longer than `wait`, else ""."""
        if self._look is None or self._look.task.done() or (taken := time.monotonic() - self._begun) < self._wait:
            return ""
        return f"a disk of model_dirs has not answered for {taken:.0f} s"

    async def _looked(self, report: object) -> None:
        await asyncio.get_running_loop().run_in_executor(_THREADS, self._store.look)
