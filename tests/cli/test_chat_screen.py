"""The terminal chat as its user sees it: each of its abilities on the screen of a real terminal emulator."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from modelrunner.cli.client import path
from modelrunner.cli.request import STARTER, SYSTEM
from tests.cli.fake_daemon import FakeDaemon, Handler, Status, Stream, Text, events, lines, words
from tests.cli.tmux import MODELRUNNER, Screen, screen
from tests.waiting import HUNG

CHAT = ("POST", "/v1/chat/completions")
ANSWER = "POST /v1/chat/completions"
PROMPT = r"^>>>\s*\Z"
PNG = b"\x89PNG\r\n\x1a\nrest"
MARKDOWN = """# Heading

Some **bold** words and a list:

- one
- two

```python
print("**not bold**")
```

<b>no HTML</b>
"""


@pytest.fixture(autouse=True)
def model(daemon: FakeDaemon) -> None:
    daemon.answers |= {
        "GET /models/m": {"id": "sha256:1", "created": 1, "tags": ["m"], "config": {"architecture": "llama"}},
        "GET /v1/models/m": {"backend": None},
        "GET /engines/ps": [],
        "POST /engines/preload": {},
        ANSWER: words("one"),
    }


def ask(terminal: Screen, line: str, answer: str) -> str:
    """Types a line at the prompt, and returns the screen once the answer and the next prompt are there."""
    prompts = terminal.wait_for(PROMPT).count(">>>")
    terminal.type(line)
    terminal.wait_for(answer)
    terminal.wait_for("^>>>", times=prompts + 1)
    return terminal.wait_for(PROMPT)


def asked(daemon: FakeDaemon) -> list[list[Any]]:
    return [[message["content"] for message in body["messages"]] for body in daemon.asked(*CHAT)]


def test_markdown_is_rendered_as_it_comes_and_can_be_switched_off(daemon: FakeDaemon, tmp_path: Path) -> None:
    pieces = [MARKDOWN[i : i + 5] for i in range(0, len(MARKDOWN), 5)]
    more = threading.Event()
    begun = words(*pieces[:20], hold=lambda handler: more.wait(HUNG), then=words(*pieces[20:]).pieces)
    daemon.answers[ANSWER] = [begun, words(*pieces)]
    with screen(tmp_path, "run", "m") as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("a")
        terminal.wait_for("^Some bold words")
        more.set()
        terminal.wait_for("no HTML")
        seen = terminal.wait_for(PROMPT)
        assert "Some bold words" in seen
        assert " • one\n • two\n" in seen
        assert 'print("**not bold**")' in seen
        assert "<b>no HTML</b>" in seen
        assert "#" not in seen
        assert "```" not in seen
        ask(terminal, "/set markdown off", "")
        assert "Some **bold** words" in ask(terminal, "b", r"```python")


def test_a_long_answer_is_whole_when_it_has_left_the_screen(daemon: FakeDaemon, tmp_path: Path) -> None:
    """Lines above the screen cannot be painted again."""
    lines = [f"{number}. line *{number}*\n" for number in range(1, 61)]
    daemon.answers[ANSWER] = words(*lines)
    with screen(tmp_path, "run", "m", rows=12) as terminal:
        terminal.wait_for(PROMPT)
        seen = ask(terminal, "a", "line 60")
    assert [line.split()[-1] for line in seen.splitlines() if "line" in line] == [str(n) for n in range(1, 61)]


@pytest.mark.parametrize("columns", [50, 120])
@pytest.mark.parametrize("markdown", ["--markdown", "--no-markdown"])
def test_an_answer_goes_on_in_a_terminal_of_another_size(
    daemon: FakeDaemon, tmp_path: Path, markdown: str, columns: int
) -> None:
    before, after = ([f"word-{number} " for number in range(*ends)] for ends in ((0, 40), (40, 99)))
    resized = threading.Event()
    daemon.answers[ANSWER] = words(*before, hold=lambda handler: resized.wait(HUNG), then=words(*after).pieces)
    with screen(tmp_path, "run", "m", markdown, rows=40) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("a")
        terminal.wait_for("word-39")
        terminal.resize(columns)
        resized.set()
        terminal.wait_for("word-98")
        seen = terminal.wait_for(PROMPT).partition(">>> a\n")[2].rstrip(">\n ")
    whole = [word.strip() for word in (*before, *after)]
    if markdown == "--markdown":
        assert seen.split()[-99:] == whole
        assert columns == 50 or len(seen.split()) == 99  # tmux moves lines away when they become more
    else:  # the terminal itself breaks the lines that were there
        assert seen.split()[-50:] == whole[-50:]
        assert "".join(seen.split()) == "".join(whole)
    assert max(map(len, seen.splitlines())) > columns - 15


def test_words_of_errors_and_of_the_help_are_whole(daemon: FakeDaemon, tmp_path: Path) -> None:
    told = "no room is left for m: stop another model with `modelrunner stop MODEL`, or give this one a smaller context"
    daemon.answers[ANSWER] = Status(507, "insufficient_memory", told)
    with screen(tmp_path, "run", "m", columns=44, rows=60) as terminal:
        terminal.wait_for(PROMPT)
        seen = ask(terminal, "q", "smaller")
        assert told in " ".join(seen.split())
        seen = ask(terminal, "/?", "Ctrl-C")
        assert all(word in seen.split() for word in ("system,", "temperature,", "max-tokens,", "conversation", "image"))
        assert max(map(len, seen.splitlines())) < 44


def test_three_quotes_and_a_paste_hold_several_lines(daemon: FakeDaemon, tmp_path: Path) -> None:
    with screen(tmp_path, "run", "m") as terminal:
        terminal.wait_for(PROMPT)
        terminal.type('"""first')
        terminal.wait_for(r"^\.\.\.")
        terminal.type('second"""')
        terminal.wait_for("^one")
        terminal.wait_for(PROMPT)
        terminal.paste("pasted\ntwice")
        terminal.wait_for("twice")
        assert len(daemon.asked(*CHAT)) == 1
        terminal.press("Enter")
        terminal.wait_for("^one", times=2)
    assert [texts[-1] for texts in asked(daemon)] == ["first\nsecond", "pasted\ntwice"]


def test_what_was_typed_in_an_earlier_chat_comes_back(daemon: FakeDaemon, tmp_path: Path) -> None:
    with screen(tmp_path, "run", "m") as terminal:
        terminal.wait_for(PROMPT)
        ask(terminal, "remember me", "one")
        terminal.type("/bye")
        assert terminal.ended() == 0
    with screen(tmp_path, "run", "m") as terminal:
        terminal.wait_for(PROMPT)
        terminal.press("Up", "Up")
        terminal.wait_for("remember me")


def test_parameters_are_set_and_shown(daemon: FakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"type": "object"}')
    with screen(tmp_path, "run", "m", rows=50) as terminal:
        terminal.wait_for(PROMPT)
        lines = ["system Be brief.", "parameter temperature 0.5", "top-k 3", "format s.json", "think off", "verbose on"]
        for line in lines:
            ask(terminal, f"/set {line}", "")
        seen = ask(terminal, "/set", r"^verbose +on")
        assert "temperature   0.5\n" in seen
        assert "format        a JSON schema\n" in seen
        ask(terminal, "q", "first token:")
        ask(terminal, "/show", "^architecture  llama")
    [body] = daemon.asked(*CHAT)
    assert [message["content"] for message in body["messages"]] == ["Be brief.", "q"]
    assert (body["temperature"], body["top_k"]) == (0.5, 3)
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}},
    }
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_conversation_is_saved_cleared_and_loaded(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.answers |= {"GET /models/n": {"id": "sha256:2"}, "GET /v1/models/n": {"backend": None}}
    with screen(tmp_path, "run", "m") as terminal:
        terminal.wait_for(PROMPT)
        ask(terminal, "q", "^one")
        ask(terminal, "/save talk.json", "^saved as talk.json")
        ask(terminal, "/clear", "is forgotten")
        ask(terminal, "/load talk.json", "^2 messages of talk.json; the next question goes to m")
        ask(terminal, "again", "one")
        ask(terminal, "/load n", "^the next question goes to n")
        ask(terminal, "and you", "one")
        ask(terminal, "/load s.txt", "^error: ")
    assert asked(daemon)[-2:] == [[SYSTEM, "q", "one", "again"], [SYSTEM, "q", "one", "again", "one", "and you"]]
    assert [body["model"] for body in daemon.asked(*CHAT)] == ["m", "m", "n"]
    assert json.loads((tmp_path / "talk.json").read_text())["messages"][-1] == {"role": "assistant", "content": "one"}


def test_retry_asks_the_last_question_again(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.answers[ANSWER] = [words("one"), words("two"), words("three")]
    with screen(tmp_path, "run", "m") as terminal:
        terminal.wait_for(PROMPT)
        ask(terminal, "q", "^one")
        ask(terminal, "/retry", "^two")
        ask(terminal, "next", "^three")
    assert asked(daemon) == [[SYSTEM, "q"], [SYSTEM, "q"], [SYSTEM, "q", "two", "next"]]


def test_a_picture_is_named_by_its_path(daemon: FakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "my cat.png").write_bytes(PNG)
    with screen(tmp_path, "run", "m") as terminal:
        terminal.wait_for(PROMPT)
        ask(terminal, r"what is on my\ cat.png and missing.png", "^one")
        assert "with the image my cat.png" in terminal.shows()
    [_, content] = asked(daemon)[0]
    assert content[0] == {"type": "text", "text": "what is on  and missing.png"}
    assert content[1]["image_url"]["url"].startswith("data:image/png;base64,")


def test_a_model_without_eyes_gets_no_picture(daemon: FakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    daemon.answers["GET /models/m"] |= {"capabilities": ["completion", "chat"]}
    with screen(tmp_path, "run", "m", columns=120) as terminal:
        terminal.wait_for(PROMPT)
        ask(terminal, "what is on cat.png?", "^error: m takes no images: `modelrunner list` shows")
        ask(terminal, "hello", "^one")
    assert asked(daemon) == [[SYSTEM, "hello"]]
    with screen(tmp_path, "run", "m", "what?", "--image", "cat.png", columns=120) as terminal:
        terminal.wait_for("^error: m takes no images: `modelrunner list` shows")
        assert terminal.ended() == 1


def test_without_a_model_the_starter_is_offered(daemon: FakeDaemon, tmp_path: Path) -> None:
    starter = {"id": "sha256:1", "created": 1, "tags": [STARTER], "config": {}}
    here = path("models", STARTER)
    daemon.answers |= {
        "GET /models": [],
        f"GET {here}": [*[Status(404, "model_not_found", "not here")] * 3, Text(json.dumps(starter).encode())],
        "POST /models/create": lines({"type": "success", "message": "done", "model": STARTER}),
        f"GET {path('v1', 'models', STARTER)}": {"backend": None},
    }
    with screen(tmp_path, "run", columns=120) as terminal:
        terminal.wait_for(rf"Get the starter model {STARTER} \(93 MB\) and chat with it\? \[Y/n\]:")
        terminal.type("n")
        assert terminal.ended() == 130
    with screen(tmp_path, "run", columns=120) as terminal:
        terminal.wait_for(r"\[Y/n\]:")
        terminal.press("Enter")
        terminal.wait_for(f"^chatting with {STARTER}")
        ask(terminal, "hello", "^one")
    daemon.answers[f"GET {here}"] = starter
    with screen(tmp_path, "run", columns=120) as terminal:  # nothing is asked for one that is here
        terminal.wait_for(f"^chatting with {STARTER}")
    assert len(daemon.asked("POST", "/models/create")) == 1


def test_ctrl_c_stops_the_answer_and_nothing_else(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.answers[ANSWER] = [words("half an", hold=Handler.wait_for_client_to_leave), words("whole")]
    with screen(tmp_path, "run", "m") as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("first")
        terminal.wait_for("^half an")
        terminal.press("C-c")
        terminal.wait_for(r"^\(stopped\)")
        ask(terminal, "second", "^whole")
        terminal.press("C-d")
        assert terminal.ended() == 0
    assert asked(daemon)[-1] == [SYSTEM, "first", "half an", "second"]


def test_the_stage_and_the_place_in_the_queue_stand_there_while_it_waits(daemon: FakeDaemon, tmp_path: Path) -> None:
    def news(**fields: Any) -> bytes:
        return f"event: modelrunner.progress\ndata: {json.dumps(fields)}\n\n".encode()

    daemon.answers[ANSWER] = [
        Stream(
            [news(stage="queued", position=2, expected_seconds=None, waited=1.0)],
            hold=Handler.wait_for_client_to_leave,
        ),
        Stream(
            [news(stage="loading weights", position=1, expected_seconds=12.0, waited=1.0)],
            hold=Handler.wait_for_client_to_leave,
        ),
        events({"choices": [{"delta": {"content": "one"}}]}),
    ]
    with screen(tmp_path, "run", "m") as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("a")
        terminal.wait_for("^queued, place 2 in the queue$")
        terminal.press("C-c")
        terminal.wait_for("stopped")
        terminal.wait_for(PROMPT)
        terminal.type("b")
        terminal.wait_for("^loading weights, about 12s left$")
        terminal.press("C-c")
        terminal.wait_for("stopped", times=2)
        terminal.wait_for(PROMPT)
        assert "loading" not in ask(terminal, "c", "^one")


def test_a_prompt_images_a_schema_and_piped_text_in_one_question(daemon: FakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "s.json").write_text('{"type": "array"}')
    piped = ["sh", "-c", 'echo "piped text" | "$@"', "sh", *MODELRUNNER]
    arguments = ["run", "m", "what?", "--image", "a.png", "--schema", "s.json"]
    with screen(tmp_path, *arguments, program=piped) as terminal:
        terminal.wait_for("^one")
        assert terminal.ended() == 0
    [body] = daemon.asked(*CHAT)
    assert body["response_format"]["json_schema"]["schema"] == {"type": "array"}
    text, picture = body["messages"][1]["content"]
    assert text["text"].startswith("what?")
    assert "piped text" in text["text"]
    assert picture["type"] == "image_url"


def test_an_answer_in_json(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.answers[ANSWER] = words('{"city":', ' "Paris"}')
    with screen(tmp_path, "run", "m", "where?", "--format", "json") as terminal:
        terminal.wait_for('^{"city": "Paris"}$')
        assert terminal.ended() == 0
    [body] = daemon.asked(*CHAT)
    assert body["response_format"] == {"type": "json_object"}


def test_several_models_answer_the_same_question(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.answers |= {
        "GET /models/n": {"id": "sha256:2"},
        "GET /v1/models/n": {"backend": None},
        ANSWER: [words("one"), words("two")],
    }
    with screen(tmp_path, "run", "m", "n", "What is it?") as terminal:
        assert terminal.ended() == 0
        assert "[m]\none\n\n[n]\ntwo\n" in terminal.shows()
    assert [(body["model"], body["messages"][1]["content"]) for body in daemon.asked(*CHAT)] == [
        ("m", "What is it?"),
        ("n", "What is it?"),
    ]
