"""Files that several runners map are counted once."""

from hypothesis import given
from hypothesis import strategies as st

from modelrunner.scheduler.allocation import Allocation
from modelrunner.scheduler.state import Phase, RunnerId, Slot
from modelrunner.types import Mode, RequiredMemory, RunnerKey

CHAT, EMBED = RunnerKey("llama.cpp", "a", Mode.COMPLETION), RunnerKey("llama.cpp", "a", Mode.EMBEDDING)
OTHER = RunnerKey("llama.cpp", "b", Mode.COMPLETION)


def slot(key: RunnerKey, own: int, shared: int, phase: Phase = Phase.READY) -> Slot:
    return Slot(key, phase, RequiredMemory(own + shared, shared=shared))


def sizes(*slots: Slot) -> list[int]:
    memory = Allocation(RequiredMemory(1000), slots)
    found = [memory.size(slot)[0] for slot in slots]
    assert memory.free[0] == 1000 - sum(found[i] for i, slot in enumerate(slots) if slot.phase is not Phase.ENDED)
    return found


def test_the_second_runner_of_a_model_counts_for_its_own_memory() -> None:
    assert sizes(slot(CHAT, 10, 90), slot(OTHER, 5, 40), slot(EMBED, 20, 90)) == [100, 45, 20]


def test_one_that_is_to_start_needs_only_what_is_not_there() -> None:
    memory = Allocation(RequiredMemory(1000), [slot(CHAT, 10, 60)])
    assert memory.need(RunnerId(EMBED), RequiredMemory(110, shared=90)) == (50,)
    assert memory.need(RunnerId(OTHER), RequiredMemory(45, shared=40)) == (45,)


def test_of_two_starts_of_one_model_the_second_needs_its_own_memory() -> None:
    memory = Allocation(RequiredMemory(125), [])
    assert memory.start(RunnerId(CHAT), RequiredMemory(100, shared=90))
    assert memory.start(RunnerId(EMBED), RequiredMemory(110, shared=90))
    assert memory.free == (5,)


def test_the_next_one_counts_for_the_files_when_the_oldest_has_gone() -> None:
    assert sizes(slot(CHAT, 10, 90, Phase.ENDED), slot(EMBED, 20, 90))[1] == 110
    assert sizes(slot(CHAT, 10, 90, Phase.STOPPING), slot(EMBED, 20, 90))[1] == 20


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 50), st.integers(0, 50)), max_size=8))
def test_the_sum_is_what_each_has_of_its_own_and_every_file_once(runners: list[tuple[str, int, int]]) -> None:
    slots = [slot(CHAT._replace(files=m, revision=i), own, shared) for i, (m, own, shared) in enumerate(runners)]
    files = sum(max((s for m, _, s in runners if m == model), default=0) for model in "ab")
    assert sum(sizes(*slots)) == files + sum(own for _, own, _ in runners)
