"""What whoever runs a daemon for others asks of it: keys, requests, usage, and what holds for its engines."""

import json
import re
from typing import Any

from tests.cli.conftest import Cli
from tests.cli.fake_daemon import FakeDaemon, Stream
from tests.cli.test_commands import RUNNER, STATUS
from tests.cli.test_commands_screen import NOW

ENTRY: dict[str, Any] = {
    **dict.fromkeys(("family", "route", "error", "backend", "runner", "caller", "key", "peer"), ""),
    **dict.fromkeys(("queued", "loading", "duration", "bytes_in", "bytes_out"), 0),
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"), 0),
    "request_id": "q1",
    "time": "2025-01-01T00:00:00Z",
    "status": 429,
    "model": "m",
    "model_name": "ai/m",
    "first_byte": None,
    "tokens_per_second": None,
}
KEY: dict[str, Any] = {
    "name": "ci",
    "scopes": ["inference", "models"],
    "models": ["ai/*", "hf.co/*"],
    "priority": "batch",
    "requests_per_minute": 60,
    "tokens_per_minute": 5000,
    "concurrency": 4,
    "max_tokens": 10,
    "max_seconds": 2.5,
    "created": "2025-01-01T00:00:00Z",
    "expires": None,
    "expired": False,
}


def test_a_key_with_everything(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["POST /keys"] = {"key": KEY, "text": "mr-text"}
    limits = ["--requests-per-minute", "60", "--tokens-per-minute", "5000", "--concurrency", "4", "--priority", "batch"]
    limits += ["--max-tokens", "10", "--max-seconds", "2.5", "--expires", "30d"]
    models = ("--model", "ai/*", "--model", "hf.co/*")
    assert cli("keys", "create", "ci", "--scope", "inference, models", *models, *limits).out == "mr-text\n"
    [asked] = daemon.asked("POST", "/keys")
    assert asked == {name: KEY[name] for name in asked if name != "expires"} | {"expires": "30d"}
    assert cli("keys", "create", "kim").code == 0
    assert daemon.asked("POST", "/keys")[1] == {
        **dict.fromkeys(asked),
        "name": "kim",
        "scopes": ["inference"],
        "models": [],
        "priority": "normal",
    }


def test_a_key_is_listed_and_gets_a_new_text(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers |= {"POST /keys/ci/rotate": {"key": KEY, "text": "mr-new"}, "GET /keys": [KEY]}
    assert cli("keys", "rotate", "ci").out == "mr-new\n"
    [_, row] = cli("keys", "ls").out.splitlines()
    limits = "60 requests/min, 5000 tokens/min, 4 at once, 10 tokens each, 2.5 s each"
    assert row.split() == ["ci", "inference,models", "ai/*,hf.co/*", *limits.split(), "batch", "never"]


def test_the_last_key_is_revoked_where_that_is_wanted(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers |= {"DELETE /keys/ci": {"revoked": "ci"}, "DELETE /keys/ci?open=true": {"revoked": "ci"}}
    for option, path in (((), "/keys/ci"), (("--open",), "/keys/ci?open=true")):
        assert cli("keys", "revoke", "ci", *option).out == "revoked: ci\n"
        assert len(daemon.asked("DELETE", path)) == 1


def test_requests_are_followed_as_they_end(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["GET /engines/now"] = NOW
    pieces = [f"data: {json.dumps({**ENTRY, 'request_id': id})}\n\n".encode() for id in ("q1", "q2")]
    daemon.answers["GET /engines/requests?model=m&status=429"] = Stream(pieces)
    lines = cli("requests", "-f", "--model", "m", "--status", "429").out.splitlines()
    assert [(line.split()[1:3], line.split()[-1]) for line in lines] == [
        (["429", "ai/m"], "q1"),
        (["429", "ai/m"], "q2"),
    ]
    daemon.answers["GET /engines/requests?status=0&limit=7"] = [{**ENTRY, "status": 0}]
    assert "running" in cli("requests", "--status", "0", "-n", "7").out


def test_usage_is_summed_as_asked(daemon: FakeDaemon, cli: Cli) -> None:
    sums = {"name": "ci", "requests": 3, "prompt_tokens": 30, "completion_tokens": 12, "engine_seconds": 61.0}
    short = {**sums, "name": "kim", "engine_seconds": 0.18}
    daemon.answers["GET /usage?by=key&since=7d"] = [sums, short]
    [head, *rows] = cli("usage", "--by", "key", "--since", "7d").out.splitlines()
    assert head.split()[0] == "KEY"
    assert [row.split() for row in rows] == [["ci", "3", "30", "12", "1m1s"], ["kim", "3", "30", "12", "200ms"]]
    assert json.loads(cli("usage", "--by", "key", "--since", "7d", "--json").out) == [sums, short]


def test_nothing_is_shown_because_nothing_is_kept(daemon: FakeDaemon, cli: Cli) -> None:
    asked = {
        ("requests",): "GET /engines/requests?limit=50",
        ("requests", "-f"): "GET /engines/requests",
        ("usage",): "GET /usage?by=model&since=30d",
    }
    for words, route in asked.items():
        for counted in (True, False):
            daemon.answers |= {
                route: Stream([]) if "-f" in words else [],
                "GET /engines/now": {**NOW, "counted": counted},
            }
            told = cli(*words)
            assert (told.code, "telemetry = true" in told.err) == (0, not counted), words
    assert json.loads(cli("usage", "--json").out) == []


def test_what_holds_for_an_engine_is_said(daemon: FakeDaemon, cli: Cli) -> None:
    gap = "signals are not held: this kernel has Landlock 4"
    daemon.answers |= {
        "GET /engines/ps": [{**RUNNER, "sandbox": {"state": "partial", "layers": ["seccomp"], "gaps": [gap]}}],
        "GET /version": {**STATUS, "sandbox": "Landlock 4, seccomp", "sandboxes": {"r1": f"partial (seccomp); {gap}"}},
    }
    assert "partial" in cli("ps").out.splitlines()[1].split()
    [runner] = json.loads(cli("ps", "--json").out)
    assert runner["sandbox"]["gaps"] == [gap]
    told = cli("status").out
    assert "Landlock 4, seccomp" in told
    assert gap in told


def test_each_device_is_shown_and_a_lost_or_filled_one_is_a_fault(daemon: FakeDaemon, cli: Cli) -> None:
    gib = 1 << 30
    device = {"name": "NVIDIA A30", "address": "0000:01:00.0", "total": 24 * gib, "engines": {"llama.cpp": "CUDA0"}}
    sound = {
        **device,
        "free": 20 * gib,
        "others": gib,
        "budget": 18 * gib,
        "utilization": 7,
        "temperature": 61,
        "fault": "",
        "hides_processes": True,
    }
    filled = {**sound, "free": gib, "budget": 0, "utilization": None, "temperature": None, "hides_processes": False}
    lost = {**filled, "total": 0, "free": 0, "fault": "it does not answer"}
    idle = "Running: llama.cpp 1 (wheel); the NVIDIA card of this machine is idle: `modelrunner install llama.cpp`"
    daemon.answers |= {
        "GET /version": {**STATUS, "devices": [sound, filled, lost]},
        "GET /engines/status": {"llama.cpp": idle},
        "GET /models": [],
    }
    shown = cli("status").out
    assert "NVIDIA A30 (CUDA0 of llama.cpp): 20GiB of 24GiB free, 7 % busy, 61 °C, measured by its free memory" in shown
    assert "NVIDIA A30 (CUDA0 of llama.cpp): not used, it does not answer" in shown
    runner = {**RUNNER, "memory": {"estimated": {"ram": 1, "vram": [2 * gib, 0]}, "measured": {"ram": 1, "vram": []}}}
    daemon.answers["GET /engines/ps"] = [runner]
    rows = [re.split(r" {2,}", line) for line in cli("ps").out.splitlines()[-3:]]
    assert [row[0:1] + row[2:] for row in rows] == [
        ["0", "24GiB", f"{runner['model_name']} 2GiB", "1GiB", "7 % busy, 61 °C, measured by its free memory"],
        ["1", "24GiB", "1GiB"],
        ["2", "0B", "1GiB", "not used, it does not answer"],
    ]
    daemon.answers["GET /engines/ps"] = []
    assert cli("ps").out.splitlines()[-1].endswith("not used, it does not answer")
    found = {each["check"]: each for each in json.loads(cli("doctor", "--json").out)}
    assert [found[f"device {number}"]["state"] for number in range(3)] == ["ok", "warning", "error"]
    assert "other programs fill it" in found["device 1"]["text"]
    engine = found["engine llama.cpp"]
    assert (engine["state"], engine["remedy"].endswith("idle: `modelrunner install llama.cpp`")) == ("warning", True)
