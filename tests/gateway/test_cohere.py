"""Cohere's rerank: what the engine gets, and what its clients get."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from modelrunner.errors import Unavailable
from tests.gateway.fakes import Call
from tests.gateway.harness import proxy, request

ASK = {"model": "m", "query": "cats", "documents": ["a dog", {"text": "a cat"}, "a bird"]}


def rerank(**more: Any) -> bytes:
    return request("/v2/rerank", ASK | more)


async def ranking(call: Call) -> None:
    results = [
        {"index": 0, "relevance_score": -1.5},
        {"index": 1, "relevance_score": 2},
        {"index": 2, "relevance_score": 0},
    ]
    body = msgspec.json.encode({"model": "m", "object": "list", "results": results})
    await call.send(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )


async def test_a_ranking(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, ranking) as served:
        answer = await served.ask(rerank(top_n=2, max_tokens_per_doc=9))
        found = answer.json()
        assert [(one["index"], one["relevance_score"]) for one in found["results"]] == [(1, 2), (2, 0)]
        assert (found["id"], found["meta"]["api_version"]) == (answer.headers["x-request-id"], {"version": "2"})
        assert answer.headers["x-modelrunner-ignored"] == "max_tokens_per_doc"
        [received] = served.engine.received
        assert received.path == "/v1/rerank"
        documents = ["a dog", "a cat", "a bird"]
        assert msgspec.json.decode(received.body) == {"model": "m", "query": "cats", "documents": documents, "top_n": 2}


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        (rerank(model="nope"), 404, "there is no model"),
        (rerank(documents="x"), 400, "documents"),
        (rerank(query=7), 400, "query"),
        (rerank(query=None), 400, "query"),
        (rerank(documents=[]), 400, "documents"),
        (rerank(top_n=0), 400, "top_n"),
        (rerank(top_n=1.5), 400, "top_n"),
    ],
)
async def test_refusals(folder: Path, kind: str, data: bytes, status: int, said: str) -> None:
    async with proxy(folder, kind) as served:
        answer = await served.ask(data)
        assert answer.status == status
        assert said in answer.json()["message"]


async def test_an_engines_ranking_that_cannot_be_read(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        assert (await served.ask(rerank())).status == 502
        served.scheduler.refusal = Unavailable("not now")
        assert (await served.ask(rerank())).json()["message"] == "not now"


async def test_documents_without_a_text_are_ranked_by_their_fields(folder: Path) -> None:
    async with proxy(folder, "fast", ranking) as served:
        documents = [{"title": "a", "body": "b"}, {"title": "z", "n": None}, {"text": "t", "title": "x"}]
        await served.ask(rerank(documents=documents))
        assert msgspec.json.decode(served.engine.received[-1].body)["documents"] == [
            "title: a\nbody: b",
            "title: z",
            "t",
        ]
        await served.ask(rerank(documents=documents[2:], rank_fields=["title", "text"]))
        assert msgspec.json.decode(served.engine.received[-1].body)["documents"] == ["title: x\ntext: t"]
