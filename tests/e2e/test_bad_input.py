"""What is wrong with a request, a file or the machine is said, and nothing else suffers."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelrunner.config.locations import Locations
from tests.e2e.conftest import PREPARED, SMOLLM2, StartDaemon
from tests.e2e.daemons import Daemon


def error_of(answer: object) -> dict[str, object]:
    body = answer.json()  # type: ignore[attr-defined]
    assert set(body) == {"error", "request_id"}
    assert {"message", "type", "param", "code"} <= set(body["error"])
    return body["error"]  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def unharmed(daemon: Daemon) -> Iterator[None]:
    """After everything: the daemon answers, and has the models that it had."""
    before = daemon.get("/models").json()
    yield
    assert daemon.get("/models").json() == before
    assert daemon.chat(SMOLLM2, max_tokens=2).status_code == 200


def test_an_unknown_model(daemon: Daemon) -> None:
    answer = daemon.chat("no-such-model")
    assert answer.status_code == 404
    assert "modelrunner list" in str(error_of(answer)["message"])
    done = daemon.run("inspect", "no-such-model")
    assert done.returncode == 4
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [(b'{"model": "x"', None), (b"[]", None), (b"{}", "model"), (b'{"model": 7}', "model"), (b"", None)],
)
def test_a_body_that_is_no_request(daemon: Daemon, body: bytes, param: str | None) -> None:
    answer = daemon.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


def smollm2_file() -> Path:
    blobs = (Locations.find().cache / PREPARED / "data" / "blobs" / "sha256").iterdir()
    return next(blob for blob in blobs if 90 << 20 < blob.stat().st_size < 110 << 20)


def test_a_truncated_gguf(daemon: Daemon, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    with smollm2_file().open("rb") as whole:
        cut.write_bytes(whole.read(8 << 20))
    done = daemon.run("package", "--gguf", str(cut), "my/cut")
    assert done.returncode == 1
    assert "invalid model" in done.stderr


def test_an_architecture_that_the_engine_refuses(daemon: Daemon, tmp_path: Path) -> None:
    strange = tmp_path / "strange.gguf"
    # As long as the name it replaces, so that every offset in the file stays right.
    strange.write_bytes(smollm2_file().read_bytes().replace(b"llama", b"zzyzx"))
    assert daemon.run("package", "--gguf", str(strange), "my/strange").returncode == 0
    try:
        answer = daemon.chat("my/strange")
        assert answer.status_code == 502
        assert "zzyzx" in str(error_of(answer)["message"])
        again = daemon.chat("my/strange")
        assert again.status_code == 503
        assert int(again.headers["Retry-After"]) >= 1
    finally:
        assert daemon.run("rm", "my/strange").returncode == 0


def test_a_missing_engine_is_installed_for_the_first_request(make_daemon: StartDaemon) -> None:
    bare = make_daemon(None)
    bare.start()
    assert bare.get("/engines/status").json()["llama.cpp"].startswith("Not Installed")
    assert bare.chat(SMOLLM2, max_tokens=1).status_code == 200
    assert bare.get("/engines/status").json()["llama.cpp"].startswith("Running")
    bare.stop()


def mounted(folder: Path, size: str) -> bool:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_full_disk(make_daemon: StartDaemon, tmp_path: Path) -> None:
    small = make_daemon(None, models=False)
    if not mounted(small.data, "48m"):
        pytest.skip("a small file system cannot be mounted here: it takes root")
    try:
        small.start()
        file = smollm2_file()
        before = small.get("/models").json()
        done = small.run("package", "--gguf", str(file), "my/model")
        assert done.returncode == 1
        assert "disk" in done.stderr
        answer = small.post("/models/create", {"from": f"file://{file}", "name": "my/model"})
        assert answer.status_code == 507 or "insufficient_disk" in answer.text
        assert small.get("/models").json() == before
        small.stop()
    finally:
        subprocess.run(["umount", str(small.data)], check=True)


def test_what_the_engine_was_made_from_is_named(daemon: Daemon, engine: str) -> None:
    assert f"({engine})" in daemon.get("/engines/status").json()["llama.cpp"]
