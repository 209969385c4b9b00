"""Answers questions about the scheduler: why a model waits, whether one would fit, how far a load is, and whether the
scheduler works. Reads the reconciler's state and changes nothing in it."""

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from modelrunner.progress import LoadProgress
from modelrunner.scheduler import failures, why
from modelrunner.scheduler.devices import out_of_use
from modelrunner.scheduler.events import Events
from modelrunner.scheduler.host import Host
from modelrunner.scheduler.queues import Queue
from modelrunner.scheduler.reconciler import Reconciler
from modelrunner.scheduler.state import Group, Phase, RunnerId, RunOption, RunPlace, State
from modelrunner.scheduler.target import Target
from modelrunner.scheduler.why import Explanation, FitForecast, Obstacle, Standing
from modelrunner.types import Mode, RequiredMemory, RunnerKey

_SHOWN_EVENTS = 10
_PULSE = 0.01  # seconds of sleep that show how late the event loop is
_LATE = 1.0
_OVERDUE = 5.0


class Diagnostics:
    """Times are in seconds of `clock`. Used from the event loop's thread."""

    def __init__(
        self, reconciler: Reconciler, hosts: Mapping[str, Host], events: Events, clock: Callable[[], float]
    ) -> None:
        self._reconciler = reconciler
        self._hosts = hosts
        self._slots, self._queues = reconciler.slots, reconciler.queues
        self._events = events
        self._clock = clock
        self._missing: dict[str, str] = {}

    async def why(self, target: Target) -> Explanation:
        """Explains what the target's requests wait for, or the next one would. Raises what the backend's estimate
        raises."""
        target = self._slots.standing(target)
        group = await self._group(target)
        slot = self._slots.first(target.key)
        stage, variant = (slot.runner.stage, slot.variant.label) if slot else ("", "")
        context = why.ExplainContext(self._names(), stage, variant, self._where, self._load_left(target.key))
        state = self._reconciler.state()
        answer = why.explain(state, group, context, self._clock())
        runner = slot.runner.id if slot else None  # which may have been started for another preset
        concerned = [
            e
            for e in self._events.recent()
            if target.name in (e.model, e.details.get("room_for")) or e.runner == runner
        ]
        reason = self._with_devices(answer.reason, state)
        return replace(answer, reason=reason, events=tuple(concerned[-_SHOWN_EVENTS:]))

    def absent(self, model: str, state: Standing, waiting_for: Obstacle, reason: str) -> Explanation:
        """Explains a model that cannot be loaded yet."""
        unknown = Group(RunnerKey("", model, Mode.COMPLETION), (), (), model)
        figures = why.figures(self._reconciler.state(), unknown, None)
        return Explanation(model, state, None, waiting_for, figures, [], None, reason)

    async def fit(self, target: Target) -> FitForecast:
        """Says whether the target's model would get its memory now. Raises what the backend's estimate raises."""
        target = self._slots.standing(target)
        group, state = await self._group(target), self._reconciler.state()
        forecast = why.fit(state, group, self._names(), self._clock(), self._where)
        return replace(forecast, reason=self._with_devices(forecast.reason, state))

    def fit_bytes(self, name: str, size: int) -> FitForecast:
        """Makes the forecast for a model with an unknown header. It needs at least the size of its files in bytes,
        which counts as main memory."""
        group = Group(RunnerKey("", name, Mode.COMPLETION), (), (RunOption(RequiredMemory(size)),), name)
        return why.fit(self._reconciler.state(), group, self._names(), self._clock())

    async def shortage(self, targets: Iterable[Target]) -> tuple[int, int] | None:
        """Returns the bytes that the targets' models need together, each run in its smallest way, and those of all that
        runners may hold, of main memory and devices together, if the first are more; else None. Raises what the
        backends' estimates raise."""
        each = [await self._reconciler.variants(target) for target in {t.key: t for t in targets}.values()]
        need = sum(min(one.variant.memory.total for one in variants) for variants in each if variants)
        room = sum(budget.total for budget in self._reconciler.state().hosts.values())
        return (need, room) if need > room else None

    def progress(self, target: Target) -> LoadProgress:
        """Tells how far the load is that a client waits for. Every client may ask every second."""
        reconciler = self._reconciler
        key = reconciler.slots.standing(target).key
        slot, queue = reconciler.slots.first(key), reconciler.queues.get(key)
        if key.files in reconciler.paused:
            stage = "paused"
        elif slot is not None:
            stage = slot.runner.stage or slot.phase
        else:
            stage = "queued"
        mine = _oldest(queue) if queue is not None else (math.inf, 0)
        position = 1 + sum(_oldest(other) < mine for other in reconciler.queues.values())
        return LoadProgress(stage, position, self._load_left(key))

    def missing(self, model: str, reason: str | None) -> None:
        """Records why a model that should be loaded is not; None once it is."""
        self._missing.pop(model, None)
        if reason is not None:
            self._missing[model] = reason

    def failing(self, names: Mapping[str, str]) -> dict[str, str]:
        """Explains by model ID why requests are refused because an engine failed again and again, for the models in
        `names` (ID to name)."""
        now, reconciler = self._clock(), self._reconciler
        return {
            model_id: failures.backing_off(Group(key, (), (), names[model_id]), failure, now).message
            for (key, _), failure in reconciler.state().failures.items()
            for model_id in reconciler.failed.get(key, ())
            if model_id in names and not reconciler.slots.of(key) and not failure.waits and now < failure.until
        }

    async def trouble(self) -> str:
        """Explains why this daemon cannot serve requests now; "" if it can."""
        if self._reconciler.closing:
            return "the daemon is shutting down"
        if self._reconciler.stuck:
            return "the scheduler failed at its last plan: see `modelrunner logs`"
        due = self._clock() - self._reconciler.policy.max_wait - _OVERDUE
        late = [queue.target.name for queue in self._queues.values() if _oldest(queue)[0] < due]
        if late:
            return f"requests for {', '.join(late)} wait longer than they may: the scheduler is stuck"
        for model, reason in self._missing.items():
            return f"{model} is to be loaded, and is not: {reason}"
        began = self._clock()
        await asyncio.sleep(_PULSE)
        lag = self._clock() - began - _PULSE
        return f"the daemon is overloaded: it is {lag:.1f} s behind" if lag > _LATE else ""

    async def _group(self, target: Target) -> Group:
        queue = self._queues.get(target.key)
        if queue is not None:
            reconciler, key = self._reconciler, target.key
            return queue.view(reconciler.load_seconds.get(key, 0.0), key in reconciler.grown)
        return Group(target.key, (), await self._reconciler.options(target), target.name)

    def _names(self) -> dict[RunnerId, str]:
        return {id: slot.target.name for id, slot in self._slots.items()}

    def _where(self, place: RunPlace) -> str:
        hosts = [(each, self._hosts.get(each.host)) for each in place.each]
        return " and".join(
            [each.text(dict(enumerate([d.name for d in host.devices()])) if host else {}) for each, host in hosts]
        )

    def _with_devices(self, reason: str, state: State) -> str:
        """Returns the reason with the devices that the plan does without."""
        notes = [
            f"{name}: {each}" if name else each
            for name, budget in state.hosts.items()
            for each in out_of_use(self._hosts[name].devices(), budget.vram)
        ]
        return "; ".join([reason, *notes])

    def _load_left(self, key: RunnerKey) -> float | None:
        """Seconds until the model is loaded, by its last load: 0 for a ready runner, None before the first load, and
        for a sleeping runner, which wakes sooner."""
        took = self._reconciler.load_seconds.get(key)
        slot = self._slots.first(key)
        if slot is not None and (slot.phase is Phase.SLEEPING or (slot.phase is Phase.STARTING and slot.ready_at)):
            return None
        if slot is not None and slot.phase is Phase.READY:
            return 0.0
        if took is None or slot is None or slot.phase is not Phase.STARTING:
            return took
        return max(0.0, took - (self._clock() - slot.started))


def _oldest(queue: Queue) -> tuple[float, int]:
    request = next(iter(queue.tickets.values())).request
    return request.since, request.id
