"""Keys are kept as digests, survive, and fail closed."""

from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path

import pytest

from modelrunner.errors import BadRequest, Conflict, Forbidden, KeyNotFound, RateLimited, StorageFailed, Unauthorized
from modelrunner.keys.allowances import begin_all
from modelrunner.keys.ring import KeyRing, Scope
from tests.fakes import FakeClock


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_survives_and_its_text_is_kept_nowhere(file: Path) -> None:
    made, text = KeyRing(file).create("kim", models=("ai/*",))
    assert text not in file.read_text()
    again = KeyRing(file)
    assert again.find(text).key == made
    assert file.stat().st_mode & 0o077 == 0
    with pytest.raises(Unauthorized):
        again.find(text + "x")


def test_a_rotated_or_revoked_key_is_refused(file: Path) -> None:
    ring = KeyRing(file)
    _, old = ring.create("kim")
    _, new = ring.rotate("kim")
    with pytest.raises(Unauthorized):
        ring.find(old)
    assert ring.find(new).key.name == "kim"
    ring.revoke("kim")
    for each in (ring, KeyRing(file)):
        with pytest.raises(Unauthorized):
            each.find(new)
    with pytest.raises(KeyNotFound):
        ring.revoke("kim")


def test_names(file: Path) -> None:
    ring = KeyRing(file)
    ring.create("kim")
    with pytest.raises(Conflict):
        ring.create("kim")
    for name in ("", "a b", "../x", "k" * 65):
        with pytest.raises(BadRequest):
            ring.create(name)


def test_a_damaged_file_does_not_open_the_daemon(file: Path) -> None:
    KeyRing(file).create("kim")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(StorageFailed, match="is damaged"):
        KeyRing(file)
    assert file.exists()


def test_scopes_models_and_expiry(file: Path) -> None:
    wall = FakeClock(0.0)
    ring = KeyRing(file, wall=wall)
    _, text = ring.create("kim", models=("ai/smol*", "hf.co/*"), age=100.0)
    kim = ring.find(text)
    kim.check(Scope.INFERENCE)
    with pytest.raises(Forbidden):
        kim.check(Scope.ADMIN)
    kim.check_model("ai/smollm2:latest")
    kim.check_model("sha256:1", "hf.co/a/b")
    with pytest.raises(Forbidden):
        kim.check_model("ai/other:latest")
    wall.now = 100.0
    with pytest.raises(Unauthorized, match="has expired"):
        kim.check(Scope.INFERENCE)


def test_patterns_have_no_sign_but_the_star(file: Path) -> None:
    ring = KeyRing(file)
    _, text = ring.create("kim", models=("a[bc]?:latest", "*/smol:*"))
    kim = ring.find(text)
    for name in ("a[bc]?:latest", "x/y/smol:1"):
        kim.check_model(name)
    for name in ("ab1:latest", "A[bc]?:latest", "a[bc]?:latest2", "smol:1", "x/smol"):
        with pytest.raises(Forbidden):
            kim.check_model(name)


def test_limits(file: Path) -> None:
    clock = FakeClock(0.0)
    ring = KeyRing(file, clock=clock)
    _, text = ring.create("kim", requests_per_minute=3, tokens_per_minute=10, concurrency=2)
    kim = ring.find(text).allowance
    for _ in range(2):
        begin_all([kim], 0, clock())
    with pytest.raises(RateLimited, match="at once"):
        begin_all([kim], 0, clock())
    kim.end(0, 0, clock())
    begin_all([kim], 0, clock())
    kim.end(0, 0, clock())
    with pytest.raises(RateLimited, match="3 requests a minute") as refused:
        begin_all([kim], 0, clock())
    assert refused.value.retry_after == pytest.approx(20)
    _, text = ring.rotate("kim")
    with pytest.raises(RateLimited):
        begin_all([ring.find(text).allowance], 0, clock())
    clock.advance(70)
    kim.end(10, 0, clock())
    with pytest.raises(RateLimited, match="10 tokens a minute"):
        begin_all([kim], 9, clock())


def test_changes_at_the_same_time_lose_none(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys.json")
    for number in range(8):
        ring.create(f"old-{number}")
    ring.listener = ip_address("0.0.0.0")
    names = [f"new-{number}" for number in range(8)]
    with ThreadPoolExecutor(16) as threads:
        made = [threads.submit(ring.create, name) for name in names]
        gone = [threads.submit(ring.revoke, f"old-{number}") for number in range(8)]
    for each in (*made, *gone):
        each.result()  # type: ignore[attr-defined]  # of two types of results
    assert sorted(key.name for key in KeyRing(tmp_path / "keys.json")) == names
