"""Models that carry a system prompt, parameters and messages: making them, and what a request gets."""

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from modelrunner.store import Store
from tests.api.conftest import Daemon, StartDaemon
from tests.store.samples import add_model

JSON = {"Accept": "application/json"}
USER = {"role": "user", "content": "hello"}
CARRIED: dict[str, Any] = {
    "system": "You are Mario.",
    "parameters": {"temperature": 0.2, "stop": ["END"], "num_ctx": 512, "num_predict": 3},
    "messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}],
    "license": ["MIT License\nDo what you want."],
}
SYSTEM, EXAMPLES = {"role": "system", "content": "You are Mario."}, CARRIED["messages"]


async def make(daemon: Daemon, name: str = "mario", **fields: Any) -> dict[str, Any]:
    body = {"from": "smol", "name": name, **fields}
    async with daemon.tcp.post("/models/create", json=body, headers=JSON) as answer:
        return dict(json.loads((await answer.text()).splitlines()[-1]))


def asked(record: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, record.read_text().splitlines()) if record.exists() else ()
    return [json.loads(line["body"]) for line in lines if line.get("body")]


@pytest.fixture
async def daemon(start_daemon: StartDaemon, tmp_path: Path) -> Daemon:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--record", str(tmp_path / "record"))
    return daemon


def member(given: dict[str, Any]) -> dict[str, Any]:
    return {"model": "mario", **given}


REQUESTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [USER]}, {"messages": [SYSTEM, *EXAMPLES, USER], "temperature": 0.2}),
    "its own system prompt": (
        "/v1/chat/completions",
        {"messages": [{"role": "developer", "content": "Luigi"}, USER], "temperature": 1},
        {"messages": [{"role": "developer", "content": "Luigi"}, *EXAMPLES, USER], "temperature": 1, "stop": ["END"]},
    ),
    "null is left out": (
        "/v1/chat/completions",
        {"messages": [USER], "temperature": None, "max_completion_tokens": 7},
        {"temperature": 0.2, "max_completion_tokens": 7, "max_tokens": ...},
    ),
    "text": ("/v1/completions", {"prompt": "x"}, {"prompt": "x", "temperature": 0.2, "max_tokens": 3, "messages": ...}),
    "anthropic": (
        "/v1/messages",
        {"messages": [USER], "max_tokens": 5},
        {
            "system": "You are Mario.",
            "messages": [*EXAMPLES, USER],
            "max_tokens": 5,
            "temperature": 0.2,
            "stop_sequences": ["END"],
            "stop": ...,
        },
    ),
    "responses": ("/v1/responses", {"input": "hello"}, {"messages": [SYSTEM, *EXAMPLES, USER], "temperature": 0.2}),
    "instructions": (
        "/v1/responses",
        {"input": "hello", "instructions": "Luigi", "temperature": 0.9},
        {"messages": [{"role": "system", "content": "Luigi"}, *EXAMPLES, USER], "temperature": 0.9},
    ),
    "ollama": (
        "/api/chat",
        {"messages": [USER], "stream": False, "options": {"num_predict": 2}},
        {"messages": [SYSTEM, *EXAMPLES, USER], "temperature": 0.2, "max_tokens": 2},
    ),
    "generate": (
        "/api/generate",
        {"prompt": "hello", "stream": False, "options": {"temperature": 1}},
        {"messages": [SYSTEM, *EXAMPLES, USER], "temperature": 1, "max_tokens": 3, "stop": ["END"]},
    ),
    "generate with its own system prompt": (
        "/api/generate",
        {"prompt": "hello", "stream": False, "system": "Luigi"},
        {"messages": [{"role": "system", "content": "Luigi"}, *EXAMPLES, USER], "temperature": 0.2},
    ),
    "a raw prompt": (
        "/api/generate",
        {"prompt": "x", "stream": False, "raw": True},
        {"prompt": "x", "temperature": 0.2, "max_tokens": 3, "messages": ...},
    ),
    "its tokens are counted": (
        "/v1/messages/count_tokens",
        {"messages": [USER]},
        {"system": "You are Mario.", "messages": [*EXAMPLES, USER], "temperature": ...},
    ),
    "an engine by its name": (
        "/engines/fake/v1/chat/completions",
        {"messages": [USER]},
        {"messages": [SYSTEM, *EXAMPLES, USER], "temperature": 0.2},
    ),
    "embedding": ("/v1/embeddings", {"input": "x"}, {"input": "x", "temperature": ..., "messages": ...}),
}


@pytest.mark.parametrize("kind", REQUESTS)
async def test_what_a_request_leaves_out_comes_from_the_model(daemon: Daemon, tmp_path: Path, kind: str) -> None:
    assert (await make(daemon, **CARRIED, template="{{ messages }}"))["model"] == "mario"
    path, given, expected = REQUESTS[kind]
    async with daemon.tcp.post(path, json=member(given)) as answer:
        assert answer.status == 200, await answer.text()
    body = asked(tmp_path / "record")[-1]
    assert {name: body.get(name, ...) for name in expected} == expected


async def test_a_model_that_carries_nothing_gets_the_body_as_it_came(daemon: Daemon, tmp_path: Path) -> None:
    await make(daemon, **CARRIED)
    body = b'{"model" : "smol",\n "messages":[{"role":"user","content":"hello"}]}'
    async with daemon.tcp.post("/v1/chat/completions", data=body) as answer:
        assert answer.status == 200
    recorded = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    assert [line["body"] for line in recorded if line.get("body")] == [body.decode()]


async def test_the_new_model_shares_every_file_and_shows_what_it_carries(daemon: Daemon) -> None:
    await make(daemon, **CARRIED)
    await make(daemon, "luigi", **CARRIED)
    store = Store(daemon.settings.data_dir)
    assert store.get("mario").id == store.get("luigi").id != store.get("smol").id  # the same input, the same digest
    assert store.files("mario") == store.files("smol")
    async with daemon.tcp.get("/models/mario/show") as answer:
        shown = await answer.json()
    assert shown["system"] == "You are Mario."
    assert shown["parameters"] == {"temperature": 0.2, "stop": ["END"], "num_predict": 3}
    assert (shown["context_size"], shown["messages"]) == (512, CARRIED["messages"])
    assert shown["license"] == CARRIED["license"]
    assert "PARAMETER num_ctx 512\n" in shown["modelfile"]
    async with daemon.tcp.get("/models/mario") as answer:
        assert (await answer.json())["context_window"] == 512
    async with daemon.tcp.post("/api/show", json={"model": "mario"}) as answer:
        told = await answer.json()
    assert (told["system"], told["license"]) == ("You are Mario.", CARRIED["license"][0])
    assert "temperature 0.2" in told["parameters"].splitlines()


async def test_a_model_of_a_model_keeps_what_it_does_not_change(daemon: Daemon) -> None:
    await make(daemon, **CARRIED)
    template = "{{ messages }}"
    body = {"model": "next", "from": "mario", "parameters": {"temperature": 1}, "template": template, "stream": False}
    async with daemon.tcp.post("/api/create", json=body) as answer:
        assert await answer.json() == {"status": "success"}
    async with daemon.tcp.get("/models/next/show") as answer:
        shown = await answer.json()
    assert shown["parameters"] == {"temperature": 1.0, "stop": ["END"], "num_predict": 3}
    assert (shown["system"], shown["context_size"], shown["license"]) == ("You are Mario.", 512, CARRIED["license"])
    assert shown["template"] == template
    assert shown["template_digest"] == f"sha256:{hashlib.sha256(template.encode()).hexdigest()}"
    body = {"target": "short", "context_size": 256}
    async with daemon.tcp.post("/models/next/repackage", json=body) as answer:
        assert (answer.status, (await answer.json())["target"]) == (201, "short")
    async with daemon.tcp.get("/models/short/show") as answer:
        shown = await answer.json()
    assert (shown["context_size"], shown["template"]) == (256, template)
    await make(daemon, "silent", **{"from": "mario", "system": ""})
    async with daemon.tcp.get("/models/silent/show") as answer:
        assert (await answer.json())["system"] is None


async def test_it_survives_a_restart_of_the_daemon(daemon: Daemon) -> None:
    await make(daemon, **CARRIED)
    for _ in range(2):  # the second one reads the index
        bundle = Store(daemon.settings.data_dir).bundle("mario")
        assert bundle.defaults is not None
        assert bundle.defaults.system == "You are Mario."
    assert Store(daemon.settings.data_dir).bundle("smol").defaults is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"parameters": {"num_gpu": 1}}, "num_gpu"),
        ({"parameters": {"temperature": "hot"}}, "temperature"),
        ({"parameters": {"num_ctx": 0}}, "num_ctx"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"template": "{{ if .System }}{{ .Prompt }}{{ end }}"}, "Go's language"),
        ({"system": "x" * 200_000}, "system"),
        ({"system": "x", "name": None}, "a name"),
        ({"lora": ["file:///x.gguf"]}, "Unix socket"),
        ({"from": "file:///x.gguf", "system": "x"}, "Unix socket"),
    ],
)
async def test_what_no_model_can_carry_is_told(daemon: Daemon, wrong: dict[str, Any], said: str) -> None:
    body = {"from": "smol", "name": "made", "system": None, **wrong}
    async with daemon.tcp.post("/models/create", json=body, headers=JSON) as answer:
        told = json.loads((await answer.text()).splitlines()[-1])
        assert answer.status in (400, 403), told
    assert said in told["error"]["message"]
    assert len(Store(daemon.settings.data_dir).list()) == 1


async def test_a_file_of_this_machine_is_repackaged_over_the_unix_socket_alone(daemon: Daemon, tmp_path: Path) -> None:
    files = (daemon.settings.data_dir / "blobs/sha256").iterdir()
    header = next(content for content in map(Path.read_bytes, files) if content.startswith(b"GGUF"))
    (tmp_path / "m.gguf").write_bytes(header)
    source = quote(f"file://{tmp_path}/m.gguf", safe="")
    body = {"target": "taken", "context_size": 64}
    for client, expected in ((daemon.tcp, 403), (daemon.unix, 201)):
        async with client.post(f"/models/{source}/repackage", json=body) as answer:
            assert answer.status == expected, await answer.text()


def test_a_published_configuration_with_odd_defaults_is_no_model(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model = add_model(store, "m")
    file = next(path for path in (tmp_path / "blobs/sha256").iterdir() if path.read_bytes().startswith(b'{"config"'))
    assert model.config.get("defaults") is None
    from modelrunner.errors import InvalidModel
    from modelrunner.store.manifests import parse

    odd = json.loads(file.read_bytes())
    odd["config"]["defaults"] = {"messages": [{"role": "tool", "content": 5}]}
    data = json.dumps(odd).encode()
    manifest = json.loads(store.manifest("m"))
    manifest["config"] |= {"digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}
    (store.partial / "config").write_bytes(data)
    files = {"config": store.ingest(store.partial / "config"), **store.files("m")}
    assert parse(json.dumps(manifest).encode())
    with pytest.raises(InvalidModel, match="configuration"):
        store.create(files, "odd", manifest=json.dumps(manifest).encode())
