"""Explains why a model waits, or would wait: asks `plan` and does not carry its actions out. Decides nothing."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from modelrunner.scheduler import failures
from modelrunner.scheduler.allocation import allocations
from modelrunner.scheduler.events import EventRecord
from modelrunner.scheduler.fairness import Turns
from modelrunner.scheduler.plan import plan
from modelrunner.scheduler.state import (
    LEAVING,
    Action,
    Failure,
    Group,
    Phase,
    Reason,
    Refuse,
    Request,
    RunnerId,
    RunPlace,
    Slot,
    Start,
    State,
    Stop,
)
from modelrunner.types import RequiredMemory, RunnerKey


class Obstacle(StrEnum):
    """The thing that a model's requests wait for. `SLOT` is a sequence of its engine; all of them are in use."""

    LOAD = "load"
    MEMORY = "memory"
    SLOT = "slot"
    PULL = "pull"
    INSTALL = "install"
    BACKOFF = "backoff"
    PIN = "pin"
    RESUME = "resume"


class Fitting(StrEnum):
    """Says if a model would get its memory. `SPLIT` means as a smaller run."""

    NOW = "now"
    AFTER_EVICTION = "after_eviction"
    SPLIT = "split"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes. `needed` is None until the model's memory was estimated."""

    needed: RequiredMemory | None
    free: RequiredMemory
    budget: RequiredMemory


class Standing(StrEnum):
    """Where a model stands: the phase of its runner, or the reason why it has none."""

    STARTING = "starting"
    READY = "ready"
    SLEEPING = "sleeping"
    DRAINING = "draining"
    STOPPING = "stopping"
    QUEUED = "queued"
    STOPPED = "stopped"
    PAUSED = "paused"
    FAILED = "failed"
    PULLING = "pulling"
    INSTALLING = "installing"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explains why a model's requests wait. `position` is the model's place among those that wait for memory, None if
    none of its requests wait; `waiting_for` is None where a request is answered at once; `victims` are the names of the
    models that are evicted; `events` are the last ones about the model and about runners evicted for it."""

    model: str
    state: Standing
    position: int | None
    waiting_for: Obstacle | None
    figures: Figures
    victims: list[str]
    expected_seconds: float | None
    reason: str
    events: tuple[EventRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class FitForecast:
    """Says if a model would get its memory now. `would_evict` has names of models, `reason` is a sentence."""

    fits: Fitting
    figures: Figures
    would_evict: list[str]
    reason: str


@dataclass(frozen=True, slots=True)
class Outlook:
    """The decision of `plan` for a request that has waited long enough. It would `start` a runner, `at_once` or after
    the victims and the leaving runners have ended; `start` is None while loads that others wait for hold the memory. Or
    it would refuse the request with `error`; `pinned` is True if pins are the only reason."""

    start: Start | None = None
    at_once: bool = False
    victims: tuple[RunnerId, ...] = ()
    error: BaseException | None = None
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class ExplainContext:
    """The input of `explain` beside the state of a plan. `names` has the model's name of each runner; `stage` and
    `variant` ("" for the configured one) describe the model's own runner. `where` names a place. `load` is
    the seconds that are left of its load or that a load takes, None if none was measured."""

    names: Mapping[RunnerId, str]
    stage: str = ""
    variant: str = ""
    where: Callable[[RunPlace], str] = str
    load: float | None = None


def outlook(state: State, group: Group, now: float) -> Outlook:
    """The outlook of `group`, as if no other group waited for memory. Loads that others wait for stay; a pause of the
    model, or one after a failure, is ignored."""
    alone = _alone(state, group, now)
    actions = plan(alone, now)
    if (error := _refusal(actions, group.key)) is not None:
        unpinned = replace(alone, slots=tuple([slot._replace(pinned=False) for slot in state.slots]))
        return Outlook(error=error, pinned=_refusal(plan(unpinned, now), group.key) is None)
    if (start := _start(actions, group.key)) is not None:
        return Outlook(start, at_once=True)
    victims = tuple([a.runner for a in actions if isinstance(a, Stop) and a.reason is Reason.ROOM])
    gone = {*victims, *(slot.id for slot in state.slots if slot.phase in LEAVING)}
    stay = tuple([slot for slot in state.slots if slot.id not in gone])
    start = _start(plan(replace(alone, slots=stay), now), group.key)
    return Outlook(start, victims=victims)


def fit(
    state: State,
    group: Group,
    names: Mapping[RunnerId, str],
    now: float,
    where: Callable[[RunPlace], str] = str,
) -> FitForecast:
    """Says whether and how the group's model would get its memory now. `where` names a place."""
    look, slot, name = outlook(state, group, now), _slot(state, group.key), group.name
    usual = min([option.rank for option in group.options], default=0)
    if slot is not None and slot.phase in (Phase.STARTING, Phase.READY):
        fits, reason = Fitting.NOW, f"{name} is loaded"
    elif look.error is not None:
        fits, reason = Fitting.NEVER, str(look.error)
    elif (
        look.start is not None
        and look.start.option.rank > usual
        and not look.start.option.place.others  # over several hosts it is the same run
        and (slot is None or slot.phase is not Phase.SLEEPING)
    ):
        fits, reason = (
            Fitting.SPLIT,
            f"{name} fits in a smaller way than the one that was asked for{_where(look.start, where)}",
        )
    elif look.at_once:
        fits, reason = Fitting.NOW, f"{name} fits into what is free{_where(look.start, where)}"
    else:
        room = _making_room(state, look.victims, names)
        fits, reason = Fitting.AFTER_EVICTION, f"{name} fits{_where(look.start, where)} once {room}"
    return FitForecast(fits, figures(state, group, look.start), [names[runner] for runner in look.victims], reason)


def explain(state: State, group: Group, context: ExplainContext, now: float) -> Explanation:
    """Explains where the group's model stands, and what its requests wait for, or the next one would."""
    waiting = [g for g in state.groups if g.waiting]
    turns = Turns(state.served, state.policy.ageing, now)
    line = [g.key for g in turns.in_line(waiting, turns.urgent(waiting))]
    position = 1 + line.index(group.key) if group.key in line else None
    look, slot = outlook(state, group, now), _slot(state, group.key)
    where = Standing.QUEUED if position else Standing(slot.phase) if slot else Standing.STOPPED
    answer = Explanation(group.name, where, position, None, figures(state, group, look.start), [], None, "")
    return _with_reason(answer, state, group, context, look, now)


def _with_reason(
    answer: Explanation, state: State, group: Group, context: ExplainContext, look: Outlook, now: float
) -> Explanation:
    name, slot, load, failure = group.name, _slot(state, group.key), context.load, _pause(state, group, look.start, now)
    if group.key.files in state.paused:
        reason = f"{name} is paused: its requests wait for `modelrunner resume {name}`"
        return replace(answer, state=Standing.PAUSED, reason=reason, waiting_for=Obstacle.RESUME)
    if slot is not None and slot.phase is Phase.STARTING:
        reason = f"{name} is loading" + (f": {context.stage}" if context.stage else "")
        return replace(answer, state=Standing.STARTING, reason=reason, waiting_for=Obstacle.LOAD, expected_seconds=load)
    if slot is not None and slot.phase is Phase.READY:
        name += f" ({context.variant}, since memory is short)" if context.variant else ""
        if answer.position or slot.leases + slot.abandoned >= slot.parallel:
            reason = f"{name} is loaded, and {_suspected(group) if slot.free else _taken(slot)}"
            return replace(answer, state=Standing.READY, reason=reason, waiting_for=Obstacle.SLOT)
        return replace(answer, reason=f"{name} is loaded and answers at once", expected_seconds=0.0)
    if slot is None and failure is not None:
        seconds = None if load is None else failure.until - now + load
        reason = failures.backing_off(group, failure, now).message
        return replace(
            answer, state=Standing.FAILED, reason=reason, waiting_for=Obstacle.BACKOFF, expected_seconds=seconds
        )
    hosts = " for hosts of the cluster that may still come" if now < state.waits_for_hosts(group) else ""
    if look.error is not None:
        obstacle = Obstacle.PIN if look.pinned else Obstacle.MEMORY
        return replace(answer, reason=f"{look.error}{hosts and f'; it waits{hosts}'}", waiting_for=obstacle)
    if not group.options:
        reason = f"{name} waits for the estimate of its memory{hosts and f', or{hosts}'}"
        return replace(answer, reason=reason, waiting_for=Obstacle.MEMORY)
    sleeps = slot is not None and slot.phase is Phase.SLEEPING
    present, action = ("sleeps", "wakes") if sleeps else ("is not loaded", "loads")
    if look.at_once:
        waiting_for = Obstacle.LOAD if answer.position else None
        reason = f"{name} {present}; a request {action} it{_where(look.start, context.where)}"
        return replace(answer, reason=reason, waiting_for=waiting_for, expected_seconds=load)
    waits = "waits until" if answer.position else f"{present}; a request would wait until"
    going = (*_leaving(state), *look.victims)
    leased = any(slot.leases for slot in state.slots if slot.id in going)
    return replace(
        answer,
        reason=f"{name} {waits} {_making_room(state, look.victims, context.names)}",
        waiting_for=Obstacle.MEMORY,
        expected_seconds=None if leased else load,
        victims=[context.names[runner] for runner in going],
    )


def _suspected(group: Group) -> str:
    waiting = sum(request.suspect for request in group.waiting)
    return f"its engine crashed twice: of the requests that it had, {waiting} wait to be asked again one at a time"


def _taken(slot: Slot) -> str:
    taken = "others have all the places that its engine has"
    if not slot.abandoned:
        return taken
    return f"{taken}; {slot.abandoned} of them with requests whose clients have left, on which the engine still works"


def _making_room(state: State, victims: Sequence[RunnerId], names: Mapping[RunnerId, str]) -> str:
    busy = {slot.id for slot in state.slots if slot.leases}
    how = [f"{names[id]} has answered its requests" if id in busy else f"{names[id]} is gone" for id in _leaving(state)]
    how += [f"{names[id]} is {'drained' if id in busy else 'evicted'}" for id in victims]
    return " and ".join(how) or "models that are being loaded have answered who waits for them"


def _leaving(state: State) -> tuple[RunnerId, ...]:
    return tuple([slot.id for slot in state.slots if slot.phase in LEAVING])


def figures(state: State, group: Group, start: Start | None) -> Figures:
    """The memory that `start` needs (by default the first option), the free memory of its hosts, and the
    budget there."""
    option = start.option if start else next(iter(group.options), None)
    hosts = option.place.hosts if option else (next(iter(state.hosts), ""),)
    there = [memory for o in group.options if o.place.host == hosts[0] for memory in o.memory.each]
    memory = allocations(state.hosts, state.slots, there)
    rooms = [[max(0, free) for free in memory[host].free] if host in memory else [0] for host in hosts]
    free, *others = [RequiredMemory(ram, tuple(vram)) for ram, *vram in rooms]
    budget, *rest = [state.hosts.get(host, RequiredMemory(0)) for host in hosts]
    needed = option.memory if option else None
    return Figures(needed, replace(free, others=tuple(others)), replace(budget, others=tuple(rest)))


def _where(start: Start | None, where: Callable[[RunPlace], str]) -> str:
    return where(start.option.place) if start is not None else ""


def _pause(state: State, group: Group, start: Start | None, now: float) -> Failure | None:
    """The failure for whose pause a start waits, since there is no other place."""
    rank = start.option.rank if start is not None else 0
    places = {option.place for option in group.options if option.rank == rank}
    pauses = [f for p in places if (f := state.failures.get((group.key, p))) is not None and now < f.until]
    return min(pauses, key=lambda failure: failure.until) if pauses and len(pauses) == len(places) else None


def _alone(state: State, group: Group, now: float) -> State:
    loading = {slot.key for slot in state.slots if slot.phase is Phase.STARTING}
    others = [g for g in state.groups if g.key in loading and g.key != group.key]
    return replace(
        state,
        groups=(*others, replace(group, waiting=(Request(-1, now),))),
        failures={key: replace(failure, until=now) for key, failure in state.failures.items()},
        paused=frozenset(),
        closing=False,
        policy=replace(state.policy, patience=0.0, spare=0.0),
        moved=-math.inf,
    )


def _slot(state: State, key: RunnerKey) -> Slot | None:
    """The runner of the key that answers soonest."""
    mine = [slot for slot in state.slots if slot.key == key and slot.phase is not Phase.ENDED]
    return max(mine, key=lambda slot: (slot.phase is Phase.READY, slot.free), default=None)


def _start(actions: Iterable[Action], key: RunnerKey) -> Start | None:
    return next((a for a in actions if isinstance(a, Start) and a.runner.key == key), None)


def _refusal(actions: Iterable[Action], key: RunnerKey) -> BaseException | None:
    return next((a.error for a in actions if isinstance(a, Refuse) and a.key == key), None)
