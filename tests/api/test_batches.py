"""Files and batches, with OpenAI's own client."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.api.conftest import Daemon, StartDaemon
from tests.waiting import HUNG

CHAT = "/v1/chat/completions"
Condition = Callable[[Batch], bool]


@asynccontextmanager
async def client_of(daemon: Daemon, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key=key, max_retries=0) as client:
        yield client


def line(number: int, model: str = "smol", url: str = CHAT, **body: Any) -> dict[str, Any]:
    given = {"model": model, "messages": [{"role": "user", "content": f"question {number}"}]} | body
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": given}


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def begin(client: openai.AsyncOpenAI, lines: list[dict[str, Any]], endpoint: str = CHAT, **more: Any) -> Batch:
    file = await client.files.create(file=("lines.jsonl", jsonl(lines)), purpose="batch")
    given: Any = {"completion_window": "24h"} | more
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, **given)  # type: ignore[arg-type]


async def until(client: openai.AsyncOpenAI, batch: Batch, condition: Condition) -> Batch:
    async with asyncio.timeout(HUNG):
        while not condition(batch):
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def results(client: openai.AsyncOpenAI, file: str | None) -> list[dict[str, Any]]:
    if file is None:
        return []
    content = await client.files.content(file)
    return [json.loads(each) for each in content.text.splitlines()]


def is_over(batch: Batch) -> bool:
    return batch.status in ("completed", "failed", "expired", "cancelled")


async def test_answers_and_errors(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1})
    lines = [line(number, "smol" if number % 2 else "other") for number in range(40)] + [line(40, "nope")]
    async with client_of(daemon) as client:
        batch = await begin(client, lines, metadata={"for": "a test"})
        batch = await until(client, batch, is_over)
        assert batch.status == "completed"
        assert batch.metadata == {"for": "a test"}
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (41, 40, 1)
        answered = await results(client, batch.output_file_id)
        assert [each["custom_id"] for each in answered] == [f"line-{number}" for number in range(40)]
        assert answered[0]["response"]["body"]["choices"][0]["message"]["content"].startswith("w0 w1")
        [refused] = await results(client, batch.error_file_id)
        assert (refused["custom_id"], refused["response"]["status_code"]) == ("line-40", 404)
        assert refused["response"]["body"]["error"]["code"] == "model_not_found"
        assert [each.id for each in (await client.batches.list()).data] == [batch.id]
        assert {file.purpose for file in (await client.files.list()).data} == {"batch", "batch_output"}


async def test_each_model_is_loaded_once(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1})
    lines = [line(number, "smol" if number % 2 else "other") for number in range(80)]
    async with client_of(daemon) as client:
        await until(client, await begin(client, lines), is_over)
    asked = [each["custom_id"] for each in await recorded(daemon)]
    assert len(asked) == 80
    async with daemon.unix.get("/engines/requests") as answer:
        order = [each["model_name"] for each in reversed(await answer.json())]
    assert order == sorted(order, key=order.index)


async def recorded(daemon: Daemon) -> list[dict[str, Any]]:
    async with daemon.unix.get("/engines/requests") as answer:
        return [{"custom_id": each["request_id"]} for each in await answer.json()]


async def test_a_wrong_file_fails_as_a_whole(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    wrong = [
        line(0),
        line(0),
        line(1, url="/v1/embeddings"),
        line(2, stream=True),
        {"custom_id": "x"},
    ]
    async with client_of(daemon) as client:
        batch = await begin(client, wrong)
        assert batch.status == "failed"
        assert batch.errors is not None
        assert [error.line for error in batch.errors.data or []] == [2, 3, 4, 5]
        with pytest.raises(openai.NotFoundError):
            await client.batches.create(
                input_file_id="file-no", endpoint="/v1/chat/completions", completion_window="24h"
            )
        with pytest.raises(openai.BadRequestError):
            await client.batches.create(input_file_id="file-no", endpoint="/v1/nope", completion_window="24h")  # type: ignore[arg-type]


async def test_cancelled(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--rate=200",)
    async with client_of(daemon) as client:
        batch = await begin(client, [line(number) for number in range(400)])
        await until(client, batch, lambda b: b.request_counts is not None and b.request_counts.completed > 0)
        batch = await until(client, await client.batches.cancel(batch.id), is_over)
        assert batch.status == "cancelled"
        answered = await results(client, batch.output_file_id)
        unasked = await results(client, batch.error_file_id)
        assert answered
        assert unasked
        assert len(answered) + len(unasked) == 400
        assert unasked[-1]["error"]["code"] == "batch_cancelled"
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(batch.id)


async def test_expired(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--never-ready",)
    async with client_of(daemon) as client:
        batch = await begin(client, [line(number) for number in range(3)], completion_window="0.2s")
        batch = await until(client, batch, is_over)
        assert (batch.status, batch.output_file_id) == ("expired", None)
        assert [each["error"]["code"] for each in await results(client, batch.error_file_id)] == ["batch_expired"] * 3


async def test_a_batch_belongs_to_its_key(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    texts = {}
    for name in ("kim", "lee"):
        async with daemon.unix.post("/keys", json={"name": name}) as answer:
            texts[name] = (await answer.json())["text"]
    async with client_of(daemon, texts["kim"]) as kim, client_of(daemon, texts["lee"]) as lee:
        batch = await until(kim, await begin(kim, [line(0)]), is_over)
        assert batch.status == "completed"
        assert (await lee.batches.list()).data == []
        assert (await lee.files.list()).data == []
        with pytest.raises(openai.NotFoundError):
            await lee.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError):
            await lee.files.content(str(batch.output_file_id))
    async with daemon.unix.get("/usage?by=key") as answer:
        assert [each["name"] for each in await answer.json()] == ["kim"]


async def test_interactive_requests_go_first(start_daemon: StartDaemon) -> None:
    """One sequence, so that the order of the answers is the order in which the scheduler let them in."""
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--rate=100",)
    async with client_of(daemon) as client:
        batch = await begin(client, [line(number) for number in range(60)])
        await until(client, batch, lambda b: b.request_counts is not None and b.request_counts.completed > 0)
        answer = await client.chat.completions.create(model="smol", messages=[{"role": "user", "content": "now"}])
        assert answer.choices
        counts = (await client.batches.retrieve(batch.id)).request_counts
        assert counts is not None
        assert counts.completed < 60
        await until(client, await client.batches.cancel(batch.id), is_over)


async def test_the_end_of_its_engine_beside_a_client_loses_nothing(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--rate=100", "--tokens=10")

    async def runner() -> dict[str, Any]:
        async with daemon.unix.get("/engines/ps") as answer:
            [only] = await answer.json()
            return dict(only)

    async with client_of(daemon) as client:
        ask = client.chat.completions.create
        await ask(model="smol", messages=[{"role": "user", "content": "now"}])
        batch = await begin(client, [line(number) for number in range(30)])
        async with asyncio.timeout(HUNG):
            seen = await runner()
            while not seen["leases"]:
                await asyncio.sleep(0.01)
                seen = await runner()
        os.kill(seen["pid"], signal.SIGKILL)
        answer = await ask(model="smol", messages=[{"role": "user", "content": "and now"}])
        assert answer.choices
        over = await until(client, batch, is_over)
        answered = await results(client, over.output_file_id)
        assert over.request_counts is not None
        assert over.request_counts.failed == 0
        assert [each["custom_id"] for each in answered] == [f"line-{number}" for number in range(30)]


async def test_the_command_line_runs_a_batch(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"smol": 0})
    (tmp_path / "lines.jsonl").write_bytes(jsonl([*map(line, range(5)), line(5, model="nope")]))

    async def run(*words: str) -> tuple[int, str, str]:
        command = (sys.executable, "-m", "modelrunner", "batch", *words, "--host", f"http://127.0.0.1:{daemon.port}")
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
        async with asyncio.timeout(HUNG):
            out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode()

    code, out, err = await run("run", str(tmp_path / "lines.jsonl"))
    assert [json.loads(text)["custom_id"] for text in out.splitlines()] == [f"line-{number}" for number in range(5)]
    assert code == 1
    assert "1 requests got no answer" in err
    [(id, state)] = [text.split()[:2] for text in (await run("ls"))[1].splitlines()[1:]]
    assert state == "completed"
    assert [json.loads(text)["custom_id"] for text in (await run("errors", id))[1].splitlines()] == ["line-5"]
    assert (await run("answers", id))[1] == out
    code, out, _ = await run("run", str(tmp_path / "lines.jsonl"), "-o", str(tmp_path / "answers.jsonl"))
    assert (code, out) == (1, "")
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 5


async def test_files(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    async with client_of(daemon) as client:
        file = await client.files.create(file=("a.jsonl", b"x" * 3_000_000), purpose="batch")
        assert (file.bytes, file.filename) == (3_000_000, "a.jsonl")
        assert len((await client.files.content(file.id)).content) == 3_000_000
        assert (await client.files.retrieve(file.id)).id == file.id
        assert (await client.files.delete(file.id)).deleted
        for ask in (client.files.retrieve, client.files.delete, client.files.content):
            with pytest.raises(openai.NotFoundError):
                await ask(file.id)
        with pytest.raises(openai.BadRequestError):
            await client.files.create(file=b"x", purpose="mischief")  # type: ignore[arg-type]
    async with daemon.unix.post("/v1/files", json={}) as answer:
        assert answer.status == 400
    async with daemon.unix.get("/v1/files/..%2f..%2fkeys.json/content") as answer:
        assert answer.status == 404


FORM = {"Content-Type": "multipart/form-data; boundary=b"}
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
CONTENT = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n'


async def test_a_form_of_many_small_parts_is_refused_early(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    part = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n\r\n'
    for form in (part * 16_000, b"\r\n" * 200_000 + CONTENT):
        async with daemon.unix.post("/v1/files", data=form, headers=FORM) as answer:
            assert answer.status == 400
            assert "too many parts" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize(
    "form",
    [
        b"",
        b"--b",
        PURPOSE,
        PURPOSE + CONTENT[:-2],
        PURPOSE + CONTENT + b"--b\r\n" + b"A: b\r\n" * 10_000,
        PURPOSE + CONTENT + b"--b\r\nno header\r\n\r\n",
        PURPOSE + CONTENT + b"--b\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c--\r\n--b--\r\n",
        b"--b\r\nA: " + b"x" * 1_000_000,
    ],
)
async def test_a_broken_form_keeps_nothing(start_daemon: StartDaemon, form: bytes) -> None:
    daemon = await start_daemon()
    async with daemon.unix.post("/v1/files", data=form, headers=FORM) as answer:
        assert answer.status == 400, await answer.text()
    async with daemon.unix.get("/v1/files") as answer:
        assert (await answer.json())["data"] == []
    folder = daemon.settings.data_dir / "state" / "files"
    assert not folder.exists() or not list(folder.iterdir())


async def test_a_name_that_is_no_text_is_made_one(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    form = PURPOSE + CONTENT.replace(b'"a"', b'"\xff.jsonl"') + b"--b--\r\n"
    async with daemon.unix.post("/v1/files", data=form, headers=FORM) as answer:
        assert (answer.status, (await answer.json())["filename"]) == (200, "?.jsonl")
    async with daemon.unix.get("/v1/files") as answer:
        assert [file["filename"] for file in (await answer.json())["data"]] == ["?.jsonl"]


async def make_key(daemon: Daemon, path: str = "/keys", **fields: Any) -> str:
    async with daemon.unix.post(path, json=fields or None) as answer:
        text: str = (await answer.json())["text"]
        return text


async def test_a_key_made_anew_inherits_nothing(start_daemon: StartDaemon) -> None:
    """A new text of the same key sees what the key made; a later key of its name does not."""
    daemon = await start_daemon(models={"smol": 0})
    async with client_of(daemon, await make_key(daemon, name="kim")) as client:
        batch = await until(client, await begin(client, [line(0)]), is_over)
        response = await client.responses.create(model="smol", input="hello")
    async with client_of(daemon, await make_key(daemon, "/keys/kim/rotate")) as client:
        assert [found.id for found in (await client.batches.list()).data] == [batch.id]
        assert (await client.responses.retrieve(response.id)).id == response.id
    async with daemon.unix.delete("/keys/kim?open=true") as answer:
        assert answer.status == 200
    async with client_of(daemon, await make_key(daemon, name="kim")) as client:
        assert (await client.batches.list()).data == []
        assert (await client.files.list()).data == []
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
    async with daemon.unix.get("/v1/batches") as answer:
        assert [found["id"] for found in (await answer.json())["data"]] == [batch.id]


async def test_files_have_a_limit_together(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, files_limit=1000)
    async with client_of(daemon) as client:
        first = await client.files.create(file=("a", b"x" * 900), purpose="batch")
        with pytest.raises(openai.InternalServerError, match="files_limit") as full:
            await client.files.create(file=("b", b"x" * 200), purpose="batch")
        assert full.value.status_code == 507
        await client.files.delete(first.id)
        await client.files.create(file=("b", b"x" * 200), purpose="batch")
