"""What a backend's author may use to explain an engine's log."""

from modelrunner.sdk.diagnosis import Cause, Diagnosis

DIAGNOSIS = Diagnosis(
    [
        Cause(r"no room for (\d+) MiB|cannot allocate", "there is no room for {0}", memory=True),
        Cause(r"failed", "it failed: see the log"),
    ],
    [("loading layer", "loading weights"), ("loading", "loading")],
    irrelevant=r"^I ",
)


def test_the_first_cause_that_any_line_shows_wins() -> None:
    assert DIAGNOSIS.explain("E it failed\nE no room for 5 MiB\n") == "there is no room for 5"
    assert DIAGNOSIS.explain("E it failed\n") == "it failed: see the log"
    assert DIAGNOSIS.explain("E cannot allocate\n") == "there is no room for "
    assert DIAGNOSIS.explain("E no room\nE for 5 MiB") is None


def test_a_sentence_without_quotes_has_nothing_of_the_log() -> None:
    assert DIAGNOSIS.explain("E no room for 5 MiB", quotes=False) is None
    assert DIAGNOSIS.explain("E no room for 5 MiB\nE it failed: the secret", quotes=False) == "it failed: see the log"


def test_lines_that_only_inform_show_nothing() -> None:
    assert DIAGNOSIS.explain("I it failed before\nI no room for 5 MiB") is None
    assert not DIAGNOSIS.ran_out_of_memory("I cannot allocate")
    assert DIAGNOSIS.ran_out_of_memory("I cannot allocate\nE cannot allocate")
    assert not DIAGNOSIS.ran_out_of_memory("E it failed")


def test_the_first_stage_that_a_line_announces() -> None:
    lines = ("loading layer 3", "loading", "something else")
    assert [DIAGNOSIS.stage(line) for line in lines] == ["loading weights", "loading", None]
