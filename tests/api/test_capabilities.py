"""What a model can do, where it is shown; and a chat template that a model is given, from the request to its engine."""

from pathlib import Path

from modelrunner.store import Store
from tests.api.conftest import StartDaemon
from tests.api.test_operations import ask
from tests.api.test_serving import chat
from tests.store.samples import add_model, write_gguf

PLAIN, KNOWING = "{{ messages }}", "{{ messages }}{{ tools }}{{ tool_calls }}{{ enable_thinking }}"


async def test_every_name_is_listed_with_what_the_model_can_do(start_daemon: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "data_dir").mkdir()
    store = Store(tmp_path / "data_dir")
    add_model(store, "smol", 1, metadata={"tokenizer.chat_template": KNOWING})
    add_model(store, "words", 2, architecture="bert")
    daemon = await start_daemon(listen="")
    await ask(daemon, "POST", "/models/smol/tag?repo=alias&tag=small")
    await ask(daemon, "POST", "/engines/_configure", json={"model": "smol", "context-size": 512})
    listed = (await ask(daemon, "GET", "/v1/models"))[1]["data"]
    able = ["chat", "completion", "tools", "reasoning"]
    assert [(model["id"], model["capabilities"], model["context_window"]) for model in listed] == [
        ("smol", able, 512),
        ("alias:small", able, 512),
        ("words", ["embedding"], 2048),
    ]
    assert (await ask(daemon, "GET", "/v1/models/alias:small"))[1] == listed[1]
    assert (await ask(daemon, "GET", "/v1/models/alias"))[1]["id"] == "smol"
    found = {model["tags"][0]: model for model in (await ask(daemon, "GET", "/models"))[1]}
    assert (found["smol"]["capabilities"], found["smol"]["context_window"]) == (able, 512)
    assert found["words"]["capabilities"] == ["embedding"]
    assert (await ask(daemon, "GET", "/models/alias:small"))[1] == found["smol"]


async def test_a_template_that_a_model_is_given(start_daemon: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "data_dir").mkdir()
    add_model(Store(tmp_path / "data_dir"), "smol", 1, metadata={"tokenizer.chat_template": PLAIN})
    folder = tmp_path / "data_dir" / "state" / "templates"
    folder.mkdir(parents=True)
    (folder / "old.jinja").touch()
    daemon = await start_daemon(listen="")

    async def give(template: str | None) -> list[str]:
        body = {"model": "smol", "chat-template": template}
        status, shown = await ask(daemon, "POST", "/engines/_configure", json=body)
        assert (status, shown["config"].get("chat-template")) == (202, template)
        found: list[str] = (await ask(daemon, "GET", "/v1/models/smol"))[1]["capabilities"]
        return found

    assert await give(KNOWING) == ["chat", "completion", "tools", "reasoning"]
    assert [file.read_text() for file in folder.iterdir()] == [KNOWING]
    assert await chat(daemon.unix) == 200
    assert "tools" in await give(None)  # the runner goes on as it is
    await ask(daemon, "POST", "/engines/unload", json={"models": ["smol"]})
    assert (await ask(daemon, "GET", "/v1/models/smol"))[1]["capabilities"] == ["chat", "completion"]
    for wrong, words in (("x" * ((1 << 17) + 1), "131072"), ("", "chat-template"), (7, "chat-template")):
        body = {"model": "smol", "chat-template": wrong}
        status, fault = await ask(daemon, "POST", "/engines/_configure", json=body)
        assert (status, fault["error"]["param"]) == (400, "chat-template")
        assert words in fault["error"]["message"]


async def test_a_model_is_packaged_with_a_projector_and_a_template(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon()
    model = write_gguf(tmp_path / "m.gguf")
    projector = write_gguf(tmp_path / "p.gguf", architecture="clip", seed=1)
    (tmp_path / "t.jinja").write_text(KNOWING)
    parts = {"mmproj": projector.as_uri(), "chat-template": (tmp_path / "t.jinja").as_uri()}
    wanted = {"from": model.as_uri(), "name": "seeing", **parts}
    async with daemon.tcp.post("/models/create", json=wanted) as answer:
        assert answer.status == 403
    async with daemon.tcp.post("/models/create", json={"from": "pypi:x", "mmproj": projector.as_uri()}) as answer:
        assert answer.status == 403
    async with daemon.unix.post("/models/create", json=wanted) as answer:
        assert "seeing is here" in await answer.text()
    seeing = (await ask(daemon, "GET", "/v1/models/seeing"))[1]
    assert seeing["capabilities"] == ["chat", "completion", "tools", "vision", "reasoning"]
    async with daemon.unix.post("/models/create", json={"from": model.as_uri(), "name": "plain"}) as answer:
        assert "plain is here" in await answer.text()
    gained = {"mmproj": ["completion", "vision"], "chat-template": ["chat", "completion", "tools", "reasoning"]}
    for name, value in parts.items():  # each alone, for a new model that is made of one that is here
        wanted = {"from": "plain", name: value}
        async with daemon.unix.post("/models/create", json=wanted) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "name")
        async with daemon.unix.post("/models/create", json={**wanted, "name": f"with-{name}"}) as answer:
            assert f"with-{name} is here" in await answer.text()
        assert (await ask(daemon, "GET", f"/v1/models/with-{name}"))[1]["capabilities"] == gained[name]
