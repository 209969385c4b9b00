"""Single embeddings that go to the engine together."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.gateway.interceptors.embedding_batcher import EmbeddingBatcher, split
from tests.gateway.fakes import Call, until
from tests.gateway.harness import Answer, Proxy, proxy, request
from tests.gateway.test_observers import Notes

PATH = "/v1/embeddings"


def ask(text: Any, head: Any = None, **more: Any) -> bytes:
    return request(PATH, {"model": "m", "input": text} | more, **(head or {}))


class Engine:
    """A vector with the length of each text; a token for each word. A request with `poison` among its texts is
    refused; `reversed` gives the vectors in another order; `gate` holds answers back; `odd` is the answer to several
    texts."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.reversed = False
        self.details: dict[str, Any] = {}
        self.odd: bytes | None = None
        self.gate: asyncio.Event | None = None
        self.left = 0
        self.counting = self.most_counting = 0  # texts whose tokens are counted

    async def __call__(self, call: Call) -> None:
        body = msgspec.json.decode(call.request.body)
        if call.request.path == "/tokenize":
            self.counting += 1
            self.most_counting = max(self.most_counting, self.counting)
            for _ in range(20):  # turns of the loop in which others would come
                await asyncio.sleep(0)
            self.counting -= 1
            return await self._send(call, 200, {"tokens": [0] * (len(body["content"].split()) + 1)})
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        self.inputs.append(body["input"])
        if self.gate is not None:
            leaving = asyncio.ensure_future(call.left())
            opening = asyncio.ensure_future(self.gate.wait())
            await asyncio.wait((leaving, opening), return_when=asyncio.FIRST_COMPLETED)
            self.left += leaving.done()
            leaving.cancel(), opening.cancel()
        if self.odd is not None and len(texts) > 1:
            return await self._send_bytes(call, 200, self.odd)
        if "poison" in texts:
            return await self._send(call, 400, {"error": {"message": "a bad text", "code": 400}})
        data: list[Any] = [{"object": "embedding", "index": i, "embedding": [len(one)]} for i, one in enumerate(texts)]
        words = sum(len(one.split()) + 1 if isinstance(one, str) else len(one) for one in texts)
        usage = {"prompt_tokens": words, "total_tokens": words, **self.details}
        made = {"object": "list", "model": "m", "data": data[::-1] if self.reversed else data, "usage": usage}
        return await self._send(call, 200, made)

    async def _send(self, call: Call, status: int, body: Any) -> None:
        await self._send_bytes(call, status, msgspec.json.encode(body))

    async def _send_bytes(self, call: Call, status: int, data: bytes) -> None:
        head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        await call.send(head % (status, len(data)) + data)


async def together(served: Proxy, *requests: bytes) -> list[Answer]:
    """The answers to requests that all come before the window closes: it does with the last of them."""
    served.pipeline.use_interceptors(EmbeddingBatcher(served.pipeline.exchanges, 1000.0, len(requests)))
    return await asyncio.gather(*(served.ask(data) for data in requests))


@pytest.mark.parametrize("backwards", [False, True])
async def test_what_comes_together_is_asked_together(folder: Path, kind: str, backwards: bool) -> None:
    engine = Engine()
    engine.reversed = backwards
    async with proxy(folder, kind, engine) as served:
        texts = ["a", "two words", "three little words"]
        answers = await together(served, *(ask(text) for text in texts))
        [asked] = engine.inputs
        assert sorted(asked) == sorted(texts)
        for text, answer in zip(texts, answers, strict=True):
            found = answer.json()
            assert found["data"] == [{"object": "embedding", "index": 0, "embedding": [len(text)]}]
            assert found["usage"] == {"prompt_tokens": len(text.split()) + 1, "total_tokens": len(text.split()) + 1}
            assert (found["object"], found["model"]) == ("list", "m")
        assert len({answer.headers["x-request-id"] for answer in answers}) == 3


async def test_the_tokens_of_many_texts_take_few_connections(folder: Path) -> None:
    async with proxy(folder, "fast", engine := Engine()) as served:
        answers = await together(served, *(ask("word " * number) for number in range(1, 9)))
        assert sorted(answer.json()["usage"]["prompt_tokens"] for answer in answers) == list(range(2, 10))
        assert engine.most_counting <= 2


async def test_tokens_are_gathered_too(folder: Path) -> None:
    async with proxy(folder, "fast", engine := Engine()) as served:
        answers = await together(served, ask([1, 2, 3]), ask([[4]]))
        assert sorted(engine.inputs[0]) == [[1, 2, 3], [4]]
        assert [answer.json()["usage"]["prompt_tokens"] for answer in answers] == [3, 1]


async def test_usage_may_say_more_than_numbers(folder: Path) -> None:
    """As vLLM's does."""
    engine = Engine()
    engine.details = {"completion_tokens": 0, "prompt_tokens_details": None}
    async with proxy(folder, "fast", engine) as served:
        answers = await together(served, ask("a"), ask("two words"))
        assert len(engine.inputs) == 1
        assert [answer.json()["usage"] for answer in answers] == [
            {"prompt_tokens": words, "total_tokens": words, **engine.details} for words in (2, 3)
        ]


async def test_usage_may_say_nothing(folder: Path) -> None:
    engine = Engine()
    engine.details = {"prompt_tokens": None, "total_tokens": None}
    async with proxy(folder, "fast", engine) as served:
        notes = Notes(served.pipeline.observers)
        answers = await together(served, ask("a"), ask("two words"))
        assert len(engine.inputs) == 1
        assert [answer.json()["usage"] for answer in answers] == [engine.details] * 2
        assert [record.tokens.prompt for record in notes.records] == [0, 0]


async def test_the_error_of_one_is_not_the_others(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, engine := Engine()) as served:
        good, bad, also = await together(served, ask("good"), ask("poison"), ask("also"))
        assert [good.status, bad.status, also.status] == [200, 400, 200]
        assert bad.error["message"] == "a bad text"
        assert [answer.json()["data"][0]["embedding"] for answer in (good, also)] == [[4], [4]]
        assert len(engine.inputs) == 4


VECTORS = b'{"data":[{"index":0,"embedding":[1]},{"index":1,"embedding":[2]}]'


@pytest.mark.parametrize(
    "odd",
    [
        *(b"", b"[]", b"{", b'{"data":null}', b'{"data":[]}', b'{"data":[{"index":0},{"index":0}]}'),
        *(VECTORS + b',"usage":[]}', VECTORS + b',"\xff":1}', VECTORS + b',"usage":{"x":"\xff"}}'),
        VECTORS + b',"usage":{"x":' + b"[" * 2000 + b"]" * 2000 + b"}}",
    ],
)
async def test_an_answer_that_cannot_be_taken_apart_is_asked_for_again_one_by_one(folder: Path, odd: bytes) -> None:
    engine = Engine()
    engine.odd = odd
    async with proxy(folder, "fast", engine) as served:
        answers = await together(served, ask("a"), ask("two words"))
        assert [answer.json()["data"][0]["embedding"] for answer in answers] == [[1], [9]]


async def test_what_differs_is_kept_apart(folder: Path) -> None:
    async with proxy(folder, "fast", engine := Engine()) as served:
        served.pipeline.use_interceptors(EmbeddingBatcher(served.pipeline.exchanges, 0.001, 99))
        different = [
            *(ask("a"), ask("b", encoding_format="base64"), ask("c", dimensions=8), ask([[1]])),
            *(ask("d", head={"X-Caller": "x"}), ask("e", head={"X-Priority": "batch"})),
            *(ask(["f", "g"]), ask([]), ask(""), ask("h", user="u"), ask("i" * 70_000)),
        ]
        answers = await asyncio.gather(*(served.ask(data) for data in different))
        assert [answer.status for answer in answers] == [200] * len(different)
        assert len(engine.inputs) == len(different)


async def test_clients_that_leave(folder: Path, kind: str) -> None:
    engine = Engine()
    engine.gate = asyncio.Event()
    async with proxy(folder, kind, engine) as served:
        served.pipeline.use_interceptors(EmbeddingBatcher(served.pipeline.exchanges, 1000.0, 3))
        notes = Notes(served.pipeline.observers)
        clients = [await served.connect() for _ in range(4)]
        await clients[0].send(ask("gone"))
        await until(lambda: len(served.pipeline.running) == 1)
        await clients[0].leave()  # before anything was asked
        await until(lambda: not served.pipeline.running)
        for number, client in enumerate(clients[1:]):
            await client.send(ask("x" * number + "y"))
        await until(lambda: len(engine.inputs) == 1)
        await clients[1].leave()  # one of those that were asked
        await until(lambda: len(served.pipeline.running) == 2)
        engine.gate.set()
        answers = [await client.answer() for client in clients[2:]]
        assert [answer.json()["data"][0]["embedding"] for answer in answers] == [[2], [3]]

        engine.gate.clear()
        served.pipeline.use_interceptors(EmbeddingBatcher(served.pipeline.exchanges, 1000.0, 2))
        clients = [await served.connect() for _ in range(2)]
        for client in clients:
            await client.send(ask("z"))
        await until(lambda: len(engine.inputs) == 2)
        for client in clients:
            await client.leave()
        await until(lambda: engine.left == 1)  # nobody is left
        left = [one for one in notes.records if one.status == 499]
        assert [one.tokens.prompt for one in left] == [0, *(one.bytes_in // 4 for one in left[1:])]  # the first unasked


async def test_a_large_batch_goes_before_the_window_closes(folder: Path) -> None:
    async with proxy(folder, "fast", engine := Engine()) as served:
        served.pipeline.use_interceptors(EmbeddingBatcher(served.pipeline.exchanges, 1000.0, 2))
        answers = await asyncio.gather(*(served.ask(ask("a")) for _ in range(6)))
        assert [answer.status for answer in answers] == [200] * 6
        assert engine.inputs == [["a", "a"]] * 3


@given(st.integers(0, 10_000), st.lists(st.integers(0, 500), min_size=1, max_size=50))
def test_shares_add_up(amount: int, weights: list[int]) -> None:
    shares = split(amount, weights)
    assert sum(shares) == amount
    assert all(share >= 0 for share in shares)
    if any(weights):
        assert split(sum(weights), weights) == weights
