"""Files that several runners map are counted once."""

from hypothesis import given
from hypothesis import strategies as st

from modelrunner.scheduler.room import counted_once
from modelrunner.scheduler.state import Group, Phase, Request, Slot
from modelrunner.types import Mode, RequiredMemory, RunnerKey

CHAT, EMBED = RunnerKey("llama.cpp", "a", Mode.COMPLETION), RunnerKey("llama.cpp", "a", Mode.EMBEDDING)
OTHER = RunnerKey("llama.cpp", "b", Mode.COMPLETION)


def slot(key: RunnerKey, own: int, shared: int, phase: Phase = Phase.READY) -> Slot:
    return Slot(key, phase, RequiredMemory(own + shared, shared=shared))


def group(key: RunnerKey, own: int, shared: int) -> Group:
    return Group(key, (Request(1, 0.0),), (RequiredMemory(own + shared, shared=shared),))


def test_the_second_runner_of_a_model_counts_for_its_own_memory() -> None:
    slots, _ = counted_once([slot(CHAT, 10, 90), slot(OTHER, 5, 40), slot(EMBED, 20, 90)], [])
    assert [s.memory.ram for s in slots] == [100, 45, 20]


def test_one_that_is_to_start_needs_only_what_is_not_there() -> None:
    groups = [group(EMBED, 20, 90), group(OTHER, 5, 40)]
    _, lighter = counted_once([slot(CHAT, 10, 60)], groups)
    assert [g.needs[0].ram for g in lighter] == [50, 45]


def test_the_next_one_counts_for_the_files_when_the_oldest_has_gone() -> None:
    slots, _ = counted_once([slot(CHAT, 10, 90, Phase.ENDED), slot(EMBED, 20, 90)], [])
    assert slots[1].memory.ram == 110
    slots, _ = counted_once([slot(CHAT, 10, 90, Phase.STOPPING), slot(EMBED, 20, 90)], [])
    assert slots[1].memory.ram == 20


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 50), st.integers(0, 50)), max_size=8))
def test_the_sum_is_what_each_has_of_its_own_and_every_file_once(runners: list[tuple[str, int, int]]) -> None:
    slots = [slot(CHAT._replace(model_id=m, revision=i), own, shared) for i, (m, own, shared) in enumerate(runners)]
    once, _ = counted_once(slots, [])
    files = sum(max((s for m, _, s in runners if m == model), default=0) for model in "ab")
    assert sum(s.memory.ram for s in once) == files + sum(own for _, own, _ in runners)
