"""The way of a model through docker/model-runner's commands, with a real engine (behaviour 12 of the table in
tests/api/test_behaviours.py)."""

from tests.e2e.conftest import StartDaemon
from tests.e2e.test_bad_input import smollm2_file


def test_a_model_is_pulled_listed_run_shown_unloaded_and_removed(make_daemon: StartDaemon, engine: str) -> None:
    daemon = make_daemon(engine, models=False)
    daemon.start()

    def said(*arguments: str) -> str:
        done = daemon.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said("pull", smollm2_file().as_uri(), "--name", "my/own")
    assert "my/own" in said("list")
    assert said("run", "my/own", "--max-tokens", "4", "hello").strip()
    shown = said("ps")
    assert "my/own" in shown
    assert "llama.cpp" in shown
    said("unload", "my/own")
    assert "my/own" not in said("ps")
    said("rm", "-f", "my/own")
    assert "my/own" not in said("list")
