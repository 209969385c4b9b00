"""Commands as their user sees them on a terminal."""

import json
import os
import re
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.cli.conftest import Cli
from tests.cli.fake_daemon import FakeDaemon, Stream, events
from tests.cli.tmux import screen
from tests.waiting import HUNG

GIB = 1 << 30
STATUS = {
    "pid": 1,
    "version": "0.1.0",
    "socket": "/s",
    "listen": "http://127.0.0.1:7",
    "data_dir": "/d",
    "backends": {},
    "memory": {},
}
RUNNER = {
    "id": "r1",
    "backend_name": "llama.cpp",
    "model_name": "my/model",
    "model_id": "sha256:1",
    "mode": "completion",
    "state": "starting",
    "stage": "loading weights",
    "pid": 2,
    "endpoint": "",
    "context_size": 4096,
    "parallel": 1,
    "memory": {"estimated": {"ram": GIB, "vram": [2 * GIB]}},
    "leases": 0,
    "queued": 3,
    "started_at": "2026-01-01T00:00:00Z",
    "last_used": None,
    "expires_at": None,
    "keep_alive": "5m",
    "pinned": False,
    "in_use": False,
    "loading": True,
}
DEVICE = {
    "name": "NVIDIA A30",
    "address": "0000:01:00.0",
    "total": 10 * GIB,
    "free": 7 * GIB,
    "others": GIB,
    "budget": 8 * GIB,
    "engines": {"llama.cpp": "CUDA0"},
    "utilization": 7,
    "temperature": 61,
    "fault": "",
}
NOW: dict[str, Any] = {
    "status": "ready",
    "budget": {"ram": 4 * GIB, "vram": [8 * GIB]},
    "free": {"ram": 3 * GIB, "vram": [8 * GIB]},
    "runners": [RUNNER],
    "waiting": {"other": 2},
    "paused": [],
    "running": 0,
    "requests": [],
    "counted": False,
    "devices": [DEVICE],
}
MODEL = {
    "id": "sha256:1",
    "created": 1,
    "tags": ["my/model"],
    "config": {},
    "capabilities": ["chat"],
    "context_window": 4096,
}


def states(changed: threading.Event, before: dict[str, Any], after: dict[str, Any]) -> Stream:
    """A feed that has the second state once `changed` is set."""

    def sent(state: dict[str, Any]) -> list[bytes]:
        return [f"event: now\ndata: {json.dumps(state)}\n\n".encode()]

    return Stream(sent(before), hold=lambda handler: changed.wait(HUNG), then=sent(after))


@pytest.mark.parametrize("command", [["ps", "--watch"], ["top"]])
def test_the_screen_follows_the_runners(daemon: FakeDaemon, tmp_path: Path, command: list[str]) -> None:
    changed, over = threading.Event(), threading.Event()
    ready = {**NOW, "runners": [{**RUNNER, "state": "ready", "stage": "", "queued": 0, "leases": 1}]}
    feed = states(changed, NOW, ready)
    daemon.answers["GET /engines/now"] = [feed, Stream([], hold=lambda handler: over.wait(HUNG))]
    with screen(tmp_path, *command, columns=120) as terminal:
        terminal.wait_for(r"my/model.*starting \(loading weights")
        changed.set()
        seen = terminal.wait_for(r"my/model.*ready")
        assert "starting" not in seen.rpartition("MODEL")[2]
        terminal.press("C-c")
        over.set()
        assert terminal.ended() == 130


def test_top_has_a_bar_for_each_memory_and_what_waits(daemon: FakeDaemon, tmp_path: Path) -> None:
    over = threading.Event()
    daemon.answers["GET /engines/now"] = states(over, NOW, NOW)
    with screen(tmp_path, "top", columns=120) as terminal:
        seen = terminal.wait_for("other: 2 wait; `modelrunner why other`")
        assert "main memory ████████░░░░░░░░░░░░░░░░░░░░░░ 1GiB of 4GiB" in seen
        assert "device 0    ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░ 0B of 8GiB" in seen
        assert re.search(r"0 +NVIDIA A30 +10GiB +my/model 2GiB +1GiB +7 % busy, 61 °C", seen)
        terminal.press("C-c")
        over.set()
        assert terminal.ended() == 130


def test_modelrunner_alone_shows_five_commands(tmp_path: Path) -> None:
    with screen(tmp_path, columns=120) as terminal:
        seen = terminal.wait_for("help COMMAND")
        assert terminal.ended() == 0
    assert [line.split()[1] for line in seen.splitlines() if line.startswith("  modelrunner")] == [
        *("run", "pull", "list", "ps", "help"),
    ]


def test_a_topic_is_a_page_of_the_documentation(tmp_path: Path) -> None:
    with screen(tmp_path, "help", "memory", columns=120) as terminal:
        assert terminal.ended() == 0
        title = (Path(__file__).parents[2] / "docs" / "memory.md").read_text().splitlines()[0].lstrip("# ")
        terminal.wait_for(f"^{title}$")
    with screen(tmp_path, "help", "memroy") as terminal:
        terminal.wait_for("did you mean `memory`")
        assert terminal.ended() == 2


def test_the_page_is_opened_in_the_browser(daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    daemon.answers["GET /version"] = STATUS
    with screen(tmp_path, "ui") as terminal:
        assert terminal.ended() == 0
        terminal.wait_for("^http://127.0.0.1:7/ui$")
    assert opened.read_text() == "http://127.0.0.1:7/ui\n"


def test_a_search_shows_what_can_be_pulled(daemon: FakeDaemon, tmp_path: Path) -> None:
    found = [{"name": "hf.co/a/b", "downloads": 1200, "likes": 3, "task": "chat", "gated": True}]
    daemon.answers["GET /models/search?q=small+words&format=gguf&limit=20"] = found
    with screen(tmp_path, "search", "small", "words") as terminal:
        assert terminal.ended() == 0
        terminal.wait_for(r"^hf\.co/a/b +1,200 +3 *")


def test_doctor_names_each_fault_with_its_remedy(daemon: FakeDaemon, tmp_path: Path, cli: Cli) -> None:
    damaged = {**MODEL, "damage": "a blob is missing", "config": {}}
    daemon.answers |= {
        "GET /version": {**STATUS, "version": "0.0.1"},
        "GET /engines/status": {"llama.cpp": "Not Installed: no engine"},
        "GET /models": [damaged],
    }
    with screen(tmp_path, "doctor", columns=120, rows=60) as terminal:
        seen = terminal.wait_for("model my/model: `modelrunner pull my/model` heals it")
        assert terminal.ended() == 1
    assert "error    model my/model" in seen
    assert "warning  daemon" in seen
    assert "`modelrunner install llama.cpp` installs it" in seen
    found = {each["check"]: each["state"] for each in json.loads(cli("doctor", "--json").out)}
    assert (found["python"], found["daemon"], found["model my/model"]) == ("ok", "warning", "error")


def test_doctor_looks_at_the_port_that_is_set(folders: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    def port() -> dict[str, str]:
        return next(each for each in json.loads(cli("doctor", "--json").out) if each["check"] == "port")

    assert port()["text"].startswith("none")
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("MODELRUNNER_LISTEN", f"127.0.0.1:{other.getsockname()[1]}")
        assert (port()["state"], "another program" in port()["text"]) == ("warning", True)
    assert port()["state"] == "ok"


def test_a_sound_machine_has_no_error(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers |= {"GET /version": STATUS, "GET /engines/status": {}, "GET /models": []}
    result = cli("doctor", "--json")
    assert (result.code, [f for f in json.loads(result.out) if f["state"] == "error"]) == (0, [])


def test_bench_shows_speeds_and_compares_two_runs(daemon: FakeDaemon, tmp_path: Path, cli: Cli) -> None:
    chunks = [{"choices": [{"delta": {"content": "a"}}]} for _ in range(4)]
    end = {
        "choices": [],
        "usage": {"prompt_tokens": 7, "completion_tokens": 4},
        "timings": {"prompt_per_second": 50.0},
    }
    daemon.answers |= {
        "GET /models/m": {"id": "sha256:1"},
        "GET /v1/models/m": {"backend": None},
        "POST /v1/chat/completions": events(*chunks, end),
    }
    arguments = ["bench", "m", "--concurrency", "1,3", "--rounds", "2", "--tokens", "4", "--prompt", "5"]
    earlier = json.loads(cli(*arguments, "--json").out)
    assert [(step["concurrency"], step["requests"]) for step in earlier["steps"]] == [(1, 2), (3, 6)]
    asked = daemon.asked("POST", "/v1/chat/completions")
    assert len(asked) == 9
    assert len({body["messages"][0]["content"] for body in asked}) == 9
    assert all(body["ignore_eos"] and body["max_tokens"] == 4 for body in asked)
    earlier["steps"][0]["prompt_speed"] = 25.0
    (tmp_path / "old.json").write_text(json.dumps(earlier))
    with screen(tmp_path, *arguments, "--compare", "old.json", columns=120) as terminal:
        assert terminal.ended() == 0
        seen = terminal.wait_for("^m on : 7 tokens in, 4 out")
    assert "50.0 (+100%)" in seen


def test_bench_tunes_by_the_daemon_and_uses_what_is_faster(daemon: FakeDaemon, cli: Cli) -> None:
    text = {"text": "a story", "plain": 10.0, "changed": 21.0, "ratio": 2.1}
    trial = {"what": "n-gram drafts", "kept": True, "texts": [text], "fault": ""}
    other = {"what": "--no-such", "kept": False, "texts": [], "fault": "the engine ended"}
    done = {"drafts": True, "flags": [], "trials": [trial, other], "reason": "faster with n-gram drafts"}
    config = {"model": "m", "effective": {}}
    daemon.answers |= {
        "GET /models/m": {"id": "sha256:1"},
        "GET /v1/models/m": {"backend": None},
        "GET /engines/_configure?model=m": [config],
        "POST /engines/_configure": {},
        "POST /engines/tune": done,
    }
    assert json.loads(cli("bench", "m", "--tune", "--json").out) == done
    config["effective"] = {"speculative": {"ngram": True}}  # chosen by a person
    shown = cli("bench", "m", "--tune")
    assert re.search(r"n-gram drafts +a story +10\.0 +21\.0 +2\.10", shown.out), shown.out
    assert re.search(r"--no-such +it does not start: the engine ended", shown.out), shown.out
    assert "faster with n-gram drafts" in shown.err
    used = daemon.asked("POST", "/engines/_configure")
    assert used == [{"model": "m", "tune": "auto", "speculative": "auto"}, {"model": "m", "tune": "auto"}]


AGENTS = {
    "claude": ["ANTHROPIC_BASE_URL=http://127.0.0.1:7/anthropic", "ANTHROPIC_MODEL=my/model"],
    "codex": ['model_providers.modelrunner.base_url="http://127.0.0.1:7/v1"', 'wire_api="responses"'],
    "opencode": [
        '"baseURL": "http://127.0.0.1:7/v1"',
        '"limit": {"context": 65536, "output": 16384}',
        '"model": "modelrunner/my/model"',
    ],
    "aider": ["OPENAI_API_BASE=http://127.0.0.1:7/v1", "--model openai/my/model"],
    "goose": [
        "OPENAI_HOST=http://127.0.0.1:7 ",
        "GOOSE_FAST_MODEL=my/model GOOSE_CONTEXT_LIMIT=65536",
        "goose session",
    ],
    "continue": ['"apiBase": "http://127.0.0.1:7/v1"', "cn --config"],
    "zed": ['"api_url": "http://127.0.0.1:7/v1"', '"max_tokens": 65536'],
    "open-webui": ["OPENAI_API_BASE_URL=http://127.0.0.1:7/v1", "open-webui serve"],
    "env": ["export OPENAI_BASE_URL=http://127.0.0.1:7/v1", "export OLLAMA_HOST=http://127.0.0.1:7", "OLLAMA_API_KEY="],
}


@pytest.fixture
def agents(daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and programs that print what they are given."""
    model = MODEL | {"capabilities": ["chat", "tools"], "context_window": 65536}
    daemon.answers |= {"GET /version": STATUS, "GET /models": [model], "GET /models/my%2Fmodel": model}
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name in ("claude", "zed"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\necho "$0 $* at $ANTHROPIC_BASE_URL key $ANTHROPIC_API_KEY."\n')
        program.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("agent", AGENTS)
def test_launch_shows_what_it_would_write_and_start(agents: Path, cli: Cli, agent: str) -> None:
    result = cli("launch", agent, "--dry-run")
    assert result.code == 0
    assert all(word in result.out for word in AGENTS[agent])
    assert not (agents / "config").exists()
    assert not (agents / "data" / "launch").exists()


def test_launch_starts_the_agent_on_the_terminal(agents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "another")
    with screen(agents, "launch", "claude", "--model", "my/model", "--", "--continue", columns=160) as terminal:
        terminal.wait_for(r"claude --continue at http://127.0.0.1:7/anthropic key \.")
        assert terminal.ended() == 0


def test_launch_takes_a_preset_for_a_window_that_is_too_small(agents: Path, daemon: FakeDaemon, cli: Cli) -> None:
    small = MODEL | {"capabilities": ["chat", "tools"], "context_window": 8192}
    large = small | {"context_window": 32768}
    preset, fit = "launch%2Fclaude-my-model", {"free": {"ram": 1}, "budget": {"ram": 1}, "would_evict": []}
    daemon.answers |= {
        "GET /models/my%2Fmodel": small,
        "POST /models/my%2Fmodel/repackage": {"message": "", "source": "", "target": ""},
        f"GET /models/{preset}": large,
        f"GET /models/{preset}/fit": fit | {"fits": "now", "needed": {"ram": 1}, "reason": ""},
        f"DELETE /models/{preset}": [],
    }
    result = cli("launch", "claude", "--model", "my/model")
    assert result.code == 1
    assert "needs a window of 32,768 tokens, and my/model has 8,192: with --yes" in result.err
    assert "see `modelrunner launch --help`" in result.err
    assert "ANTHROPIC_MODEL=launch/claude-my-model" in cli("launch", "claude", "--model", "my/model", "--dry-run").out
    assert daemon.asked("POST", "/models/my%2Fmodel/repackage") == []
    with screen(agents, "launch", "claude", "--model", "my/model", columns=160) as terminal:
        terminal.wait_for("Start it with the preset launch/claude-my-model")
        terminal.type("y")
        terminal.wait_for("claude  at http://127.0.0.1:7/anthropic")
        assert terminal.ended() == 0
    asked = daemon.asked("POST", "/models/my%2Fmodel/repackage")
    assert asked == [{"target": "launch/claude-my-model", "context_size": 32768}]
    daemon.answers[f"GET /models/{preset}/fit"] = fit | {"fits": "never", "needed": None, "reason": "it needs 9 GiB"}
    result = cli("launch", "claude", "--model", "my/model", "--yes")
    assert (result.code, len(daemon.asked("DELETE", f"/models/{preset}"))) == (1, 1)
    assert "it needs 9 GiB" in result.err


def test_launch_offers_the_largest_of_several_models_that_fits(agents: Path, daemon: FakeDaemon, cli: Cli) -> None:
    fit = {"free": {"ram": 1}, "budget": {"ram": 1}, "would_evict": [], "reason": ""}
    models = {
        "a/small": ("now", 1),
        "a/large": ("after_eviction", 2),
        "a/huge": ("never", 3),
        "launch/claude-x": ("now", 9),
    }
    listed = [MODEL | {"tags": [name], "capabilities": ["chat", "tools"], "context_window": 65536} for name in models]
    daemon.answers["GET /models"] = listed
    for name, (fits, needed) in models.items():
        daemon.answers[f"GET /models/{quote(name, safe='')}/fit"] = fit | {"fits": fits, "needed": {"ram": needed}}
    result = cli("launch", "claude")
    assert result.code == 1
    assert "a/small, a/large, a/huge can work with claude, and a/large is the largest of them that fits" in result.err
    assert "with --yes it starts with a/large" in result.err
    with screen(agents, "launch", "claude", columns=160) as terminal:
        terminal.wait_for("Start it with a/large?")
        terminal.type("y")
        terminal.wait_for("claude  at http://127.0.0.1:7/anthropic")
        assert terminal.ended() == 0
    assert "ANTHROPIC_MODEL=a/large" in cli("launch", "claude", "--dry-run").out


def test_launch_refuses_a_model_that_cannot_do_it(agents: Path, daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["GET /models/my%2Fmodel"] = MODEL
    result = cli("launch", "claude", "--model", "my/model")
    assert result.code == 1
    assert "chat template has no tools" in result.err
    assert "of the models here my/model can do it: `modelrunner launch claude --model my/model`" in result.err
    short = MODEL | {"capabilities": ["chat", "tools"], "config": {"context_size": 8192}}
    daemon.answers |= {"GET /models/my%2Fmodel": short, "GET /models": [short]}
    result = cli("launch", "claude")
    assert result.code == 1
    assert "was trained for 8,192 tokens, and the first question needs 32,768" in result.err
    assert "none of the models here can do it: `modelrunner pull hf.co/" in result.err


def test_launch_keeps_a_copy_and_the_other_settings(agents: Path) -> None:
    settings = agents / "config" / "zed" / "settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"theme": "mine", "language_models": {"ollama": {}}}')
    with screen(agents, "launch", "zed", columns=200) as terminal:
        terminal.wait_for("^wrote")
        assert terminal.ended() == 0
    found = json.loads(settings.read_text())
    assert found["theme"] == "mine"
    assert set(found["language_models"]) == {"ollama", "openai_compatible"}
    [copy] = settings.parent.glob("settings.json.before-modelrunner-*")
    assert json.loads(copy.read_text()) == {"theme": "mine", "language_models": {"ollama": {}}}


def test_launch_keeps_a_link(agents: Path) -> None:
    settings = agents / "config" / "zed" / "settings.json"
    settings.parent.mkdir(parents=True)
    target = agents / "dotfiles.json"
    target.write_text('{"theme": "mine"}')
    settings.symlink_to(target)
    with screen(agents, "launch", "zed", columns=200) as terminal:
        terminal.wait_for("^wrote")
        assert terminal.ended() == 0
    assert settings.readlink() == target
    assert set(json.loads(target.read_text())) == {"theme", "language_models"}


def test_launch_leaves_a_file_that_it_cannot_read(agents: Path, cli: Cli) -> None:
    settings = agents / "config" / "zed" / "settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text("// mine\n{}")
    result = cli("launch", "zed")
    assert (result.code, settings.read_text()) == (1, "// mine\n{}")
    assert "add {" in result.err


def test_an_agent_that_is_not_installed_changes_nothing(agents: Path, cli: Cli) -> None:
    result = cli("launch", "continue")
    assert result.code == 1
    assert "cn is not installed" in result.err
    assert not (agents / "data" / "launch").exists()


def test_a_daemon_of_another_version_is_named_with_the_command(
    daemon: FakeDaemon, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the daemon of this data directory, which the command could have started."""
    monkeypatch.delenv("MODELRUNNER_HOST")
    monkeypatch.setenv("MODELRUNNER_RUNTIME_DIR", str(Path(daemon.url.removeprefix("unix://")).parent))
    socket = Path(daemon.url.removeprefix("unix://"))
    socket.rename(socket.with_name("modelrunner.sock"))
    daemon.answers |= {"GET /models": [], "GET /health": {**daemon.answers["GET /health"], "version": "0.0.1"}}
    assert "version 0.0.1" in cli("list").err
    assert "`modelrunner shutdown`" in cli("list").err
