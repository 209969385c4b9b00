"""What goes on, and what stays in memory, as the command line tells it."""

import json
import sys
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.cli.fake_daemon import FakeDaemon, Status, Stream, lines
from tests.cli.test_output import Terminal

EVENT = {
    "id": 7,
    "event": "evict",
    "time": "2025-01-01T00:00:00.000Z",
    "runner": "r1",
    "model": "a",
    "reason": "b needs the room",
    "details": {"room_for": "b"},
}
WHY = {
    "model": "b",
    "state": "queued",
    "position": 2,
    "waiting_for": "memory",
    "needed": {"ram": 3 << 20, "vram": [1 << 20]},
    "free": {"ram": 1 << 20, "vram": []},
    "budget": {"ram": 4 << 20, "vram": []},
    "victims": ["a"],
    "expected_seconds": 4.0,
    "reason": "b waits until a is gone",
    "events": [EVENT],
}
FIT = {
    "fits": "after_eviction",
    "needed": {"ram": 3 << 20, "vram": []},
    "free": {"ram": 1 << 20, "vram": []},
    "budget": {"ram": 4 << 20, "vram": []},
    "would_evict": ["a"],
    "reason": "b fits once a is evicted",
    "disk": {"needed": 5 << 20, "free": 9 << 20},
}


def test_why_is_a_sentence_with_the_figures(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["GET /engines/why?model=b"] = WHY
    result = cli("why", "b")
    assert result.out.startswith("b waits until a is gone\n")
    for part in ("memory", "3MiB, 1MiB on device 0", "about 4s", "position", "evict a (r1): b needs the room"):
        assert part in result.out
    assert json.loads(cli("why", "b", "--json").out) == WHY


def test_fit_names_what_would_go_and_the_disk(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["GET /models/hf.co%2Fo%2Fb/fit"] = FIT
    result = cli("fit", "hf.co/o/b")
    assert result.out.startswith("b fits once a is evicted\n")
    for part in ("after other models have made room", "would evict", "5MiB", "9MiB"):
        assert part in result.out
    assert json.loads(cli("fit", "hf.co/o/b", "--json").out) == FIT


def test_events_come_as_lines(daemon: FakeDaemon, cli: Cli) -> None:
    pieces = [b": alive\n\n", f"id: 7\nevent: evict\ndata: {json.dumps(EVENT)}\n\n".encode()]
    daemon.answers["GET /engines/events?since=0"] = Stream(pieces)
    daemon.answers["GET /engines/events?model=a"] = Stream(pieces)
    told = cli("events", "--since", "0").out
    assert told.count("\n") == 1
    assert "evict      a (r1): b needs the room" in told
    assert json.loads(cli("events", "--model", "a", "--json").out) == EVENT


def test_events_that_are_waited_for_are_announced(
    daemon: FakeDaemon, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.answers |= {f"GET /engines/events{query}": Stream([b": alive\n\n"]) for query in ("", "?since=0")}
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert cli("events", "--since", "0").code == 0
    assert screen.getvalue() == ""
    assert cli("events").code == 0
    assert "--since 0 shows the past ones" in screen.getvalue()


@pytest.mark.parametrize("action", ["pin", "unpin", "pause", "resume"])
def test_each_of_several_models_is_asked_for(daemon: FakeDaemon, cli: Cli, action: str) -> None:
    daemon.answers[f"POST /engines/{action}"] = {"model": "m", "state": "ready", "message": "m is what you want"}
    result = cli(action, "a", "b")
    assert (result.code, result.out) == (0, "m is what you want\n" * 2)
    assert daemon.asked("POST", f"/engines/{action}") == [{"model": "a"}, {"model": "b"}]


def test_preload_shows_how_far_it_is(daemon: FakeDaemon, cli: Cli) -> None:
    progress = {"type": "progress", "message": "Loading m: weights", "phase": "weights"}
    daemon.answers["POST /engines/preload"] = lines(progress, {"type": "success", "message": "m is loaded"})
    result = cli("preload", "m")
    assert (result.code, result.out, result.err) == (0, "m is loaded\n", "Loading m: weights\nm is loaded\n")
    assert daemon.asked("POST", "/engines/preload") == [{"model": "m"}]


MISSING = Status(404, "model_not_found", "no such model")
USED = Status(409, "in_use", "it is in use: wait")


@pytest.mark.parametrize(("first", "third", "code"), [(MISSING, MISSING, 4), (USED, USED, 1), (MISSING, USED, 1)])
def test_one_that_fails_keeps_the_others_from_nothing(
    daemon: FakeDaemon, cli: Cli, first: Any, third: Any, code: int
) -> None:
    daemon.answers |= {"DELETE /models/a": first, "DELETE /models/b": [{"Deleted": "b"}], "DELETE /models/c": third}
    result = cli("rm", "a", "b", "c")
    assert (result.code, result.out) == (code, "Deleted: b\n")
    assert [line.partition("; `")[0] for line in result.err.splitlines()] == [
        f"error: {failed.message}" for failed in (first, third)
    ]


def test_no_model_is_tried_once_the_daemon_is_gone(cli: Cli, folders: object) -> None:
    result = cli("rm", "a", "b", "--host", "unix:///nowhere/d.sock")
    assert result.code == 3
    assert result.err.count("\n") == 1
