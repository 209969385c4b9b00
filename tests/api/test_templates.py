"""Chat templates are rendered before an engine gets them: what cannot be used is refused, and what a template cannot do
is no capability of its model."""

from pathlib import Path
from typing import Any

import pytest

from modelrunner.models import rendering
from modelrunner.models.rendering import Renderings
from modelrunner.store import Store
from tests.api.conftest import Daemon, StartDaemon
from tests.api.test_operations import ask
from tests.api.test_serving import chat
from tests.store.samples import add_model, write_gguf

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SYNTAX = "{{ messages }}\n\n{% if x %}{{ x }"
ENDLESS = {
    "text": "{% for i in range(1000000000) %}x{% endfor %}",
    "time": "{% for i in range(1000000000) %}{% endfor %}",
    "memory": "{{ range(1000000000) | list }}",
    "itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "only with tools": PLAIN + "{% if tools %}{% for i in range(1000000000) %}x{% endfor %}{% endif %}",
}
TOOLS = "{% if tools %}{{ tools | tojson }}{{ tool_calls }}\n{{ raise_exception('no tools, please') }}{% endif %}"
# Each as published models have it: a strict one, one with blocks for training, one that ends a loop, one with a macro.
PUBLISHED = {
    "strict": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}{{ m.content | trim }}{% endfor %}",
    "training": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "unknown filter": "{{ messages | a_filter_that_an_engine_has }}",
    "changes a list": "{% set seen = [] %}{{ seen.append(1) }}{{ messages }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "date": "{{ strftime_now('%d %b %Y') }}{% set ns = namespace(n=0) %}{% set ns.n = 1 %}"
    "{{ messages | tojson(indent=2) }}",
}


async def give(daemon: Daemon, template: str) -> tuple[int, Any]:
    return await ask(daemon, "POST", "/engines/_configure", json={"model": "smol", "chat-template": template})


async def package(daemon: Daemon, file: Path, name: str, **fields: Any) -> str:
    wanted = {"from": file.as_uri(), "name": name, **fields}
    async with daemon.unix.post("/models/create", json=wanted) as answer:
        return await answer.text()


@pytest.mark.parametrize("template", ENDLESS.values(), ids=list(ENDLESS))
async def test_a_template_without_end_is_refused(start_daemon: StartDaemon, tmp_path: Path, template: str) -> None:
    daemon = await start_daemon(models={"smol": 0})
    status, fault = await give(daemon, template)
    assert (status, fault["error"]["param"]) == (400, "chat-template")
    assert "the chat template does not end" in fault["error"]["message"]
    status, again = await give(daemon, template)
    assert (status, again["error"]["message"]) == (400, fault["error"]["message"])
    model = write_gguf(tmp_path / "m.gguf", seed=1, metadata={"tokenizer.chat_template": template})
    assert "does not end" in await package(daemon, model, "endless")
    assert (await ask(daemon, "GET", "/v1/models/endless"))[0] == 404


async def test_a_wrong_template_is_refused_with_its_line(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"smol": 0})
    status, fault = await give(daemon, SYNTAX)
    assert (status, fault["error"]["param"]) == (400, "chat-template")
    assert "the chat template cannot be parsed: line 3: " in fault["error"]["message"]
    (tmp_path / "t.jinja").write_text(SYNTAX)
    plain = write_gguf(tmp_path / "m.gguf", seed=1)
    wrong = write_gguf(tmp_path / "w.gguf", seed=2, metadata={"tokenizer.chat_template": SYNTAX})
    answers = [
        await package(daemon, plain, "new", **{"chat-template": (tmp_path / "t.jinja").as_uri()}),
        await package(daemon, plain, "new", template=SYNTAX),
    ]
    for answer in answers:
        assert "its chat template cannot be parsed: line 3: " in answer
        assert "--chat-template FILE" in answer
    assert (await ask(daemon, "GET", "/v1/models/new"))[0] == 404
    kept = await package(daemon, wrong, "kept")  # a file's own template: another one can be configured
    assert "warning: kept is here, but its chat template cannot be parsed: line 3: " in kept
    assert "`modelrunner configure kept --chat-template FILE`" in kept
    assert (await ask(daemon, "GET", "/v1/models/kept"))[1]["capabilities"] == ["completion"]
    async with daemon.tcp.post("/api/create", json={"model": "new", "from": "smol", "template": SYNTAX}) as made:
        assert "line 3: " in await made.text()


async def test_a_model_that_is_here_stays_and_is_not_loaded(start_daemon: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "data_dir").mkdir()
    add_model(Store(tmp_path / "data_dir"), "smol", 1, metadata={"tokenizer.chat_template": ENDLESS["text"]})
    daemon = await start_daemon(listen="")
    status, fault = await ask(
        daemon, "POST", "/v1/chat/completions", json={"model": "smol", "messages": [{"role": "user", "content": "x"}]}
    )
    assert status == 400
    assert "its chat template does not end" in fault["error"]["message"]
    assert "`modelrunner configure smol --chat-template FILE`" in fault["error"]["message"]
    assert (await ask(daemon, "GET", "/v1/models/smol"))[1]["capabilities"] == ["completion"]
    assert "does not end" in (await ask(daemon, "GET", "/models/smol/show"))[1]["template_problem"]
    assert (await give(daemon, PLAIN))[0] == 202
    assert (await ask(daemon, "GET", "/v1/models/smol"))[1]["capabilities"] == ["chat", "completion"]
    assert await chat(daemon.unix) == 200


async def test_what_a_template_cannot_render_is_no_capability(start_daemon: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "data_dir").mkdir()
    store = Store(tmp_path / "data_dir")
    add_model(store, "smol", 1, metadata={"tokenizer.chat_template": PLAIN + TOOLS})
    add_model(store, "wrong", 2, metadata={"tokenizer.chat_template": SYNTAX})
    daemon = await start_daemon(listen="")
    assert (await ask(daemon, "GET", "/v1/models/smol"))[1]["capabilities"] == ["chat", "completion"]
    problem = (await ask(daemon, "GET", "/models/smol/show"))[1]["template_problem"]
    assert problem.startswith("its chat template fails for tools, tool calls (line 3: no tools, please); ")
    assert (await ask(daemon, "GET", "/v1/models/wrong"))[1]["capabilities"] == ["completion"]
    assert (await give(daemon, PLAIN))[0] == 202
    assert (await give(daemon, PLAIN + TOOLS))[0] == 202
    assert (await ask(daemon, "GET", "/v1/models/smol"))[1]["capabilities"] == ["chat", "completion"]


@pytest.mark.parametrize("template", PUBLISHED.values(), ids=list(PUBLISHED))
def test_what_published_templates_use_costs_nothing(tmp_path: Path, template: str) -> None:
    renderings = Renderings(tmp_path / "templates.json")
    renderings.require(template)
    assert renderings.abilities(template) == {"chat"}


def test_a_template_is_rendered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = Renderings(tmp_path / "templates.json").verdict(PLAIN + TOOLS)
    assert set(verdict.failures) == {"tools", "tool calls"}

    def started(*_: object) -> None:
        raise AssertionError("the template is rendered again")

    monkeypatch.setattr(rendering, "_looked", started)
    assert Renderings(tmp_path / "templates.json").verdict(PLAIN + TOOLS) == verdict


def test_a_process_that_fails_takes_nothing_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_CHILD", tmp_path / "missing.py")
    renderings = Renderings(tmp_path / "templates.json")
    renderings.require(SYNTAX)
    assert renderings.abilities(PLAIN) == {"chat"}
