"""Names that programs insist on, as clients and the operator see them."""

import json
from pathlib import Path
from typing import Any

import pytest

from modelrunner.config.locations import ConfigurationError
from tests.api.conftest import Daemon, StartDaemon, make_settings

CONFIG = """
[aliases]
gpt-4o-mini = "smol"
"claude-*" = ["missing", "other", "smol"]
text-embedding-3-small = { models = ["other"], families = ["openai"] }
quick = { models = ["other", "smol"], policy = "loaded" }
roomy = { models = ["other", "smol"], policy = "fits" }
gone = "missing"
"o[1-3]?*" = "smol"
"""
HELLO = [{"role": "user", "content": "hello"}]


async def ask(daemon: Daemon, model: str, path: str = "/v1/chat/completions", **more: Any) -> tuple[int, str, Any]:
    """Status, the header, and the body of a chat."""
    limit = {"max_tokens": 1} if path.startswith("/v1/") or "engines" in path else {"options": {"num_predict": 1}}
    limit = {"max_output_tokens": 1} if path.endswith("/responses") else limit
    body = {"model": model, "messages": HELLO, "stream": False} | limit | more
    async with daemon.tcp.post(path, json=body) as answer:
        return answer.status, answer.headers.get("X-Modelrunner-Model", ""), await answer.json()


@pytest.fixture
async def daemon(start_daemon: StartDaemon, tmp_path: Path) -> Daemon:
    (tmp_path / "config.toml").write_text(CONFIG)
    daemon = await start_daemon(models={"smol": 0, "other": 1})
    daemon.backend.knobs = ("--record", str(tmp_path / "record"))
    return daemon


def engine_saw(daemon: Daemon) -> str:
    last = json.loads((daemon.settings.data_dir.parent / "record").read_text().splitlines()[-1])
    return str(json.loads(last["body"])["model"])


@pytest.mark.parametrize(
    ("path", "alias", "meant"),
    [
        ("/v1/chat/completions", "gpt-4o-mini", "smol"),
        ("/engines/v1/chat/completions", "gpt-4o-mini", "smol"),
        ("/v1/messages", "claude-sonnet-9", "other"),
        ("/api/chat", "claude-x", "other"),
        ("/v1/chat/completions", "o[1-3]?-mini", "smol"),
        ("/v1/embeddings", "text-embedding-3-small", "other"),
    ],
)
async def test_an_alias_is_answered_by_its_model(daemon: Daemon, path: str, alias: str, meant: str) -> None:
    more = {"input": "x"} if path.endswith("embeddings") else {}
    assert (await ask(daemon, alias, path, **more))[:2] == (200, meant)
    assert engine_saw(daemon) == meant


async def test_a_star_alone_stands_for_other_signs(daemon: Daemon) -> None:
    assert (await ask(daemon, "o2a-mini"))[0] == 404


async def test_the_model_of_a_translated_answer_is_the_chosen_one(daemon: Daemon) -> None:
    assert (await ask(daemon, "gpt-4o-mini", "/api/chat"))[2]["model"] == "smol"
    status, header, response = await ask(daemon, "gpt-4o-mini", "/v1/responses", input="x")
    assert (status, header, response["model"]) == (200, "smol", "smol")


async def test_policies(daemon: Daemon) -> None:
    assert (await ask(daemon, "quick"))[1] == "other"
    async with daemon.unix.post("/engines/unload", json={"all": True}) as answer:
        assert answer.status == 200
    assert (await ask(daemon, "smol"))[1] == ""
    assert (await ask(daemon, "quick"))[1] == "smol"
    assert (await ask(daemon, "roomy"))[1] == "other"


async def test_what_no_model_answers(daemon: Daemon) -> None:
    status, _, found = await ask(daemon, "gone")
    assert status == 404
    assert "missing" in found["error"]["message"]
    assert (await ask(daemon, "text-embedding-3-small", "/api/embed", input="x"))[0] == 404  # of another family
    assert (await ask(daemon, "gpt-4o"))[0] == 404


async def test_aliases_are_reloaded(daemon: Daemon, tmp_path: Path) -> None:
    assert (await ask(daemon, "gpt-4o-mini"))[1] == "smol"
    (tmp_path / "config.toml").write_text('[aliases]\ngpt-4o-mini = "other"\n')
    async with daemon.unix.post("/engines/reload", json={}) as answer:
        changes = (await answer.json())["changes"]
    assert [(change["what"], change["effect"]) for change in changes] == [("aliases", "holds at once")]
    assert (await ask(daemon, "gpt-4o-mini"))[1] == "other"
    (tmp_path / "config.toml").write_text("")
    async with daemon.unix.post("/engines/reload", json={}) as answer:
        assert answer.status == 200
    assert (await ask(daemon, "gpt-4o-mini"))[0] == 404


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 7", "needs a model"),
        ("x = []", "needs a model"),
        ('x = { models = ["a"], policy = "best" }', "first, fits, loaded"),
        ('x = { models = ["a"], families = ["mine"] }', "openai"),
        ('x = { model = "a" }', "unknown key 'model'"),
    ],
)
def test_a_wrong_alias_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.toml").write_text(f"[aliases]\n{text}\n")
    with pytest.raises(ConfigurationError, match=said) as wrong:
        make_settings(tmp_path)
    assert "aliases.x" in str(wrong.value)


async def read(daemon: Daemon, path: str, body: Any = None) -> tuple[int, Any]:
    async with daemon.tcp.request("GET" if body is None else "POST", path, json=body) as answer:
        return answer.status, await answer.json()


async def test_aliases_are_listed_where_they_hold(daemon: Daemon) -> None:
    """Patterns stand for names without end, and one without a model answers nothing."""
    listed = {model["id"] for model in (await read(daemon, "/v1/models"))[1]["data"]}
    assert listed == {"smol", "other", "gpt-4o-mini", "text-embedding-3-small", "quick", "roomy"}
    anthropic = {model["id"] for model in (await read(daemon, "/anthropic/v1/models"))[1]["data"]}
    assert anthropic == listed - {"text-embedding-3-small"}
    ollama = {model["name"] for model in (await read(daemon, "/api/tags"))[1]["models"]}
    assert ollama == {f"{name}:latest" for name in anthropic}


async def test_an_alias_is_looked_up_as_its_model(daemon: Daemon) -> None:
    for path in ("/v1/models/gpt-4o-mini", "/anthropic/v1/models/gpt-4o-mini", "/v1/models/claude-x"):
        status, found = await read(daemon, path)
        assert (status, found["id"]) == (200, path.rpartition("/")[2])
    for path in ("/models/gpt-4o-mini", "/models/gpt-4o-mini/show", "/engines/why?model=gpt-4o-mini"):
        status, found = await read(daemon, path)
        assert (status, "smol" in json.dumps(found)) == (200, True), found
    status, shown = await read(daemon, "/api/show", {"model": "gpt-4o-mini:latest"})
    assert (status, "smol" in shown["modelfile"]) == (200, True)
    assert (await ask(daemon, "gpt-4o-mini:latest", "/api/chat"))[:2] == (200, "smol")
    assert (await read(daemon, "/v1/models/gone"))[0] == 404


async def test_models_are_listed_with_their_aliases(daemon: Daemon) -> None:
    async with daemon.unix.get("/models") as answer:
        listed = {model["tags"][0]: model.get("aliases", []) for model in await answer.json()}
    assert listed == {"smol": ["gpt-4o-mini"], "other": ["text-embedding-3-small", "quick", "roomy"]}


async def test_an_alias_is_configured_as_its_model(daemon: Daemon) -> None:
    wanted = {"model": "gpt-4o-mini", "context-size": 512}
    async with daemon.unix.post("/engines/_configure", json=wanted) as answer:
        told = await answer.json()
        assert (answer.status, told["model"], told["alias"]) == (202, "smol", "gpt-4o-mini")
    for name, alias in (("gpt-4o-mini", "gpt-4o-mini"), ("smol", "")):
        async with daemon.unix.get("/engines/_configure", params={"model": name}) as answer:
            [shown] = await answer.json()
        assert (shown["model"], shown["alias"], shown["config"]) == ("smol", alias, {"context-size": 512})
