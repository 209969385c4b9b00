"""Saved prompt caches belong to the key that made them: with llama.cpp's own servers, through a whole daemon."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import SMOLLM2, StartDaemon
from tests.e2e.daemons import Daemon

QUESTION = "Continue: " + " ".join(f"river{number}" for number in range(40))


@pytest.fixture
def daemon(make_daemon: StartDaemon, engine: str) -> Iterator[Daemon]:
    daemon = make_daemon(engine)
    daemon.start()
    yield daemon
    daemon.stop()


def made(daemon: Daemon, name: str) -> str:
    answer = daemon.post("/keys", {"name": name})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["text"])


def cached(daemon: Daemon, key: str = "") -> int:
    """The tokens of the question that were not computed again."""
    body = {"model": SMOLLM2, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4, "temperature": 0}
    with daemon.client() as client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def saved(daemon: Daemon) -> set[str]:
    """The files after the run has ended."""
    assert daemon.post("/engines/unload", {"all": True}).status_code == 200
    assert daemon.runners() == []
    return {path.name for path in Path(daemon.data, "state/llama.cpp/slots").rglob("*.slot")}


def test_a_key_gets_back_what_it_has_asked_and_nobody_else_does(daemon: Daemon) -> None:
    kim, lee = made(daemon, "kim"), made(daemon, "lee")
    assert cached(daemon, kim) == 0
    first = saved(daemon)
    assert len(first) == 1

    assert cached(daemon, kim) > 100
    assert cached(daemon, lee) > 100, "the engine that runs is shared"
    assert saved(daemon) == first, "of a run of two nothing is kept, and nothing is lost"

    assert cached(daemon, lee) == 0
    assert len(saved(daemon) - first) == 1, "each has its own"
    assert cached(daemon) == 0, "the owner of the daemon is another one"
    assert len(saved(daemon)) == 3

    rotated = daemon.post("/keys/kim/rotate", {}).json()["text"]
    assert cached(daemon, rotated) > 100
    assert len(saved(daemon)) == 3
    daemon.run("keys", "revoke", "kim")
    assert cached(daemon, made(daemon, "kim")) == 0, "another key of the same name"


def test_before_the_first_key_all_share_what_is_saved(daemon: Daemon) -> None:
    assert cached(daemon) == 0
    assert len(saved(daemon)) == 1
    assert cached(daemon) > 100
    saved(daemon)
    daemon.stop()
    daemon.start()
    assert cached(daemon) > 100
    kim = made(daemon, "kim")
    assert cached(daemon, kim) > 100, "in the engine that runs"
    assert len(saved(daemon)) == 1
    assert cached(daemon, kim) == 0
