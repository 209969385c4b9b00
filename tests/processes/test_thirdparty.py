"""tests/thirdparty is a distribution of somebody else's: installed by pip, found by its entry point, and used."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.daemons import Daemon, environment
from tests.fakes import FAKE_ENGINE
from tests.pull.models import gguf

SOURCE = Path(__file__).parents[1] / "thirdparty"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plug-in installed, without the network."""
    source = shutil.copytree(SOURCE, tmp_path_factory.mktemp("source") / "thirdparty")
    site = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--no-compile", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    return site


@pytest.fixture
def with_plugin(site) -> dict[str, str]:
    paths = os.pathsep.join([str(site), str(ROOT), str(ROOT / "backends")])
    return {"PYTHONPATH": paths, "FAKE_ENGINE": str(FAKE_ENGINE)}


def test_it_passes_the_contract_in_a_project_of_its_own(with_plugin, tmp_path):
    """With pytest-asyncio in the mode that a project has by default, and without the options of our conftest."""
    shutil.copy(SOURCE / "contract.py", tmp_path / "test_contract.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_contract.py"],
        cwd=tmp_path,
        env=os.environ | with_plugin | {"PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert "14 passed" in run.stdout


def test_a_daemon_finds_it_and_reaches_its_engine_on_tcp(with_plugin, tmp_path):
    (tmp_path / "config.toml").write_text(f'[backends.fake]\nengine = "{FAKE_ENGINE}"\n')
    (tmp_path / "model.gguf").write_bytes(gguf())
    daemon = Daemon(
        tmp_path / "data",
        tmp_path / "run" / "modelrunner.sock",
        environment(tmp_path / "data", tmp_path / "run") | with_plugin,
    )
    daemon.start()
    try:
        assert daemon.get("/engines/status").json()["fake"] == "Running: fake 1.0"
        packaged = daemon.run("package", "--gguf", str(tmp_path / "model.gguf"), "mine")
        assert packaged.returncode == 0, packaged.stderr
        answer = daemon.post("/engines/fake/v1/chat/completions", {"model": "mine", "messages": [], "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "w0 w1 "
        (runner,) = daemon.runners()
        assert runner["backend_name"] == "fake"
        assert runner["endpoint"].startswith("http://127.0.0.1:")
    finally:
        daemon.stop()


def test_a_mode_a_format_and_an_engine_come_in_one_file(with_plugin, tmp_path):
    """Its body is no JSON, and the same engine again is a value of ten lines."""
    assert len((SOURCE / "modelrunner_bytes.py").read_text().splitlines()) < 120
    value = (SOURCE / "modelrunner_bytes_value.py").read_text().splitlines()
    assert len([line for line in value if line and not line.startswith('"""')]) <= 10
    (tmp_path / "three.shift").write_text("3\n")
    (tmp_path / "config.toml").write_text(f'[backends.fake]\nengine = "{FAKE_ENGINE}"\n')
    (tmp_path / "wrong.shift").write_text("three\n")
    daemon = Daemon(
        tmp_path / "data",
        tmp_path / "run" / "modelrunner.sock",
        environment(tmp_path / "data", tmp_path / "run") | with_plugin,
    )
    daemon.start()
    try:
        refused = daemon.run("package", "--file", str(tmp_path / "wrong.shift"), "wrong")
        assert "one number, not 'three'" in refused.stderr
        packaged = daemon.run("package", "--file", str(tmp_path / "three.shift"), "mine")
        assert packaged.returncode == 0, packaged.stderr
        for backend in ("bytes", "bytes-by-value"):
            path = f"/engines/{backend}/v1/bytes?model=mine"
            answer = daemon.post(path, b"HAL\xff")
            assert (answer.status_code, answer.content) == (200, b"KDO\x02"), answer.text
            assert answer.headers["Content-Type"] == "application/octet-stream"
        assert daemon.post("/v1/bytes?model=mine", b"HAL").content == b"KDO"
        assert {(runner["backend_name"], runner["mode"]) for runner in daemon.runners()} == {
            ("bytes", "bytes"),
            ("bytes-by-value", "bytes"),
        }
    finally:
        daemon.stop()
    daemon.start()
    try:
        [shown] = [model for model in daemon.get("/models").json() if "mine" in str(model)]
        assert shown["config"]["format"] == "shift"
    finally:
        daemon.stop()
