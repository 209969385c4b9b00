"""A real prompt, a real model, a real engine: by every way in."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import GEMMA3, SMOLLM2
from tests.e2e.daemons import Daemon
from tests.models.prompts import MESSAGES, PARIS, QUESTION, SYSTEM

if TYPE_CHECKING:
    from openai import OpenAI


@pytest.fixture(params=["tcp", "unix"])
def client(daemon: Daemon, request: pytest.FixtureRequest) -> "Iterator[OpenAI]":
    """The official client, with nothing but its base URL changed. It takes a second to import."""
    import httpx2
    from openai import OpenAI

    address = daemon.get("/version").json()["listen"] if request.param == "tcp" else "http://localhost"
    transport = httpx2.HTTPTransport(uds=str(daemon.socket)) if request.param == "unix" else None
    with httpx2.Client(transport=transport) as http:
        yield OpenAI(base_url=f"{address}/v1", api_key="unused", http_client=http)


def test_the_command_line_streams_paris(daemon: Daemon) -> None:
    done = daemon.run("run", SMOLLM2, "--system", SYSTEM, "--temperature", "0", "--max-tokens", "40", QUESTION)
    assert done.returncode == 0, done.stderr
    assert PARIS in done.stdout


def test_a_piped_question_is_answered_too(daemon: Daemon) -> None:
    done = daemon.run("run", SMOLLM2, "--system", SYSTEM, "--temperature", "0", "--json", stdin=QUESTION)
    assert done.returncode == 0, done.stderr
    assert PARIS in json.loads(done.stdout)["choices"][0]["message"]["content"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_on_the_unix_socket(daemon: Daemon) -> None:
    body = json.dumps({"model": SMOLLM2, "messages": MESSAGES, "temperature": 0})
    command = ["curl", "-sS", "--unix-socket", str(daemon.socket), "http://localhost/v1/chat/completions", "-d", body]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert PARIS in answer["choices"][0]["message"]["content"]


def test_the_official_client_chats(client: "OpenAI") -> None:
    answer = client.chat.completions.create(model=SMOLLM2, messages=MESSAGES, temperature=0)
    assert PARIS in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_the_official_client_streams(client: "OpenAI") -> None:
    events = list(client.chat.completions.create(model=SMOLLM2, messages=MESSAGES, temperature=0, stream=True))
    pieces = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert len(pieces) > 3
    assert PARIS in "".join(pieces)


def test_the_official_client_completes(client: "OpenAI") -> None:
    prompt = "The capital of Italy is Rome. The capital of Spain is Madrid. The capital of France is"
    answer = client.completions.create(model=GEMMA3, prompt=prompt, temperature=0, max_tokens=4)
    assert "Paris" in answer.choices[0].text


def test_the_official_client_lists_models(client: "OpenAI") -> None:
    models = {model.id: model for model in client.models.list()}
    assert SMOLLM2 in models
    assert models[SMOLLM2].object == "model"
    assert client.models.retrieve(SMOLLM2).id == SMOLLM2


def test_the_official_client_embeds(client: "OpenAI") -> None:
    answer = client.embeddings.create(model=SMOLLM2, input=["Paris", "London"], encoding_format="float")
    assert [len(item.embedding) for item in answer.data] == [576, 576]


def test_an_embedding_of_more_than_a_batch_and_of_more_than_the_context(daemon: Daemon) -> None:
    fits = daemon.post("/v1/embeddings", {"model": SMOLLM2, "input": "word " * 700})
    assert fits.status_code == 200, fits.text
    too_long = daemon.post("/v1/embeddings", {"model": SMOLLM2, "input": "word " * 20000})
    assert 400 <= too_long.status_code < 500, too_long.text
    assert too_long.json()["error"]["message"]


def test_every_spelling_of_the_address_is_the_same_engine(daemon: Daemon) -> None:
    fields = {"model": SMOLLM2, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    for prefix in ("/v1", "/engines/v1", "/engines/llama.cpp/v1"):
        assert daemon.post(f"{prefix}/chat/completions", fields).status_code == 200
    completions = [runner for runner in daemon.runners() if runner["mode"] == "completion"]
    mine = [runner for runner in completions if runner["model_name"] == SMOLLM2]
    assert len(mine) == 1
    own = f"/runners/{mine[0]['id']}/v1/chat/completions"
    assert daemon.post(own, fields).status_code == 200
    other = daemon.post(own, fields | {"model": GEMMA3})
    assert other.status_code == 421
    assert other.json()["error"]["code"] == "misdirected_request"
    assert daemon.post("/runners/00000000/v1/chat/completions", fields).status_code == 404
