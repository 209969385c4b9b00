"""Clusters that cannot be used: each is a sentence in the lists, and this machine's models go on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.rig import Rig
from tests.e2e.daemons import until


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, nodes=("b",), models=("m",))
    yield made
    made.close()


@pytest.mark.parametrize("fault", ["nothing listens at 127.0.0.1:1", "this is Ray 2.9.0, and the cluster is of 2.60.0"])
def test_a_ray_that_cannot_be_asked(rig: Rig, fault: str) -> None:
    rig.configure("100MiB", '[cluster]\nray_address = "127.0.0.1:1"', rig.folder / "config.toml")
    (rig.ray / "fault").write_text(fault)
    rig.head.start()
    rig.add_models()
    assert rig.ask("m").status_code == 200
    problem = until(lambda: fault in (told := rig.head.get("/hosts").json()["problem"]) and told)
    assert problem == f"Ray at 127.0.0.1:1 does not answer, or is another version: {fault}"
    status = rig.head.run("status").stdout
    assert fault in status
    assert rig.ask("m").status_code == 200
    assert rig.states() == {}


@pytest.mark.nightly
def test_a_machine_has_one_head(rig: Rig, tmp_path: Path) -> None:
    """The second head says why it has no host, and the first one's host goes on."""
    rig.start()
    rig.add_models()
    assert rig.ask("m").status_code == 200
    (tmp_path / "other").mkdir()
    other = Rig(tmp_path / "other", nodes=(), models=("m",))
    other.head.environment["FAKE_RAY"] = str(rig.ray)
    other.configure("100MiB", '[cluster]\nray_address = "127.0.0.1:1"', other.folder / "config.toml")
    other.head.start()
    try:
        state = until(lambda: other.states().get("b"))
        assert "another head has this machine already" in state
        assert "another head has this machine already" in other.head.run("status").stdout
        other.add_models()
        assert other.ask("m").status_code == 200
    finally:
        other.close()
    assert rig.ask("m").status_code == 200
    assert [runner["host"] for runner in rig.head.runners()] == ["b"]
