"""The table of the phases of a runner's process."""

import itertools
from pathlib import Path

import pytest

from modelrunner.engine.localrunner import LocalRunner, ProcessPhase
from tests.fakes import FakeBackend, fake_key, fake_launch, fake_spec

STARTING, READY, STOPPING = ProcessPhase
WAYS = {STARTING: [], READY: [READY], STOPPING: [READY, STOPPING]}
ALLOWED = {(STARTING, READY), (STARTING, STOPPING), (READY, STOPPING)}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(ProcessPhase, ProcessPhase)))
def test_every_change_is_allowed_or_raises_with_the_history(
    tmp_path: Path, before: ProcessPhase, after: ProcessPhase
) -> None:
    backend, spec = FakeBackend(tmp_path), fake_spec(tmp_path)
    launch = fake_launch(tmp_path / "run")
    runner = LocalRunner(backend, spec, fake_key(spec, backend), launch, id="r1", folder=tmp_path / "run")
    for phase in WAYS[before]:
        runner.become(phase)
    if (before, after) in ALLOWED:
        runner.become(after)
        assert runner.process_phase is after
        return
    history = " -> ".join([STARTING, *WAYS[before]])
    with pytest.raises(RuntimeError, match=f"{history} .*cannot become {after}"):
        runner.become(after)
    assert runner.process_phase is before
