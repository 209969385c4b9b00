"""The middleware that runs inside vLLM, around an application that tells what reached it."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest

import modelrunner_vllm

FILE = Path(modelrunner_vllm.__file__).with_name("inside") / "modelrunner_guard.py"


class Client:
    """Sends one request through the guard; `reached` is what the application got, None if nothing."""

    def __init__(self, guard: Any) -> None:
        self.reached: tuple[bytes, dict[bytes, bytes]] | None = None
        self._app = guard.ModelGuard(self._answer)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while scope["type"] == "http" and more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.reached = body, dict(scope.get("headers", []))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(self, path: str, *pieces: bytes, kind: str = "http", app: Any = None) -> tuple[int, Any]:
        waiting = [{"type": "http.request", "body": p, "more_body": i < len(pieces) - 1} for i, p in enumerate(pieces)]
        sent: list[Any] = []

        async def receive() -> Any:
            return waiting.pop(0) if waiting else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        length = str(sum(map(len, pieces))).encode()
        await self._app(
            {"type": kind, "path": path, "headers": [(b"content-length", length)], "app": app}, receive, send
        )
        body = b"".join(message.get("body", b"") for message in sent)
        return sent[0].get("status", 0), json.loads(body) if body else None


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    return guarded(monkeypatch, {})


@pytest.fixture
def adapted(monkeypatch: pytest.MonkeyPatch) -> Client:
    return guarded(monkeypatch, {"sql": "smol", "chat": "smol+chat"})


def guarded(monkeypatch: pytest.MonkeyPatch, adapters: dict[str, str]) -> Client:
    monkeypatch.setenv("MODELRUNNER_GUARD", json.dumps({"models": ["smol", "sha256:a"], "adapters": adapters}))
    spec = importlib.util.spec_from_file_location("modelrunner_guard", FILE)
    assert spec is not None
    assert spec.loader is not None
    guard = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(guard)
    return Client(guard)


@pytest.mark.parametrize("model", ["smol", "sha256:a"])
async def test_its_own_names_pass_byte_for_byte(client: Client, model: str) -> None:
    body = json.dumps({"model": model, "prompt": "é"}).encode()
    assert await client.ask("/v1/completions", body[:10], body[10:]) == (200, None)
    assert client.reached is not None
    assert client.reached[0] == body


async def test_another_model_is_misdirected(client: Client) -> None:
    status, answer = await client.ask("/v1/chat/completions", b'{"model": "other"}')
    assert (status, answer["error"]["code"]) == (421, "misdirected_request")
    assert client.reached is None


@pytest.mark.parametrize(
    ("fields", "model"),
    [
        ({"model": "smol"}, "smol"),
        ({"model": "sha256:a"}, "smol"),
        ({}, "smol"),
        ({"model": "smol", "adapter": None}, "smol"),
        ({"model": "smol", "adapter": "sql"}, "smol"),
        ({"model": "sha256:a", "adapter": "chat"}, "smol+chat"),
    ],
)
async def test_the_first_adapter_answers_unless_another_is_named(
    adapted: Client, fields: dict[str, Any], model: str
) -> None:
    await adapted.ask("/v1/completions", json.dumps({**fields, "seed": 18446744073709551615}).encode())
    assert adapted.reached is not None
    body, headers = adapted.reached
    assert json.loads(body) == {"model": model, "seed": 18446744073709551615}
    assert headers[b"content-length"] == str(len(body)).encode()


@pytest.mark.parametrize("adapter", [b'"other"', b'""', b"7", b'["sql"]', b'{"name": "sql"}', b"false"])
async def test_an_adapter_that_is_none_is_refused(adapted: Client, client: Client, adapter: bytes) -> None:
    for asked, told in ((adapted, "there are: sql, chat"), (client, "there are: none")):
        status, answer = await asked.ask("/v1/completions", b'{"model": "smol", "adapter": %b}' % adapter)
        assert (status, told in answer["error"]["message"]) == (400, True)
        assert asked.reached is None


@pytest.mark.parametrize("path", ["/server_info", "/invocations", "/v1/load_lora_adapter", "/docs", "/"])
async def test_other_routes_do_not_exist(client: Client, path: str) -> None:
    status, _ = await client.ask(path, b"{}")
    assert status == 404
    assert client.reached is None


async def test_sockets_of_the_web_are_closed(client: Client) -> None:
    await client.ask("/v1/realtime", kind="websocket")
    assert client.reached is None


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": 3}', b"\xff", b'{"prompt": "no model"}'])
async def test_what_makes_no_sense_is_left_to_vllm(client: Client, body: bytes) -> None:
    await client.ask("/v1/completions", body)
    assert client.reached is not None
    assert client.reached[0] == body


async def test_a_client_that_leaves_while_it_sends(client: Client) -> None:
    sent = await client.ask("/health")
    assert sent == (200, None)
    client.reached = None
    with pytest.raises(IndexError):  # nobody is left to answer
        await client.ask("/v1/completions")
    assert client.reached is None


class Question(pydantic.BaseModel):
    """As vLLM's models of requests: with another name for a field, and one that it does not use."""

    messages: list[str] = []
    structured: str = pydantic.Field("", alias="structured_outputs")
    format: str = pydantic.Field("", validation_alias=pydantic.AliasChoices("response_format", "rf"))
    user: str = ""


class Score(pydantic.BaseModel):
    top_n: int = 0


def route(path: str, *annotations: Any) -> Any:
    bodies = [SimpleNamespace(field_info=SimpleNamespace(annotation=annotation)) for annotation in annotations]
    return SimpleNamespace(path=path, dependant=SimpleNamespace(body_params=bodies))


async def test_the_fields_that_vllm_reads_are_told(client: Client) -> None:
    routes = [
        route("/v1/chat/completions", Question),
        route("/rerank", Question | Score),
        route("/tokenize", dict[str, int]),
        route("/server_info", Score),
        SimpleNamespace(path="/health"),
    ]
    status, told = await client.ask("/modelrunner/fields", app=SimpleNamespace(routes=routes))
    question = ["adapter", "format", "messages", "model", "response_format", "rf", "structured", "structured_outputs"]
    assert (status, told) == (200, {"/v1/chat/completions": question, "/rerank": sorted([*question, "top_n"])})
    assert client.reached is None
