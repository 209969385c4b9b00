"""What a run puts outside the engine's folders goes with it."""

import tempfile
from pathlib import Path

import pytest

from modelrunner_vllm.environment import Scratch


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    for name in ("tmp", "shm"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp", tmp_path / "shm"


def left(places: tuple[Path, Path]) -> list[str]:
    return [path.name for place in places for path in place.iterdir()]


def test_a_run_leaves_nothing(places: tuple[Path, Path]) -> None:
    scratch = Scratch(Path("/data/engines"), places[1])
    with scratch.run() as run:
        (run.folder / "socket").touch()
        for name in (f"{run.shared_prefix}-1a", f"sem.{run.shared_prefix}-xy", "psm_of_somebody_else"):
            (places[1] / name).touch()
        assert len(f"/tmp/{run.folder.name}/") + 36 < 108  # of a socket that vLLM names by a UUID
    assert left(places) == ["psm_of_somebody_else"]


def test_a_later_daemon_clears_what_a_killed_one_left(places: tuple[Path, Path]) -> None:
    mine, other = (Scratch(Path(data), places[1]) for data in ("/data/engines", "/other/engines"))
    with mine.run() as run, other.run() as theirs:
        for each in (run, theirs):
            (places[1] / f"{each.shared_prefix}-1a").touch()
        Scratch(Path("/data/engines"), places[1]).sweep()
        assert sorted(left(places)) == sorted([theirs.folder.name, f"{theirs.shared_prefix}-1a"])
