"""How requests are put to llama.cpp: what it ignores of them, what it cannot serve, and when it is done with one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelrunner import chattemplates
from modelrunner.backend import BackendContext
from modelrunner.errors import BadRequest
from modelrunner.types import Mode, RunSpec
from modelrunner_llamacpp import LlamaCppBackend, engines
from modelrunner_llamacpp.engines import Engine, EngineKind
from modelrunner_llamacpp.requests import ignored
from tests.llamacpp.models import SMOLLM2, bundle, spec

TOOLS = [{"type": "function", "function": {"name": "f"}}]
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
KNOWING = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].tool_calls }}" + PLAIN


def run_of(template: str | None, *flags: str) -> RunSpec:
    made = spec(bundle(SMOLLM2), mode=Mode.COMPLETION)
    capabilities = made.bundle.capabilities | chattemplates.abilities(template or "")
    return replace(made, bundle=replace(made.bundle, capabilities=capabilities), flags=flags)


@pytest.mark.parametrize(
    ("template", "fields", "found"),
    [
        (PLAIN, {"tools": TOOLS}, ["tools"]),
        (None, {"tools": TOOLS, "tool_choice": "auto"}, ["tools"]),
        (PLAIN, {"tools": TOOLS, "tool_choice": {"type": "auto"}}, ["tools"]),
        (PLAIN, {"tools": TOOLS, "tool_choice": "none"}, []),
        (PLAIN, {"tools": TOOLS, "tool_choice": {"type": "none"}}, []),
        (PLAIN, {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, ["tools"]),
        (
            PLAIN,
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            ["tools"],
        ),
        (PLAIN, {"tools": []}, []),
        (KNOWING, {"tools": TOOLS, "tool_choice": "required"}, []),
        (PLAIN, {"return_documents": True}, ["return_documents"]),
        (PLAIN, {"return_documents": False}, []),
        (PLAIN, {"dimensions": 576}, []),
    ],
)
def test_fields_that_are_ignored(template: str | None, fields: dict[str, Any], found: list[str]) -> None:
    assert list(ignored(run_of(template), fields)) == found


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "f"}},
        {"type": "any"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required"}},
        {"type": "allowed_tools", "mode": "required"},
    ],
)
def test_a_tool_that_must_be_called_needs_a_template(choice: object) -> None:
    for template, *flags in ((PLAIN,), (None,), (KNOWING, "--chat-template", "chatml")):
        with pytest.raises(BadRequest, match="--chat-template") as caught:
            ignored(run_of(template, *flags), {"tools": TOOLS, "tool_choice": choice})
        assert caught.value.param == "tool_choice"


def test_embeddings_have_their_own_length() -> None:
    with pytest.raises(BadRequest, match="take all 576") as caught:
        ignored(run_of(None), {"dimensions": 64})
    assert caught.value.param == "dimensions"


@pytest.mark.parametrize(
    ("kind", "streams"), [(EngineKind.NATIVE, True), (EngineKind.WHEEL, True), (EngineKind.PYTHON, False)]
)
def test_plain_answers_are_asked_for_as_streams_where_those_say_the_usage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: EngineKind, streams: bool
) -> None:
    context = BackendContext(tmp_path, tmp_path, tmp_path, {})
    monkeypatch.setattr(engines, "find", lambda *_: Engine(kind, tmp_path / "engine", "1"))
    assert bool(LlamaCppBackend(context).api(run_of(None)).as_stream("/v1/completions")) is streams


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (EngineKind.NATIVE, "/lora-adapters"),
        (EngineKind.WHEEL, "/lora-adapters"),
        (EngineKind.PYTHON, "/v1/models"),
    ],
)
def test_each_server_is_asked_what_waits_for_its_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: EngineKind, path: str
) -> None:
    """llama.cpp's own by a question that stands in its queue, llama-cpp-python's by one that needs its lock."""
    context = BackendContext(tmp_path, tmp_path, tmp_path, {})
    monkeypatch.setattr(engines, "find", lambda *_: Engine(kind, tmp_path / "engine", "1"))
    assert LlamaCppBackend(context).api(run_of(None)).settled == path
