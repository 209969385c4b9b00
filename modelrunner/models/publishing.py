"""Pushes models to registries."""

from pathlib import Path

from modelrunner.oci.push import Pusher
from modelrunner.progress import ProgressReport
from modelrunner.scheduler import Scheduler


class Publisher:
    def __init__(self, pusher: Pusher, scheduler: Scheduler) -> None:
        self._pusher = pusher
        self._scheduler = scheduler

    async def push(
        self,
        reference: str,
        target: str | None,
        report: ProgressReport,
        *,
        token: str | None = None,
        key: Path | None = None,
    ) -> str:
        """Pushes a model, and returns its name at the registry with the digest. `report` is called from the event
        loop's thread. Raises as `Pusher.push`."""
        pushed = await self._pusher.push(reference, target, report, token=token, key=key)
        self._scheduler.events.emit("push", model=reference, reason=f"pushed to {pushed}")
        return pushed
