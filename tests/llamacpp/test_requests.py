"""How requests are put to llama.cpp: what it ignores of them, what it cannot serve, and when it is done with one."""

from dataclasses import replace
from pathlib import Path

import pytest

from modelrunner import chattemplates
from modelrunner.backend import BackendContext
from modelrunner.types import Mode, RunSpec
from modelrunner_llamacpp import LlamaCppBackend, engines
from modelrunner_llamacpp.engines import Engine, EngineKind
from modelrunner_llamacpp.requests import api
from tests.llamacpp.models import SMOLLM2, bundle, spec

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
KNOWING = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].tool_calls }}" + PLAIN


def run_of(template: str | None, *flags: str) -> RunSpec:
    made = spec(bundle(SMOLLM2), mode=Mode.COMPLETION)
    capabilities = made.bundle.capabilities | chattemplates.abilities(template or "")
    return replace(made, bundle=replace(made.bundle, capabilities=capabilities), flags=flags)


@pytest.mark.parametrize(
    ("template", "flags", "calls"),
    [(KNOWING, (), True), (PLAIN, (), False), (None, (), False), (KNOWING, ("--chat-template", "chatml"), False)],
)
def test_tools_need_a_template_that_knows_them(template: str | None, flags: tuple[str, ...], calls: bool) -> None:
    for in_python in (False, True):
        told = api(run_of(template, *flags), in_python=in_python).no_tools
        assert ("--chat-template FILE" not in told) if calls else ("--chat-template FILE" in told)


def test_embeddings_have_their_own_length() -> None:
    assert api(run_of(None), in_python=False).embedding_length == 576


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
