"""Snapshots of the scheduler for the rest of the daemon. Times are in Unix seconds, sizes in bytes."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

from modelrunner.sandbox import Sandbox
from modelrunner.scheduler.slots import RunnerSlot
from modelrunner.scheduler.state import Phase
from modelrunner.types import Adapter, Endpoint, KeepAlive, Mode, RequiredMemory


class HealthState(StrEnum):
    """`BUSY` means that requests wait for a runner, `ERROR` that the last plan failed or that no request should be sent
    for another reason, `STARTING` that models of the start-up list are being loaded."""

    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    SHUTTING_DOWN = "shutting_down"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class RunnerFootprint:
    """`measured` is None until the engine's processes were measured."""

    estimated: RequiredMemory
    measured: RequiredMemory | None


@dataclass(frozen=True, slots=True)
class RunnerView:
    """A runner whose process may still exist. `models` are the names of the models that it serves, by ID: presets share
    a runner, and it was started for `model_name`. `stage` describes its load; `last_used` is None before it was ready;
    `expires_at` is None while it is in use and where no timer runs; `variant` says how it differs from what was
    configured, "" if it does not; `sandbox` is None before there was a process. `host` is "" for this machine;
    of a runner over several hosts it names all of them, first the one where its engine runs, and so does the memory."""

    id: str
    backend_name: str
    model_name: str
    model_id: str
    models: Mapping[str, str]
    mode: Mode
    state: Phase
    stage: str
    pid: int | None
    endpoint: Endpoint
    metrics: str | None
    context_size: int
    parallel: int
    capabilities: Collection[str]
    adapters: tuple[Adapter, ...]
    memory: RunnerFootprint
    leases: int
    queued: int
    started_at: float
    last_used: float | None
    expires_at: float | None
    keep_alive: KeepAlive
    pinned: bool
    variant: str
    sandbox: Sandbox | None
    host: str


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of main memory and of each device: the `budget`, and the part of it that runners count for, which is more
    than the budget where they grew or the budget shrank."""

    budget: RequiredMemory
    used: RequiredMemory

    @property
    def free(self) -> RequiredMemory:
        """The part of the budget that no runner counts for."""
        vram = [max(0, budget - used) for budget, used in zip_longest(self.budget.vram, self.used.vram, fillvalue=0)]
        return RequiredMemory(max(0, self.budget.ram - self.used.ram), tuple(vram))


@dataclass(frozen=True, slots=True)
class KeptRunner:
    """A runner that was to be unloaded and is still there. `reason` is a sentence."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class UnloadResult:
    """`models` has the name of the model of each runner that ended."""

    models: tuple[str, ...]
    kept: tuple[KeptRunner, ...]


def runner(slot: RunnerSlot, queued: int, now: float, wall: float) -> RunnerView:
    """`now` is the scheduler's clock, `wall` the time of day at that moment."""
    phase, spec, target = slot.phase, slot.variant.spec, slot.target
    process, expires = slot.runner.process, math.inf
    if phase in (Phase.READY, Phase.SLEEPING) and not slot.leases:
        expires = slot.expires
    return RunnerView(
        id=slot.runner.id,
        backend_name=target.key.backend,
        model_name=target.name,
        model_id=target.model_id,
        models={model_id: each.name for model_id, each in slot.targets.items()},
        mode=target.key.mode,
        state=Phase.STOPPING if phase is Phase.ENDED else phase,
        stage=slot.runner.stage,
        pid=process.pid if process else None,
        endpoint=slot.runner.upstream.endpoint,
        metrics=slot.runner.api.metrics,
        context_size=spec.context_size,
        parallel=spec.parallel,
        capabilities=spec.bundle.capabilities,
        adapters=spec.bundle.adapters,
        memory=RunnerFootprint(slot.estimated, slot.measured),
        leases=slot.leases,
        queued=queued,
        started_at=wall - now + slot.started,
        last_used=wall - now + slot.last_used if slot.ready_at is not None else None,
        expires_at=wall - now + expires if expires != math.inf else None,
        keep_alive=slot.keep_alive,
        pinned=slot.pinned,
        variant=slot.variant.label,
        sandbox=process.sandbox if process else None,
        host=", ".join(slot.option.place.hosts),
    )


def unloaded(slots: Collection[RunnerSlot]) -> UnloadResult:
    """The result of unloading these runners."""
    ended = tuple([slot.target.name for slot in slots if slot.phase is Phase.ENDED])
    kept = [KeptRunner(slot.runner.id, _why_kept(slot)) for slot in slots if slot.phase is not Phase.ENDED]
    return UnloadResult(ended, tuple(kept))


def _why_kept(slot: RunnerSlot) -> str:
    if slot.phase is Phase.STARTING:
        return f"{slot.target.name} is loading for requests that wait: force ends it, or try again when it is ready"
    if slot.phase is Phase.STOPPING:
        return f"{slot.target.name} is stopping; its process has not ended yet"
    return f"{slot.target.name} still answers {slot.awaited} requests and stops after the last: force ends them"
