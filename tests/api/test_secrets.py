"""Nothing that the daemon writes or tells has a prompt, a key or a token in it: whatever happens is let happen, with
planted secrets, and then all of its output is searched."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp

from tests.api.conftest import Daemon, StartDaemon
from tests.waiting import HUNG

PROMPT, IMAGE, TOKEN, WRONG_KEY = "planted-prompt", "planted-image", "planted-token", "mr-planted-wrong-key"
VARIABLE = "planted-variable"  # of an MCP server, which a tool tells the model
KEPT = "words-in-a-file"  # what clients have stored is on disk; nothing else of them is
TOOLS = Path(__file__).parent.parent / "tools" / "server.py"
TOLD = (
    *("/metrics", "/engines/requests", "/engines/now", "/engines/history", "/engines/ps", "/usage", "/usage?by=key"),
    *("/keys", "/logs", "/version", "/health", "/ready", "/models", "/engines/df", "/v1/models", "/engines/machine"),
)


def chat(model: str = "smol", **fields: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": PROMPT}, {"type": "image_url", "image_url": {"url": f"data:x;base64,{IMAGE}"}}]
    return {"model": model, "messages": [{"role": "user", "content": parts}], "user": PROMPT, **fields}


async def ask(daemon: Daemon, path: str, body: Any, key: str = "") -> tuple[int, str]:
    """Over TCP, where keys are needed."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with daemon.tcp.post(path, data=json.dumps(body) if isinstance(body, dict) else body, headers=headers) as got:
        return got.status, await got.text()


async def test_no_output_has_a_secret(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(
        models={"smol": 0, "other": 1},
        access_log="json",
        log_level="debug",
        mcp={"local": {"command": [sys.executable, str(TOOLS)], "env": {"VARIABLE": VARIABLE}}},
    )
    async with daemon.unix.post("/engines/_configure", json={"model": "other", "recording": True}) as answer:
        assert answer.status == 202
    async with daemon.unix.post("/keys", json={"name": "kim"}) as answer:
        key = (await answer.json())["text"]
    errors, answers = [], ""
    for path, body, who in (
        ("/v1/chat/completions", chat(), key),
        ("/v1/chat/completions", chat(stream=True), key),
        ("/v1/messages", chat(max_tokens=3), key),
        ("/v1/chat/completions", chat(), WRONG_KEY),
        ("/v1/chat/completions", chat("nothing"), key),
        ("/v1/chat/completions", chat(temperature=PROMPT), key),
        ("/v1/chat/completions", f'{{"model": "smol", "messages": [{{"{PROMPT}', key),
        ("/v1/nowhere", chat(), key),
        ("/v1/tools/execute", {"name": "local__environment", "arguments": {"name": "VARIABLE"}}, key),
        ("/v1/tools/execute", {"name": "local__fail", "arguments": {}}, key),
        ("/v1/responses", {"model": "smol", "input": KEPT}, key),
    ):
        status, text = await ask(daemon, path, body, who)
        errors += [text] if status >= 400 else []
        answers += text
    recorded = await record(daemon, key)
    await batch(daemon, key)
    daemon.backend.knobs = ("--die", "after-headers")
    async with daemon.unix.post("/engines/unload", json={"all": True}) as answer:
        assert answer.status == 200
    for _ in range(3):
        errors.append((await ask(daemon, "/v1/chat/completions", chat(), key))[1])
    pull = {"from": "127.0.0.1:9/planted/model", "bearer-token": TOKEN}
    async with daemon.unix.post("/models/create", json=pull) as answer:
        errors.append(await answer.text())
    told = {path: await text_of(daemon, path) for path in TOLD}
    files = {str(file): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert len(errors) >= 8
    assert VARIABLE in answers  # the client's own: a tool told it
    assert any("access.log" in name and b'"status":200' in data for name, data in files.items())
    assert "ended" in told["/logs"]
    assert PROMPT in recorded  # it is what a recording is for; the rest is not
    assert [secret for secret in (IMAGE, TOKEN, WRONG_KEY, VARIABLE, key) if secret in recorded] == []
    stored = {Path(name).parent.name for name, data in files.items() if KEPT.encode() in data}
    assert stored <= {"state", "files"}, stored
    for secret in (PROMPT, IMAGE, TOKEN, WRONG_KEY, VARIABLE, key):
        assert [name for name, text in told.items() if secret in text] == [], secret
        assert [name for name, data in files.items() if secret.encode() in data] == [], secret
        assert [text for text in errors if secret in text] == [], secret


async def test_an_engine_that_dies_with_a_prompt_on_its_lips_tells_it_to_its_own_log_alone(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = await start_daemon(models={"smol": 0}, access_log="json", log_level="debug")
    daemon.backend.knobs = ("--quote", "--die", "before-headers", "--only-for", PROMPT)
    others = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
    assert (await ask(daemon, "/v1/chat/completions", others))[0] == 200
    refused = [await ask(daemon, "/v1/chat/completions", chat(metadata={"n": str(number)})) for number in range(3)]
    assert min(status for status, _ in refused) >= 500
    assert "modelrunner logs smol" in refused[0][1]
    why = json.loads(await text_of(daemon, "/engines/why?model=smol"))
    assert "crash" in [event["event"] for event in why["events"]]
    told = {path: await text_of(daemon, path) for path in (*TOLD, "/engines/why?model=smol")}
    assert "ended by signal 9" in told["/logs"]
    files = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert [path for path, text in told.items() if PROMPT in text] == []
    assert [text for _, text in refused if PROMPT in text] == []
    tell = {file for file, data in files.items() if PROMPT.encode() in data}
    assert {file.parent for file in tell} == {daemon.settings.data_dir / "logs"}
    assert {file.name for file in tell}.isdisjoint({"daemon.log", "access.log"})
    assert PROMPT in await text_of(daemon, "/logs?model=smol")


async def record(daemon: Daemon, key: str) -> str:
    """The recording of a chat whose text has the key."""
    headers = {"Authorization": f"Bearer {key}", "X-Request-ID": "recorded"}
    body = chat("other")
    body["messages"][0]["content"][0]["text"] += f" with {key}"
    async with daemon.tcp.post("/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200
    return await text_of(daemon, "/engines/requests/recorded")


async def batch(daemon: Daemon, key: str) -> None:
    """A batch of one line, to its end."""
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": "smol", "messages": [{"role": "user", "content": KEPT}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", json.dumps(line).encode(), filename="lines.jsonl")
    async with daemon.tcp.post("/v1/files", data=form, headers=headers) as answer:
        file = (await answer.json())["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    async with daemon.tcp.post("/v1/batches", json=asked, headers=headers) as answer:
        place = f"/v1/batches/{(await answer.json())['id']}"
    async with asyncio.timeout(HUNG):
        while json.loads(await text_of(daemon, place))["status"] != "completed":
            pass


async def text_of(daemon: Daemon, path: str) -> str:
    async with asyncio.timeout(HUNG), daemon.unix.get(path) as answer:
        assert answer.status in (200, 503), path
        return await answer.text()
