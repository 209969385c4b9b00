"""The table of a slot's phases, and the owner of its attributes."""

import ast
import itertools
from pathlib import Path
from typing import Any

import pytest

from modelrunner.scheduler import slots
from modelrunner.scheduler.eventloop import Alarm
from modelrunner.scheduler.queues import Queue, Queues
from modelrunner.scheduler.slots import RunnerSlot, Slots
from modelrunner.scheduler.state import Phase, Reason, RunOption
from modelrunner.types import RequiredMemory, Variant
from tests.scheduler.fakes import target

STARTING, READY, SLEEPING, DRAINING, STOPPING, ENDED = Phase
# The shortest way into each phase.
WAYS = {
    STARTING: [],
    READY: [READY],
    SLEEPING: [READY, SLEEPING],
    DRAINING: [READY, DRAINING],
    STOPPING: [STOPPING],
    ENDED: [ENDED],
}
ALLOWED = {
    (STARTING, READY), (STARTING, DRAINING), (STARTING, STOPPING), (STARTING, ENDED),
    (READY, SLEEPING), (READY, DRAINING), (READY, STOPPING), (READY, ENDED),
    (SLEEPING, STARTING), (SLEEPING, DRAINING), (SLEEPING, STOPPING), (SLEEPING, ENDED),
    (DRAINING, DRAINING), (DRAINING, STOPPING), (DRAINING, ENDED),
    (STOPPING, ENDED),
}  # fmt: skip


def slot(*phases: Phase) -> RunnerSlot:
    runner: Any = None
    wanted = target("a")
    found = RunnerSlot(runner, wanted, Variant(wanted.spec, RequiredMemory(1)), RunOption(RequiredMemory(1)), 100.0)
    for number, phase in enumerate(phases):
        found.become(phase, 101.0 + number)
    return found


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Phase, Phase)))
def test_every_change_of_phase_is_allowed_or_raises_with_the_history(before: Phase, after: Phase) -> None:
    found = slot(*WAYS[before])
    if (before, after) in ALLOWED:
        found.become(after, 200.0)
        assert found.phase is after
        return
    history = " -> ".join([STARTING, *WAYS[before]])
    with pytest.raises(RuntimeError, match=f"{history}> cannot become {after}"):
        found.become(after, 200.0)
    assert found.phase is before


def test_the_times_that_go_with_a_phase() -> None:
    found = slot(READY)
    assert (found.load_seconds, found.ready_at, found.last_used) == (1.0, 101.0, 101.0)
    found.become(SLEEPING, 150.0)
    found.become(STARTING, 160.0)
    found.become(READY, 160.5)
    assert (found.load_began, found.load_seconds, found.ready_at) == (160.0, 1.0, 160.5), "a waking is no load"
    found.become(DRAINING, 161.0, drain=Reason.ROOM, room_for="b")
    found.become(DRAINING, 162.0, drain=Reason.UNLOAD)
    assert (found.drain, found.room_for) == (Reason.UNLOAD, "")


def test_only_its_methods_change_a_slot() -> None:
    """No other module of the scheduler assigns to an attribute of a `RunnerSlot`."""
    own = set(vars(slot()))
    folder = Path(slots.__file__).parent
    changed = [
        f"{file.name}:{node.lineno}"
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in own
        if isinstance(node.value, ast.Name) and node.value.id in ("slot", "found")
    ]
    assert changed == []


@pytest.mark.parametrize(
    ("phase", "waiting", "in_use", "warm"),
    [
        (READY, False, 3, True),
        (READY, True, 0, False),
        (READY, False, 4, False),
        (STARTING, False, 0, False),
        (SLEEPING, False, 0, False),
        (DRAINING, False, 0, False),
        (STOPPING, False, 0, False),
    ],
)
def test_warm_is_ready_unqueued_and_not_overrun(phase: Phase, waiting: bool, in_use: int, warm: bool) -> None:
    found, queues = slot(*WAYS[phase]), Queues()
    runners = Slots(queues, Alarm(lambda: None, lambda: 300.0), lambda: 300.0, lambda used: None)
    runners.add(found)
    found.capacity, found.leases = 4, in_use
    if waiting:
        queues[found.target.key] = Queue(found.target)
    lease = runners.warm(found.target)
    assert (lease is not None) is warm
    assert found.leases == in_use + warm
