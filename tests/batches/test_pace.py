"""How much of a batch goes to the engine together."""

from modelrunner.batches.asking import MOST, Pace


def settled(pace: Pace, each: float) -> int:
    """With an engine that takes 5 ms, and `each` seconds for a line."""
    for _ in range(100):
        pace.note(0.005 + each * pace.group(), pace.group())
    return pace.group()


def test_no_group_takes_the_engine_for_long() -> None:
    """A client of the same model waits for it."""
    pace = Pace()
    assert settled(pace, 0.003) == MOST
    assert settled(pace, 0.02) in range(9, 13), "a quarter of a second"
    assert settled(pace, 10.0) == 1
    assert settled(pace, 0.003) == MOST


def test_the_rest_of_a_batch_says_nothing_about_groups() -> None:
    pace = Pace()
    before = pace.group()
    pace.note(0.001, before - 1)
    assert pace.group() == before
