"""Why a model waits, or would: what `plan` decides, asked about and not carried out. Nothing is decided here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from modelrunner.scheduler import failures
from modelrunner.scheduler.allocation import Allocation, Vector
from modelrunner.scheduler.events import EventRecord
from modelrunner.scheduler.fairness import in_line, urgent
from modelrunner.scheduler.plan import plan
from modelrunner.scheduler.state import (
    Action,
    Group,
    Phase,
    Reason,
    Refuse,
    Request,
    Slot,
    Start,
    State,
    Stop,
    Wake,
)
from modelrunner.types import RequiredMemory, RunnerKey

_LEAVING = (Phase.DRAINING, Phase.STOPPING)


class Obstacle(StrEnum):
    """What a model's requests wait for. `SLOT`: one of the sequences of its engine, which are all in use."""

    LOAD = "load"
    MEMORY = "memory"
    SLOT = "slot"
    PULL = "pull"
    INSTALL = "install"
    BACKOFF = "backoff"
    PIN = "pin"
    RESUME = "resume"


class Fitting(StrEnum):
    """Whether a model would get its memory. `SPLIT`: in a smaller way than the one that was asked for."""

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


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a model's requests wait. `position` counts the models whose requests wait, the oldest first, None if none of
    this one wait; `waiting_for` is None where a request is answered at once; `victims` are the names of the models that
    make room; `events` are the last ones about the model and about runners that were evicted for it."""

    model: str
    state: str
    position: int | None
    waiting_for: Obstacle | None
    figures: Figures
    victims: list[str]
    expected_seconds: float | None
    reason: str
    events: tuple[EventRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class FitForecast:
    """Whether a model would get its memory now; `would_evict` has names of models, `reason` is a sentence."""

    fits: Fitting
    figures: Figures
    would_evict: list[str]
    reason: str


@dataclass(frozen=True, slots=True)
class Outlook:
    """What `plan` would do for a request that came now and had no more patience: carry out `start` (None while loads
    that others wait for are in the way), `at_once` or after `victims` and those that leave already have gone; or refuse
    with `error`, which with `pinned` it would not do if nothing were pinned."""

    start: Start | Wake | None = None
    at_once: bool = False
    victims: tuple[RunnerKey, ...] = ()
    error: BaseException | None = None
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class ExplainContext:
    """What `explain` is told that no plan depends on. `names` is what people call the models of the runners; `stage`
    what the model's own runner says of its load; `variant` how its run differs from what was asked for; `load` the
    seconds that are left of its load, or that it would take, None if that was never measured."""

    names: Mapping[RunnerKey, str]
    stage: str = ""
    variant: str = ""
    load: float | None = None


@dataclass(frozen=True, slots=True)
class _Assessment:
    """`seconds` until the request, or the next one, has its runner, None if that cannot be said."""

    state: str
    reason: str
    waiting_for: Obstacle | None = None
    seconds: float | None = None
    victims: tuple[RunnerKey, ...] = ()


def outlook(state: State, group: Group, now: float) -> Outlook:
    """For `group`, as if no other waited for room; loads that others wait for stay. That the model is paused, or has to
    wait after a failure, does not count."""
    alone = _alone(state, group, now)
    actions = plan(alone, now)
    if (error := _refusal(actions, group.key)) is not None:
        unpinned = replace(alone, slots=tuple([slot._replace(pinned=False) for slot in state.slots]))
        return Outlook(error=error, pinned=_refusal(plan(unpinned, now), group.key) is None)
    if (start := _start(actions, group.key)) is not None:
        return Outlook(start, at_once=True)
    victims = tuple([a.key for a in actions if isinstance(a, Stop) and a.reason is Reason.ROOM])
    gone = {*victims, *(slot.key for slot in state.slots if slot.phase in _LEAVING)}
    stay = tuple([slot for slot in state.slots if slot.key not in gone])
    start = _start(plan(replace(alone, slots=stay), now), group.key)
    return Outlook(start, victims=victims)


def fit(state: State, group: Group, names: Mapping[RunnerKey, str], now: float) -> FitForecast:
    """Would the group's model get its memory now, and how."""
    look, slot, name = outlook(state, group, now), _slot(state, group.key), group.name
    if slot is not None and slot.phase in (Phase.STARTING, Phase.READY):
        fits, reason = Fitting.NOW, f"{name} is loaded"
    elif look.error is not None:
        fits, reason = Fitting.NEVER, str(look.error)
    elif isinstance(look.start, Start) and look.start.variant:
        fits, reason = Fitting.SPLIT, f"{name} fits in a smaller way than the one that was asked for"
    elif look.at_once:
        fits, reason = Fitting.NOW, f"{name} fits into what is free"
    else:
        fits, reason = Fitting.AFTER_EVICTION, f"{name} fits once {_making_room(state, look.victims, names)}"
    return FitForecast(fits, figures(state, group, look.start), [names[key] for key in look.victims], reason)


def explain(state: State, group: Group, about: ExplainContext, now: float) -> Explanation:
    """Where the group's model stands, and what its requests wait for, or the next one would."""
    waiting = [g for g in state.groups if g.waiting]
    first = urgent(waiting, state.served, state.policy.ageing, now)
    line = [g.key for g in in_line(waiting, first, state.served)]
    look, queued = outlook(state, group, now), group.key in line
    answer = _answer(state, group, about, now, look, queued=queued)
    return Explanation(
        group.name,
        answer.state,
        1 + line.index(group.key) if queued else None,
        answer.waiting_for,
        figures(state, group, look.start),
        [about.names[key] for key in answer.victims],
        None if answer.seconds is None else round(answer.seconds, 1),
        answer.reason,
    )


def _answer(
    state: State, group: Group, about: ExplainContext, now: float, look: Outlook, *, queued: bool
) -> _Assessment:
    name, slot, failure = group.name, _slot(state, group.key), state.failures.get(group.key)
    if group.key.model_id in state.paused:
        return _Assessment(
            "paused", f"{name} is paused: its requests wait for `modelrunner resume {name}`", Obstacle.RESUME
        )
    if slot is not None and slot.phase is Phase.STARTING:
        return _Assessment(
            "starting", f"{name} is loading" + (f": {about.stage}" if about.stage else ""), Obstacle.LOAD, about.load
        )
    if slot is not None and slot.phase is Phase.READY:
        name += f" ({about.variant}, since memory is short)" if about.variant else ""
        if queued:
            return _Assessment(
                "ready", f"{name} is loaded, and others have all the places that its engine has", Obstacle.SLOT
            )
        return _Assessment("ready", f"{name} is loaded and answers at once", seconds=0.0)
    if slot is None and failure is not None and now < failure.until:
        seconds = None if about.load is None else failure.until - now + about.load
        return _Assessment("failed", failures.backing_off(group, failure, now).message, Obstacle.BACKOFF, seconds)
    where = "queued" if queued else str(slot.phase) if slot else "stopped"
    if look.error is not None:
        return _Assessment(where, str(look.error), Obstacle.PIN if look.pinned else Obstacle.MEMORY)
    if not group.needs:
        return _Assessment(where, f"{name} waits for the estimate of its memory", Obstacle.MEMORY)
    sleeps = slot is not None and slot.phase is Phase.SLEEPING
    now_it, then = ("sleeps", "wakes") if sleeps else ("is not loaded", "loads")
    if look.at_once:
        return _Assessment(
            where, f"{name} {now_it}; a request {then} it", Obstacle.LOAD if queued else None, about.load
        )
    what = "waits until" if queued else f"{now_it}; a request would wait until"
    leased = [s for s in state.slots if s.leases and (s.key in look.victims or s.phase in _LEAVING)]
    return _Assessment(
        where,
        f"{name} {what} {_making_room(state, look.victims, about.names)}",
        Obstacle.MEMORY,
        None if leased else about.load,
        (*_leaving(state), *look.victims),
    )


def _making_room(state: State, victims: Sequence[RunnerKey], names: Mapping[RunnerKey, str]) -> str:
    busy = {slot.key for slot in state.slots if slot.leases}
    how = [
        f"{names[key]} has answered its requests" if key in busy else f"{names[key]} is gone" for key in _leaving(state)
    ]
    how += [f"{names[key]} is {'drained' if key in busy else 'evicted'}" for key in victims]
    return " and ".join(how) or "models that are being loaded have answered who waits for them"


def _leaving(state: State) -> tuple[RunnerKey, ...]:
    return tuple([slot.key for slot in state.slots if slot.phase in _LEAVING])


def figures(state: State, group: Group, start: Start | Wake | None) -> Figures:
    """What the group's model needs to be started in that way, what is free, and the budget."""
    memory = Allocation(state.budget, state.slots, group.needs)
    need = start.memory if start else next(iter(group.needs), None)
    return Figures(need, _memory(tuple([max(0, free) for free in memory.free])), _memory(memory.budget))


def _memory(vector: Vector) -> RequiredMemory:
    return RequiredMemory(vector[0], vector[1:])


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
    )


def _slot(state: State, key: RunnerKey) -> Slot | None:
    return next((s for s in state.slots if s.key == key and s.phase is not Phase.ENDED), None)


def _start(actions: Iterable[Action], key: RunnerKey) -> Start | Wake | None:
    return next((a for a in actions if isinstance(a, Start | Wake) and a.key == key), None)


def _refusal(actions: Iterable[Action], key: RunnerKey) -> BaseException | None:
    return next((a.error for a in actions if isinstance(a, Refuse) and a.key == key), None)
