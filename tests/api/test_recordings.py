"""Recorded requests of a whole daemon, and their replay from the command line."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Daemon, StartDaemon
from tests.waiting import HUNG

CHAT = "/v1/chat/completions"
KEY = "mr-" + "k" * 32


def chat(text: str = "planted", **more: Any) -> dict[str, Any]:
    return {"model": "smol", "messages": [{"role": "user", "content": text}], "max_tokens": 3, **more}


async def ask(daemon: Daemon, id: str, path: str = CHAT, body: Any = None, **head: str) -> int:
    async with daemon.tcp.post(path, json=body or chat(), headers={"X-Request-ID": id, **head}) as answer:
        await answer.read()
        return answer.status


async def recording(daemon: Daemon, value: bool | None = True, **more: Any) -> None:
    async with daemon.unix.post("/engines/_configure", json={"model": "smol", "recording": value, **more}) as answer:
        assert answer.status == 202, await answer.text()


async def recorded(daemon: Daemon, id: str, **head: str) -> Any:
    """The recording, None without one."""
    session = daemon.tcp if head else daemon.unix
    async with session.get(f"/engines/requests/{id}", headers=head) as answer:
        found = await answer.json()
        if answer.status == 404:
            assert found["error"]["code"] == "request_not_found"
            return None
        assert answer.status == 200, found
        return found


@pytest.fixture
async def daemon(start_daemon: StartDaemon) -> Daemon:
    return await start_daemon(models={"smol": 0, "other": 1})


async def test_only_models_that_are_configured_so(daemon: Daemon) -> None:
    assert await ask(daemon, "before") == 200
    await recording(daemon)
    runs = daemon.backend.runs
    assert await ask(daemon, "on") == 200
    assert await ask(daemon, "other", body=chat() | {"model": "other"}) == 200
    await recording(daemon, False)
    assert await ask(daemon, "off") == 200
    assert daemon.backend.runs == runs + 1  # of `other`: to record needs no other process
    assert [await recorded(daemon, id) is not None for id in ("before", "on", "other", "off")] == [
        False,
        True,
        False,
        False,
    ]
    found = await recorded(daemon, "on")
    assert (found["path"], found["request"]["status"], found["request"]["model_name"]) == (CHAT, 200, "smol")
    assert json.loads(found["body"]["text"]) == chat()
    assert json.loads(found["answer"]["text"])["choices"][0]["message"]["content"] == "w0 w1 w2 "
    assert (found["body"]["whole"], found["answer"]["whole"]) == (True, True)


async def test_a_cold_model_streams_other_families_and_errors(daemon: Daemon) -> None:
    await recording(daemon)
    assert await ask(daemon, "cold", body=chat(stream=True)) == 200
    ollama = {"model": "smol", "messages": [], "stream": False}
    assert await ask(daemon, "ollama", "/api/chat", ollama | {"messages": chat()["messages"]}) == 200
    assert await ask(daemon, "named", "/engines/fake/v1/chat/completions") == 200
    assert await ask(daemon, "wrong", body=chat(samplers=1)) == 400
    answer = (await recorded(daemon, "cold"))["answer"]["text"]
    assert answer.startswith("data: {")
    assert answer.endswith("data: [DONE]\n\n")  # without the framing of chunks
    assert (await recorded(daemon, "ollama"))["path"] == "/api/chat"
    assert (await recorded(daemon, "named"))["path"] == "/engines/fake/v1/chat/completions"
    wrong = await recorded(daemon, "wrong")
    assert (wrong["request"]["status"], "wrong" in wrong["answer"]["text"]) == (400, True)


async def test_a_client_that_left(daemon: Daemon, tmp_path: Path) -> None:
    daemon.backend.knobs = ("--token-gate", str(tmp_path / "never"))
    await recording(daemon)
    async with daemon.tcp.post(CHAT, json=chat(stream=True), headers={"X-Request-ID": "left"}) as answer:
        while b"w0" not in await answer.content.readany():
            pass
        answer.close()
    async with asyncio.timeout(HUNG):
        while (found := await recorded(daemon, "left")) is None:
            pass
    assert (found["request"]["status"], "w0" in found["answer"]["text"]) == (499, True)


async def test_keys_files_and_size(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, recording_limit=600)
    await recording(daemon)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 100}}
    parts = [{"type": "text", "text": f"my key is {KEY}"}, image]
    assert await ask(daemon, "secret", body=chat() | {"messages": [{"role": "user", "content": parts}]}) == 200
    found = await recorded(daemon, "secret")
    assert KEY not in found["body"]["text"]
    assert "QUJD" not in found["body"]["text"]
    assert (found["body"]["redacted"], found["body"]["whole"]) == (2, True)
    assert await ask(daemon, "long", body=chat("x " * 1000)) == 200
    found = await recorded(daemon, "long")
    assert (len(found["body"]["text"]), found["body"]["whole"]) == (600, False)
    assert found["body"]["size"] > 2000


async def test_passwords_in_the_arguments_of_a_call(daemon: Daemon) -> None:
    daemon.backend.knobs = ("--round", json.dumps([["login", {"user": "kim", "password": "hunter22"}]]))
    await recording(daemon)
    given = {"name": "login", "arguments": json.dumps({"password": "hunter22"})}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": given}]}
    told = {"role": "tool", "tool_call_id": "1", "content": "DB_PASSWORD=hunter22 postgres://kim:hunter22@host"}
    body = chat() | {"messages": [calls, told]}
    assert await ask(daemon, "called", body=body) == 200
    found = await recorded(daemon, "called")
    assert "hunter22" not in found["body"]["text"] + found["answer"]["text"]
    assert found["body"]["redacted"] == 3
    assert json.loads(json.loads(found["body"]["text"])["messages"][0]["tool_calls"][0]["function"]["arguments"])


async def test_memory_is_bounded(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, recording_memory="16KiB")
    await recording(daemon)
    for number in range(12):
        assert await ask(daemon, f"r{number}", body=chat("x " * 500)) == 200
    kept = [await recorded(daemon, f"r{number}") is not None for number in range(12)]
    assert kept == sorted(kept)
    assert 1 <= sum(kept) <= 4
    off = await start_daemon(models={"smol": 0}, folder=daemon.settings.data_dir.parent / "off", recording_memory=0)
    await recording(off)
    assert await ask(off, "r") == 200
    assert await recorded(off, "r") is None


async def test_a_key_sees_its_own(daemon: Daemon) -> None:
    await recording(daemon)
    heads = {}
    for name, scopes in (
        ("kim", ["inference"]),
        ("lee", ["inference"]),
        ("boss", ["inference", "admin"]),
        ("mover", ["models"]),
    ):
        async with daemon.unix.post("/keys", json={"name": name, "scopes": scopes}) as made:
            heads[name] = {"Authorization": f"Bearer {(await made.json())['text']}"}
    assert await ask(daemon, "same", body=chat("of lee"), **heads["lee"]) == 200
    assert await ask(daemon, "same", body=chat("of kim"), **heads["kim"]) == 200
    for name, said in (("kim", "of kim"), ("lee", "of lee"), ("boss", "of kim")):
        assert said in (await recorded(daemon, "same", **heads[name]))["body"]["text"]
    assert await ask(daemon, "mine", **heads["kim"]) == 200
    assert await recorded(daemon, "mine", **heads["lee"]) is None
    async with daemon.tcp.get("/engines/requests/mine", headers=heads["mover"]) as answer:
        assert answer.status == 403
    async with daemon.tcp.get("/engines/requests", headers=heads["kim"]) as answer:
        assert answer.status == 403  # the list is of everybody


async def test_by_interceptors_and_aliases(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(
        models={"smol": 0}, response_cache="1MiB", aliases={"gpt": "smol"}, embedding_window=0.001
    )
    await recording(daemon)
    body = chat(temperature=0) | {"model": "gpt"}
    for id in ("miss", "hit"):
        assert await ask(daemon, id, body=body) == 200
    assert await ask(daemon, "stream", body=chat(stream=True), **{"X-Resumable": "true"}) == 200
    texts = [(await recorded(daemon, id))["answer"]["text"] for id in ("miss", "hit")]
    assert texts[0] == texts[1]
    assert (await recorded(daemon, "stream"))["answer"]["text"].endswith("data: [DONE]\n\n")
    for id in ("cold", "lone"):  # a request to a model that is not resolved yet is not gathered
        assert await ask(daemon, id, "/v1/embeddings", {"model": "smol", "input": "x"}) == 200
    for id in ("miss", "stream", "lone"):
        found = (await recorded(daemon, id))["request"]
        assert (found["status"], found["model_name"], found["prompt_tokens"] > 0) == (200, "smol", True)


async def test_of_one_mode(daemon: Daemon) -> None:
    await recording(daemon, mode="embedding")
    assert await ask(daemon, "chat") == 200
    assert await ask(daemon, "vector", "/v1/embeddings", {"model": "smol", "input": "x"}) == 200
    assert await recorded(daemon, "chat") is None
    assert await recorded(daemon, "vector") is not None


async def command(daemon: Daemon, *words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "modelrunner", "requests", *words, "--host", f"http://127.0.0.1:{daemon.port}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        (CHAT, chat(stream=True)),
        ("/v1/completions", {"model": "smol", "prompt": "x", "max_tokens": 3}),
        ("/v1/messages", chat(stream=True)),
        ("/v1/messages", chat()),
        (
            "/api/chat",
            {name: value for name, value in chat(options={"num_predict": 3}).items() if name != "max_tokens"},
        ),
        ("/api/generate", {"model": "smol", "prompt": "x", "options": {"num_predict": 3}}),
        ("/v1/responses", {"model": "smol", "input": "x", "max_output_tokens": 3}),
        ("/v1/responses", {"model": "smol", "input": "x", "max_output_tokens": 3, "stream": True}),
    ],
)
async def test_shown_and_replayed(daemon: Daemon, path: str, body: Any) -> None:
    await recording(daemon)
    assert await ask(daemon, "r1", path, body) == 200
    status, out, err = await command(daemon, "show", "r1")
    assert status == 0, err
    assert path in out
    assert "w0 w1 w2" in out
    status, out, err = await command(daemon, "replay", "r1")
    assert (status, out.strip()) == (0, "w0 w1 w2"), err
    assert "the same as the recorded one" in err


async def test_a_replay_to_another_model_that_answers_otherwise(daemon: Daemon) -> None:
    await recording(daemon)
    assert await ask(daemon, "r1", body=chat(max_tokens=2)) == 200
    daemon.backend.knobs = ("--text", "something else")
    status, out, err = await command(daemon, "replay", "r1", "--model", "other", "--json")
    assert status == 0, err
    assert json.loads(out) == {"request_id": "r1", "same": False, "before": "w0 w1 ", "answer": "something else"}
    status, out, err = await command(daemon, "replay", "r1", "--model", "other")
    assert ("-w0 w1" in err, "+something else" in err) == (True, True)
    assert (await command(daemon, "replay", "r1", "--model", "nothing"))[0] == 4


async def test_what_cannot_be_replayed(daemon: Daemon) -> None:
    assert (await command(daemon, "show", "nothing"))[0] == 4
    await recording(daemon)
    assert await ask(daemon, "key", body=chat(f"it is {KEY}")) == 200
    assert await ask(daemon, "long", body=chat("x " * 50_000)) == 200
    for id, why in (("key", "had a key or a file"), ("long", "too large")):
        status, _, err = await command(daemon, "replay", id)
        assert (status, why in err) == (1, True)
