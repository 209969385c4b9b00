"""`login`, `push`, `pull` and `logout` as a person types them, against a registry that wants a password."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.oci.registry import Registry
from tests.pull.models import gguf

Environment = dict[str, str]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    """A machine of its own, whose daemon the commands start."""
    places = {
        "MODELRUNNER_DATA_DIR": "data",
        "MODELRUNNER_CACHE_DIR": "cache",
        "MODELRUNNER_CONFIG": "config/config.toml",
        "DOCKER_CONFIG": "docker",
    }
    made = {**os.environ, **{name: str(tmp_path / place) for name, place in places.items()}, "MODELRUNNER_LISTEN": ""}
    yield made
    run(made, "shutdown")


def run(environment: Environment, *arguments: str, typed: str = "") -> tuple[int, str, str]:
    command = (sys.executable, "-m", "modelrunner", *arguments)
    result = subprocess.run(command, env=environment, input=typed, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout.strip(), result.stderr


def test_a_model_goes_to_a_registry_and_comes_back(locked: Registry, environment: Environment, tmp_path: Path) -> None:
    host, name = locked.host, f"{locked.host}/team/mine:v1"
    login = ("login", host, "--user", "ada", "--password-stdin")
    (tmp_path / "x.gguf").write_bytes(gguf(1 << 20))
    assert run(environment, "package", "--gguf", str(tmp_path / "x.gguf"), "mine")[:2] == (0, "mine")
    code, _, said = run(environment, "push", "mine", name)
    assert (code, "modelrunner login" in said) == (4, True)

    code, _, said = run(environment, *login, typed="wrong\n")
    assert (code, "refuses the user or the password" in said) == (1, True)
    assert run(environment, *login, typed="secret\n") == (0, f"logged in to {host}", "")
    logins = tmp_path / "config" / "logins.json"
    assert (logins.stat().st_mode & 0o777, "secret" in logins.read_text()) == (0o600, False)

    code, pushed, said = run(environment, "push", "mine", name)
    assert (code, pushed.startswith(f"{name}@sha256:")) == (0, True), said
    assert run(environment, "rm", "mine")[0] == 0
    assert run(environment, "pull", name)[:2] == (0, name)
    assert pushed.partition("@")[2] in run(environment, "inspect", name)[1]

    assert run(environment, "logout", host)[:2] == (0, f"logged out of {host}")
    assert run(environment, "logout", host)[0] == 4
    assert run(environment, "pull", f"{host}/team/other")[0] == 4
    log = "".join(file.read_text() for file in (tmp_path / "data" / "logs").rglob("*") if file.is_file())
    assert "secret" not in log


def test_a_model_goes_into_a_file_and_comes_back(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(gguf(1 << 20))
    run(environment, "package", "--gguf", str(tmp_path / "x.gguf"), "mine")
    archive = tmp_path / "mine.tar"
    assert run(environment, "save", "mine", "-o", str(archive))[:2] == (0, "")
    with open(archive, "rb") as standard:
        saved = subprocess.run(
            (sys.executable, "-m", "modelrunner", "save", "mine"), env=environment, capture_output=True, check=True
        )
        assert saved.stdout == standard.read()
    assert run(environment, "save", "nothing", "-o", str(tmp_path / "nothing.tar"))[0] == 4
    assert {path.name for path in tmp_path.iterdir() if ".tar" in path.name} == {"mine.tar"}
    run(environment, "rm", "mine")
    assert run(environment, "load", "-i", str(archive))[:2] == (0, "mine")
    with open(archive, "rb") as standard:
        command = (sys.executable, "-m", "modelrunner", "load", "--name", "again")
        loaded = subprocess.run(command, env=environment, stdin=standard, capture_output=True, text=True, check=True)
    assert loaded.stdout == "again\n"


def test_a_model_is_made_with_a_modelfile(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(gguf(1 << 20))
    (tmp_path / "LICENSE").write_text("MIT\n")
    (tmp_path / "Modelfile").write_text('FROM x.gguf\nSYSTEM "Be kind."\nPARAMETER temperature 0.5\nLICENSE MIT')
    assert run(environment, "create", "kind", "-f", str(tmp_path / "Modelfile"))[:2] == (0, "kind")
    shown = run(environment, "show", "kind")[1]
    assert [word for word in ("Be kind.", "0.5", "MIT") if word not in shown] == []
    (tmp_path / "again").write_text(run(environment, "show", "--modelfile", "kind")[1])
    assert run(environment, "create", "again", "-f", str(tmp_path / "again"))[:2] == (0, "again")
    ids = [run(environment, "show", name)[1].split("tags")[0] for name in ("kind", "again")]
    assert ids[0] == ids[1]
    assert run(environment, "repackage", "kind", "short", "--context-size", "64")[:2] == (0, "short")
    assert "64" in run(environment, "show", "short")[1]
    assert run(environment, "cp", "short", "copied")[:2] == (0, "copied")
    assert run(environment, "create", "x", "-f", str(tmp_path / "LICENSE"))[0] == 1
