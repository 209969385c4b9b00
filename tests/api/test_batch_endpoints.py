"""Batches of the other endpoints: completions, embeddings and responses."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.conftest import StartDaemon
from tests.api.test_batches import begin, client_of, is_over, results, until

COMPLETIONS, EMBEDDINGS, RESPONSES = "/v1/completions", "/v1/embeddings", "/v1/responses"


def line(number: int, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": {"model": "smol", **body}}


async def test_completions(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--tokens", "3", "--record", str(tmp_path / "record"))
    lines = [line(number, COMPLETIONS, prompt=f"prompt {number}", max_tokens=3) for number in range(30)]
    lines.append(line(30, COMPLETIONS, prompt="x", model="nope"))
    async with client_of(daemon) as client:
        over = await until(client, await begin(client, lines, COMPLETIONS), is_over)
        answered = await results(client, over.output_file_id)
        [refused] = await results(client, over.error_file_id)
    assert (over.status, over.endpoint) == ("completed", COMPLETIONS)
    assert [each["custom_id"] for each in answered] == [f"line-{number}" for number in range(30)]
    for each in answered:
        body = each["response"]["body"]
        assert (each["response"]["status_code"], body["object"]) == (200, "text_completion")
        assert body["choices"][0]["text"] == "w0 w1 w2 "
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("line-30", 404)
    asked = [json.loads(each) for each in (tmp_path / "record").read_text().splitlines()]
    prompts = [json.loads(each["body"])["prompt"] for each in asked if each.get("path") == COMPLETIONS]
    assert sorted(prompts) == sorted(f"prompt {number}" for number in range(30))


async def test_responses(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Each answer is a whole response. It is stored unless its line says otherwise, and goes on from the one that its
    line names."""
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--tokens", "3", "--record", str(tmp_path / "record"))
    async with client_of(daemon) as client:
        before = await client.responses.create(model="smol", input="before")
        lines = [
            line(0, RESPONSES, input="plain"),
            line(1, RESPONSES, input="forgotten", store=False),
            line(2, RESPONSES, input="after", previous_response_id=before.id),
            line(3, RESPONSES, input="lost", previous_response_id="resp_none"),
            line(4, RESPONSES, input=7),
        ]
        over = await until(client, await begin(client, lines, RESPONSES), is_over)
        answered = {each["custom_id"]: each["response"] for each in await results(client, over.output_file_id)}
        refused = {each["custom_id"]: each["response"] for each in await results(client, over.error_file_id)}
        assert (over.status, list(answered)) == ("completed", ["line-0", "line-1", "line-2"])
        assert {name: each["status_code"] for name, each in refused.items()} == {"line-3": 404, "line-4": 400}
        for each in answered.values():
            body = each["body"]
            assert (each["status_code"], body["object"], body["status"]) == (200, "response", "completed")
            assert body["output"][0]["content"][0]["text"] == "w0 w1 w2 "
        plain, forgotten, after = (each["body"] for each in answered.values())
        assert (await client.responses.retrieve(plain["id"])).output_text == "w0 w1 w2 "
        assert (await client.responses.retrieve(after["id"])).previous_response_id == before.id
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(forgotten["id"])
    chats = [json.loads(each) for each in (tmp_path / "record").read_text().splitlines()]
    said = [json.loads(each["body"])["messages"] for each in chats if each.get("path") == "/v1/chat/completions"]
    assert sorted(messages[-1]["content"] for messages in said) == ["after", "before", "forgotten", "plain"]
    [whole] = [messages for messages in said if messages[-1]["content"] == "after"]
    assert [message["content"] for message in whole] == ["before", "w0 w1 w2 ", "after"]


async def test_responses_of_a_batch_belong_to_its_key(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    texts = {}
    for name in ("kim", "lee"):
        async with daemon.unix.post("/keys", json={"name": name}) as answer:
            texts[name] = (await answer.json())["text"]
    async with client_of(daemon, texts["kim"]) as kim, client_of(daemon, texts["lee"]) as lee:
        foreign = await lee.responses.create(model="smol", input="a secret")
        lines = [line(0, RESPONSES, input="x"), line(1, RESPONSES, input="x", previous_response_id=foreign.id)]
        over = await until(kim, await begin(kim, lines, RESPONSES), is_over)
        [made] = await results(kim, over.output_file_id)
        [refused] = await results(kim, over.error_file_id)
        assert (refused["custom_id"], refused["response"]["status_code"]) == ("line-1", 404)
        id = made["response"]["body"]["id"]
        assert (await kim.responses.retrieve(id)).id == id
        with pytest.raises(openai.NotFoundError):
            await lee.responses.retrieve(id)


async def test_no_line_is_worked_on_in_the_background(start_daemon: StartDaemon) -> None:
    """Its answer would be a response that is not complete."""
    daemon = await start_daemon(models={"smol": 0})
    async with client_of(daemon) as client:
        batch = await begin(client, [line(0, RESPONSES, input="x", background=True)], RESPONSES)
        assert batch.status == "failed"
        assert batch.errors is not None
        [error] = batch.errors.data or []
        assert (error.line, "background" in str(error.message)) == (1, True)


async def test_embeddings_go_to_the_engine_together(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Each line has its own answer; one that is not a single text is asked alone."""
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--record", str(tmp_path / "record"))
    async with client_of(daemon) as client:
        await client.embeddings.create(model="smol", input="warm")
        inputs: list[Any] = [*("x" * number for number in range(1, 201)), ["x", "xx"], ""]
        lines = [line(number, EMBEDDINGS, input=text) for number, text in enumerate(inputs, 1)]
        over = await until(client, await begin(client, lines, EMBEDDINGS), is_over)
        found = {each["custom_id"]: each["response"]["body"] for each in await results(client, over.output_file_id)}
    assert over.request_counts is not None
    assert over.request_counts.completed == len(found) == 202
    for number in range(1, 201):
        [vector] = found[f"line-{number}"]["data"]
        assert (vector["index"], vector["embedding"][0]) == (0, float(number))
    assert len(found["line-201"]["data"]) == 2
    asked = [json.loads(each) for each in (tmp_path / "record").read_text().splitlines()]
    inputs = [json.loads(each["body"])["input"] for each in asked if each.get("path") == EMBEDDINGS]
    assert len(inputs) < 100
    assert max(len(each) for each in inputs if isinstance(each, list)) <= 32
