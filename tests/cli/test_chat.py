import json
import os
import pty
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from modelrunner.cli.chat import chat
from modelrunner.cli.client import HttpClient
from modelrunner.cli.conversation import Display
from modelrunner.cli.request import SYSTEM, Parameters
from tests.cli.fake_daemon import FakeDaemon, Handler, Status, Text, words
from tests.cli.test_commands import RUNNER
from tests.terminal import Terminal
from tests.waiting import HUNG

CHAT = ("POST", "/v1/chat/completions")
ANSWER = "POST /v1/chat/completions"


def converse(daemon: FakeDaemon, *typed: str) -> None:
    """Types these lines and then Ctrl-D."""
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        keys.send_text("".join(line + "\r" for line in typed) + "\x04")
        chat(HttpClient(daemon.url), Parameters("m"), Display())


def asked(daemon: FakeDaemon) -> list[list[str]]:
    """The texts of the messages of each request."""
    return [[message["content"] for message in body["messages"]] for body in daemon.asked(*CHAT)]


def test_the_conversation_grows(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers[ANSWER] = [words("one"), words("two")]
    converse(daemon, "first", "", "second")
    assert asked(daemon) == [["first"], ["first", "one", "second"]]
    assert capsys.readouterr().out == "one\ntwo\n"


def test_clear_forgets_and_bye_leaves(daemon: FakeDaemon) -> None:
    daemon.answers[ANSWER] = words("one")
    converse(daemon, "first", "/clear", "second", "/bye", "third")
    assert asked(daemon) == [["first"], ["second"]]


def test_three_quotes_hold_several_lines(daemon: FakeDaemon) -> None:
    daemon.answers[ANSWER] = words("one")
    converse(daemon, '"""a', "", 'b"""', "/clear", '"""/etc is?"""')
    assert asked(daemon) == [["a\n\nb"], ["/etc is?"]]


def test_parameters_are_set_shown_and_taken_back(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers[ANSWER] = words("one")
    sets = ["system Be brief.", "temperature 0.5", "max_tokens 9", "seed 3", "keep-alive 1h", "format json", "seed"]
    converse(daemon, *(f"/set {text}" for text in sets), "/set", "q")
    [body] = daemon.asked(*CHAT)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["max_tokens"], body["keep_alive"]) == (0.5, 9, "1h")
    assert body["response_format"] == {"type": "json_object"}
    assert "seed" not in body
    assert "temperature   0.5\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "typed", ["/set temperature hot", "/set format xml", "/set nothing 1", "/set thinking 7", "/no"]
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], typed: str
) -> None:
    daemon.answers[ANSWER] = words("one")
    converse(daemon, typed, "q")
    assert "error: " in capsys.readouterr().err
    assert daemon.asked(*CHAT)[0].keys() == {"model", "messages", "stream", "stream_options"}


def test_timings_are_switched_on(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers[ANSWER] = words("one")
    converse(daemon, "/set verbose on", "q")
    assert "first token:" in capsys.readouterr().err


def test_save_writes_the_conversation_and_nothing_twice(
    daemon: FakeDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answers[ANSWER] = words("ä")
    file = tmp_path / "a talk.json"
    converse(daemon, "/set system S", "q", f"/save {file}", f"/save {file}", "/save", f"/save {tmp_path}/no/file")
    content = json.loads(file.read_text("utf-8"))
    assert content["model"] == "m"
    assert [message["content"] for message in content["messages"]] == ["S", "q", "ä"]
    assert capsys.readouterr().err.count("error: ") == 3


def test_a_tilde_before_no_users_name_is_a_word_like_others(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answers[ANSWER] = [words("one"), words("two")]
    converse(daemon, "a walk of ~20 km", *(f"/{does} ~nobody-here/x" for does in ("save", "load", "set format")), "b")
    assert asked(daemon) == [["a walk of ~20 km"], ["a walk of ~20 km", "one", "b"]]
    assert capsys.readouterr().err.count("error: ") == 3


def test_help_names_every_command(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    converse(daemon, "/?")
    out = capsys.readouterr().out
    assert all(word in out for word in ("/set", "/save", "/clear", "/bye", '"""', "Ctrl-C", "Ctrl-D"))


def test_a_failed_answer_is_said_and_its_question_forgotten(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answers[ANSWER] = [Status(507, message="no room: stop another model"), words("two")]
    converse(daemon, "first", "second")
    assert asked(daemon) == [["first"], ["second"]]
    assert "error: no room: stop another model; see `modelrunner run --help`" in capsys.readouterr().err


def test_what_was_typed_is_kept_for_the_person_alone(daemon: FakeDaemon, folders: Path) -> None:
    daemon.answers[ANSWER] = words("one")
    converse(daemon, "remember me")
    history = folders / "data" / "state" / "chat-history"
    assert "remember me" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def test_a_fifo_in_the_place_of_what_was_typed_is_not_waited_for(daemon: FakeDaemon, folders: Path) -> None:
    daemon.answers[ANSWER] = words("one")
    history = folders / "data" / "state" / "chat-history"
    history.parent.mkdir(parents=True)
    os.mkfifo(history)
    converse(daemon, "hello")
    assert asked(daemon) == [["hello"]]


def test_ctrl_c_at_the_prompt_does_not_leave(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers[ANSWER] = words("one")
    converse(daemon, "half a line\x03whole line")
    assert asked(daemon) == [["whole line"]]
    assert "Ctrl-D leaves" in capsys.readouterr().err


# Makes the terminal the process's own, so that Ctrl-C becomes a signal, and runs the command line.
ON_A_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from modelrunner.cli import main
sys.exit(main())
"""


# Runs the command line as a shell runs a job in the background, and fails once the job is stopped.
IN_THE_BACKGROUND = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
if not (job := os.fork()):
    os.setpgid(0, 0)
    from modelrunner.cli import main
    os._exit(main())
status = os.waitpid(job, os.WUNTRACED)[1]
if os.WIFSTOPPED(status):
    os.kill(job, signal.SIGKILL)
    sys.exit("the job was stopped")
sys.exit(os.waitstatus_to_exitcode(status))
"""


@contextmanager
def on_a_terminal(
    *arguments: str, program: str = ON_A_TERMINAL
) -> Iterator[tuple[Terminal, "subprocess.Popen[bytes]"]]:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    try:
        with subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm"},
            start_new_session=True,
        ) as process:
            try:
                yield Terminal(ours, theirs), process
            finally:
                process.kill()
    finally:
        os.close(ours)
        os.close(theirs)


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(daemon: FakeDaemon) -> None:
    """On a real terminal, where Ctrl-C is a signal: the daemon is left, and what had come is remembered."""
    daemon.answers |= {
        "GET /models/m": {},
        "GET /v1/models/m": {"backend": None},
        ANSWER: [words("half an", hold=Handler.wait_for_client_to_leave), words("whole")],
    }
    with on_a_terminal("run", "m") as (terminal, process):
        terminal.wait_for(">>>")
        terminal.type("first\r")
        terminal.wait_for("half an")
        assert daemon.waits.wait(HUNG)
        terminal.type("\x03")
        assert daemon.left.wait(HUNG)
        terminal.wait_for(">>>")
        terminal.type("second\r")
        terminal.wait_for("whole")
        terminal.wait_for(">>>")
        terminal.type("/bye\r")
        assert process.wait(HUNG) == 0
    assert asked(daemon) == [[SYSTEM, "first"], [SYSTEM, "first", "half an", "second"]]


def test_keys_typed_during_an_answer_do_not_stand_in_it(daemon: FakeDaemon) -> None:
    typed = threading.Event()
    daemon.answers |= {
        "GET /models/m": {},
        "GET /v1/models/m": {"backend": None},
        ANSWER: words("half an", hold=lambda handler: typed.wait(HUNG)),
    }
    with on_a_terminal("run", "m", "first") as (terminal, process):
        terminal.wait_for("half an")
        terminal.type_a_line("typed too early")
        typed.set()
        process.wait(HUNG)
        assert "typed too early" not in terminal.rest()


def test_what_is_typed_during_an_answer_is_the_next_question(daemon: FakeDaemon) -> None:
    typed = threading.Event()
    daemon.answers |= {
        "GET /models/m": {},
        "GET /v1/models/m": {"backend": None},
        ANSWER: [
            words("half an", hold=lambda handler: typed.wait(HUNG)),
            words("second answer"),
            words("third answer"),
        ],
    }
    with on_a_terminal("run", "m") as (terminal, process):
        terminal.wait_for(">>>")
        terminal.type("first\r")
        terminal.wait_for("half an")
        terminal.type_a_line("secomd\x7f\x7fnd")  # corrected before anybody reads it
        terminal.type_a_line("third")
        typed.set()
        terminal.wait_for("second answer")
        terminal.wait_for("third answer")
        terminal.wait_for(">>>")
        terminal.type("\x04")
        assert process.wait(HUNG) == 0
    assert [texts[-1] for texts in asked(daemon)] == ["first", "second", "third"]


def test_an_answer_in_the_background_goes_on(daemon: FakeDaemon) -> None:
    daemon.answers |= {"GET /models/m": {}, "GET /v1/models/m": {"backend": None}, ANSWER: words("the answer")}
    with on_a_terminal("run", "m", "first", program=IN_THE_BACKGROUND) as (terminal, process):
        assert process.wait(HUNG) == 0
        assert "the answer" in terminal.rest()


def test_the_model_is_loaded_while_the_person_writes(daemon: FakeDaemon) -> None:
    loaded = threading.Event()
    daemon.answers["POST /engines/preload"] = replace(words(), hold=lambda handler: loaded.set())
    converse(daemon, "/bye")
    assert loaded.wait(HUNG)


def test_a_full_context_names_the_way_out(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answers[ANSWER] = [words("one"), Status(400, "context_length_exceeded", "the context is full")]
    converse(daemon, "first", "second")
    assert "the context is full; /clear begins a new conversation" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["/set max-tokens -5", "/set keep-alive soon", "/set temperature -1", "/set temperature nan", "/set seed x"]
)
def test_values_that_cannot_be_are_refused(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], line: str) -> None:
    daemon.answers[ANSWER] = words("one")
    converse(daemon, line, "q")
    assert "is not a valid value for" in capsys.readouterr().err
    [body] = daemon.asked(*CHAT)
    assert body.keys() == {"model", "messages", "stream", "stream_options"}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/clera", "did you mean `/clear`?"),
        ("/set tempreature 1", "did you mean `temperature`?"),
        ("/save", "name the file"),
        ("/load", "lists the models"),
    ],
)
def test_what_was_mistyped_is_answered_with_help(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    converse(daemon, line)
    assert told in capsys.readouterr().err


def test_load_goes_on_with_another_model_and_show_tells_about_it(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = {"estimated": {"ram": 0, "vram": [1 << 30]}, "measured": None}
    running = RUNNER | {"models": {"sha256:2": "n"}, "memory": memory}
    daemon.answers |= {
        "GET /models/n": {"id": "sha256:2", "created": 1, "tags": ["n"], "config": {"architecture": "llama"}},
        "GET /engines/ps": [Text(b"[]"), Text(json.dumps([running]).encode())],
        ANSWER: words("one"),
    }
    converse(daemon, "/load n", "/show", "/show", "q", "/exit", "never asked")
    [body] = daemon.asked(*CHAT)
    assert body["model"] == "n"
    told = capsys.readouterr().out
    assert "llama" in told
    assert re.findall("^runs +(.*)", told, re.MULTILINE) == [
        "no; the next question loads it",
        "ready by llama.cpp, context 8192, 1GiB, on device 0",
    ]


def test_what_is_set_is_confirmed(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    converse(daemon, "/set temperature 0.5", "/set temperature", "/set think off", "/set verbose on")
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["temperature", "0.5"],
        ["temperature", "(default)"],
        ["think", "off"],
        ["verbose", "on"],
    ]


@pytest.mark.parametrize("line", ["what is on missing.png?", "/load missing.json", "/load ./missing"])
def test_a_path_that_does_not_exist_is_said(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], line: str) -> None:
    daemon.answers[ANSWER] = words("one")
    converse(daemon, line)
    assert "there is no file missing" in capsys.readouterr().err
    assert asked(daemon) == ([] if line.startswith("/") else [[line]])
