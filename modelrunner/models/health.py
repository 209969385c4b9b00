"""Decides the health of the daemon, and whether it should get requests."""

from collections.abc import Callable
from dataclasses import dataclass

from modelrunner.concurrency.threads import stuck
from modelrunner.models.library import Library
from modelrunner.models.residency import Preloader
from modelrunner.scheduler import HealthState, Scheduler


@dataclass(frozen=True, slots=True)
class HealthVerdict:
    """`is_ready` is False while no requests should be sent. `reason` says why, or which models cannot be loaded while
    others can."""

    health: HealthState
    is_ready: bool
    reason: str


class HealthCheck:
    """`is_needed` takes a model's ID, and returns whether the daemon needs the model to be ready: a pinned or preloaded
    model."""

    def __init__(
        self, library: Library, scheduler: Scheduler, preloader: Preloader, is_needed: Callable[[str], bool]
    ) -> None:
        self._library = library
        self._scheduler = scheduler
        self._preloader = preloader
        self._is_needed = is_needed

    def health(self, *, ending: bool = False) -> HealthState:
        """`ending` is True once the daemon was asked to stop. Cheap."""
        status = HealthState.SHUTTING_DOWN if ending else self._scheduler.health()
        if self._preloader.starting and status in (HealthState.READY, HealthState.BUSY):
            return HealthState.STARTING
        return status

    async def verdict(self, *, ending: bool = False, trouble: str = "") -> HealthVerdict:
        """Returns whether the daemon is ready. A failing model makes it unready only if the model is needed; a damaged
        model never does. `ending` is as of `health`; `trouble` is the reason why no client can reach the daemon, or
        ""."""
        health, looks = self.health(ending=ending), self._library.looks
        trouble = "the daemon is shutting down" if health is HealthState.SHUTTING_DOWN else trouble or stuck()
        trouble = trouble or await self._scheduler.diagnostics.trouble()
        failing = self._scheduler.diagnostics.failing({model.id: model.name for model in self._library})
        is_ready = not trouble and not any(map(self._is_needed, failing))
        damaged = [f"{model.name} is damaged: {model.damage}" for model in self._library if model.damage]
        damaged += [folder.message for folder in await looks.absent()]
        reason = "; ".join(filter(None, [trouble, *failing.values(), *damaged, looks.trouble]))
        if not is_ready and health is not HealthState.SHUTTING_DOWN:
            health = HealthState.ERROR
        return HealthVerdict(health, is_ready, reason)
