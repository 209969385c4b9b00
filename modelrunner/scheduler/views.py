"""What the control plane shows of the scheduler."""

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Literal

from modelrunner import api
from modelrunner.scheduler.slots import RunnerSlot
from modelrunner.scheduler.state import Phase
from modelrunner.types import RequiredMemory

_STATES: dict[Phase, Literal["starting", "ready", "sleeping", "draining", "stopping"]] = {
    Phase.STARTING: "starting",
    Phase.READY: "ready",
    Phase.SLEEPING: "sleeping",
    Phase.DRAINING: "draining",
    Phase.STOPPING: "stopping",
    Phase.ENDED: "stopping",
}


def runner(slot: RunnerSlot, queued: int, now: float, wall: float) -> api.Runner:
    """`now` is the scheduler's clock, `wall` the time of day at that moment, in Unix seconds."""
    phase, spec, target = slot.phase, slot.variant.spec, slot.target
    idle = phase in (Phase.READY, Phase.SLEEPING) and not slot.leases
    finite = slot.expires != float("inf")
    return api.Runner(
        id=slot.runner.id,
        backend_name=target.key.backend,
        model_name=target.name,
        model_id=target.key.model_id,
        mode=target.key.mode,
        state=_STATES[phase],
        stage=slot.runner.stage,
        pid=slot.runner.pid,
        endpoint=str(slot.runner.endpoint),
        context_size=spec.context_size,
        parallel=spec.parallel,
        memory=api.RunnerMemory(_memory(slot.estimated), _memory(slot.measured) if slot.measured else None),
        leases=slot.leases,
        queued=queued,
        started_at=_time(wall - now + slot.started),
        last_used=_time(wall - now + slot.last_used) if slot.ready_at is not None else None,
        expires_at=_time(wall - now + slot.expires) if idle and finite else None,
        keep_alive=str(slot.keep_alive),
        pinned=target.pinned,
        variant=slot.variant.label,
        in_use=slot.leases > 0,
        loading=phase is Phase.STARTING,
    )


def unloaded(asked: Collection[RunnerSlot]) -> api.UnloadResponse:
    """What became of the runners that were to be unloaded."""
    ended = [slot.target.name for slot in asked if slot.phase is Phase.ENDED]
    kept = [api.Kept(slot.runner.id, _why_kept(slot)) for slot in asked if slot.phase is not Phase.ENDED]
    return api.UnloadResponse(len(ended), ended, kept)


def _why_kept(slot: RunnerSlot) -> str:
    if slot.phase is Phase.STARTING:
        return f"{slot.target.name} is loading for requests that wait: force ends it, or try again when it is ready"
    if slot.phase is Phase.STOPPING:
        return f"{slot.target.name} is stopping; its process has not ended yet"
    return f"{slot.target.name} still answers {slot.leases} requests and stops after the last: force ends them"


def _memory(memory: RequiredMemory) -> api.Memory:
    return api.Memory(memory.ram, list(memory.vram))


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
