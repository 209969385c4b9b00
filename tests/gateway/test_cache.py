"""The response cache: which requests share an answer, and who gets none."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from modelrunner.aliases import Alias
from modelrunner.errors import RequestCancelled
from modelrunner.gateway.interceptors.forwarded_request import ForwardedRequest
from modelrunner.gateway.interceptors.response_cache import ResponseCache
from modelrunner.types import Mode, RunnerKey
from tests.gateway.fakes import SSE, Call, chunk, event, until
from tests.gateway.harness import CHAT, Answer, Proxy, proxy, request
from tests.gateway.test_observers import Notes


class Engine:
    """Answers with its count; `held` answers begin, and end once `gate` is open."""

    def __init__(self, *, held: bool = False, status: int = 200) -> None:
        self.calls = 0
        self.held, self.status = held, status
        self.gate = asyncio.Event()
        self.left = 0

    async def __call__(self, call: Call) -> None:
        self.calls += 1
        if b'"stream":true' in call.request.body:
            await call.send(SSE + event(f"begun {self.calls}"))
            if self.held:
                await self._wait(call)
            await call.send(event("[DONE]") + b"0\r\n\r\n")
            return
        if self.held:
            await self._wait(call)
        body = b'{"answer":%d}' % self.calls
        head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        await call.send(head % (self.status, len(body)) + body)

    async def _wait(self, call: Call) -> None:
        leaving = asyncio.ensure_future(call.left())
        await asyncio.wait((leaving, asyncio.ensure_future(self.gate.wait())), return_when=asyncio.FIRST_COMPLETED)
        self.left += leaving.done()
        leaving.cancel()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def cached(served: Proxy, *, memory: int = 1 << 20, clock: Clock | None = None) -> ResponseCache:
    cache = ResponseCache(served.pipeline.exchanges, memory, 60.0, clock or Clock())
    served.pipeline.use_interceptors(cache)
    return cache


def ask(text: str = "hello", path: str = CHAT, head: Any = None, **more: Any) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "temperature": 0} | more
    return request(path, {name: value for name, value in body.items() if value is not None}, **(head or {}))


def told(answer: Answer) -> str | None:
    assert answer.complete
    return answer.headers.get("x-modelrunner-cache")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_identical_request_is_answered_from_memory(folder: Path, kind: str, stream: bool) -> None:
    async with proxy(folder, kind, engine := Engine()) as served:
        clock = Clock()
        cached(served, clock=clock)
        first = await served.ask(ask(stream=stream))
        clock.now = 7.0
        again = await served.ask(ask(stream=stream))
        assert (told(first), told(again), engine.calls) == ("miss", "hit", 1)
        assert (again.body, again.headers["content-type"]) == (first.body, first.headers["content-type"])
        assert again.headers["age"] == "7"
        assert again.headers["x-request-id"] != first.headers["x-request-id"]
        clock.now = 61.0
        assert told(await served.ask(ask(stream=stream))) == "miss"


@pytest.mark.parametrize(
    ("more", "shared"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.5}, False),
        ({"temperature": None}, False),
        ({"temperature": 0.5, "seed": 3}, True),
        ({"temperature": 0.5, "seed": -1}, False),
        ({"temperature": None, "seed": 0xFFFFFFFF}, False),  # llama.cpp's random seed
        ({"temperature": None, "options": {"seed": 1}}, False),
    ],
)
async def test_only_what_is_determined_is_shared(folder: Path, more: dict[str, Any], shared: bool) -> None:
    async with proxy(folder, "fast", engine := Engine()) as served:
        cached(served)
        assert [told(await served.ask(ask(**more))) for _ in range(2)] == (["miss", "hit"] if shared else [None, None])
        assert engine.calls == (1 if shared else 2)


async def test_ollamas_options_count(folder: Path) -> None:
    async with proxy(folder, "fast") as served:
        cached(served)
        data = ask(path="/api/chat", temperature=None, options={"seed": 1}, stream=True)
        assert (await served.ask(data)).headers["x-modelrunner-cache"] == "miss"
        data = ask(path="/api/chat", temperature=None, options={"seed": -1}, stream=True)
        assert "x-modelrunner-cache" not in (await served.ask(data)).headers
        data = ask(path="/api/chat", temperature=0, stream=True)
        assert "x-modelrunner-cache" not in (await served.ask(data)).headers


async def test_another_request_caller_or_configuration_gets_its_own(folder: Path) -> None:
    async with proxy(folder, "fast", engine := Engine()) as served:
        cached(served)
        await served.ask(ask())
        assert told(await served.ask(ask("bye"))) == "miss"
        assert told(await served.ask(ask(path="/engines/v1/chat/completions"))) == "miss"
        assert told(await served.ask(ask(head={"X-Caller": "another"}))) == "miss"
        assert told(await served.ask(ask(head={"Authorization": "Bearer x"}))) == "miss"
        assert told(await served.ask(ask())) == "hit"
        served.runner.key = RunnerKey("fake", "m", served.runner.key.mode, 1)
        target = served.pipeline.leases.resolve._target  # type: ignore[attr-defined]

        def reconfigured(*address: Any) -> Any:
            found = target(*address)
            found.key = served.runner.key
            return found

        served.pipeline.leases.resolve._target = reconfigured  # type: ignore[attr-defined]
        assert told(await served.ask(ask())) == "miss"
        assert told(await served.ask(ask())) == "hit"
        assert engine.calls == 6


async def test_errors_and_broken_answers_are_not_kept(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, engine := Engine(status=400)) as served:
        cached(served)
        assert [(await served.ask(ask())).status for _ in range(2)] == [400, 400]
        assert engine.calls == 2

    async def broken(call: Call) -> None:
        await call.send(SSE + event("a"))
        call.close()

    async with proxy(folder, kind, broken) as served:
        cached(served)
        for _ in range(2):
            answer = await served.ask(ask(stream=True))
            assert told(answer) == "miss"
            assert answer.body.startswith(b"data: a\n\nevent: error")
            lines = await served.ask(ask(path="/api/chat", temperature=None, options={"seed": 1}, stream=True))
            assert (told(lines), b'{"error":' in lines.body) == ("miss", True)
        assert len(served.engine.received) == 4


@pytest.mark.parametrize("last", [b'event: error\ndata: {"code":"x"}', b'data: {"error":{"code":"x"}}'])
async def test_a_stream_that_the_engine_ends_with_its_own_error_is_not_kept(folder: Path, last: bytes) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + event("a") + chunk(last + b"\n\n") + event("[DONE]") + b"0\r\n\r\n")

    async with proxy(folder, "fast", script) as served:
        cached(served)
        assert [told(await served.ask(ask(stream=True))) for _ in range(2)] == ["miss", "miss"]


@pytest.mark.parametrize(("sent", "reads"), [(event("ha"), True), (chunk(b"data: ha"), False)])
async def test_a_request_that_shares_an_answer_is_stopped_between_events_only(
    folder: Path, sent: bytes, reads: bool
) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + sent)
        await call.left()

    async with proxy(folder, "fast", script) as served:
        cached(served)
        first, second = await served.connect(), await served.connect()
        answers = []
        for client in (first, second):
            await client.send(ask(stream=True))
            answers.append(answer := await client.head())
            while b"ha" not in answer.body:
                await client.more(answer)
        [shared] = [work for work in served.pipeline.running if isinstance(work, ForwardedRequest)]
        shared.stop(RequestCancelled("cancelled"))
        while await second.more(answers[1]):
            pass
        assert (answers[1].complete, b"event: error" in answers[1].body) == (reads, reads)
        assert (answers[0].headers["x-modelrunner-cache"], answers[0].body) == ("miss", b"data: ha" + reads * b"\n\n")


async def test_the_memory_is_bounded(folder: Path) -> None:
    async with proxy(folder, "fast", engine := Engine()) as served:
        cached(served, memory=3000)  # room for two
        for text in ("a", "b", "a", "c", "a", "b"):
            await served.ask(ask(text))
        assert engine.calls == 4  # b went when c came, since a was asked for after it
        cached(served, memory=64)  # no answer may have more than 8 bytes
        engine.calls = 0
        for _ in range(2):
            assert told(await served.ask(ask("d"))) == "miss"
        assert engine.calls == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_that_run_at_the_same_time_share_one(folder: Path, kind: str, stream: bool) -> None:
    engine = Engine(held=True)
    async with proxy(folder, kind, engine) as served:
        cached(served)
        first, second, third = [await served.connect() for _ in range(3)]
        await first.send(ask(stream=stream))
        await until(lambda: engine.calls == 1)
        if stream:  # the second comes in the middle
            assert await first.more(await first.head()) == b"data: begun 1\n\n"
        await second.send(ask(stream=stream))
        await third.send(ask(stream=stream))
        await until(lambda: len(served.pipeline.running) == 3)
        await first.leave()  # the others still want it
        await third.leave()
        await until(lambda: len(served.pipeline.running) == 2)
        engine.gate.set()
        answer = await second.answer()
        assert (answer.status, told(answer), engine.calls, engine.left) == (200, "shared", 1, 0)
        assert b"1" in answer.body
        assert told(await served.ask(ask(stream=stream))) == "hit"


async def test_the_last_one_that_leaves_ends_the_work(folder: Path, kind: str) -> None:
    engine = Engine(held=True)
    async with proxy(folder, kind, engine) as served:
        cached(served)
        clients = [await served.connect() for _ in range(2)]
        for client in clients:
            await client.send(ask(stream=True))
        await until(lambda: len(served.pipeline.running) == 2 and engine.calls == 1)
        for client in clients:
            await client.leave()
        await until(lambda: engine.left == 1)
        engine.gate.set()
        assert told(await served.ask(ask(stream=True))) == "miss"


async def test_an_error_is_that_of_the_first_alone(folder: Path, kind: str) -> None:
    engine = Engine(held=True, status=400)
    async with proxy(folder, kind, engine) as served:
        cached(served)
        clients = [await served.connect() for _ in range(3)]
        for client in clients:
            await client.send(ask())
        await until(lambda: len(served.pipeline.running) == 3 and engine.calls == 1)
        engine.gate.set()
        answers = [await client.answer() for client in clients]
        assert [answer.status for answer in answers] == [400] * 3
        assert engine.calls == 3
        for answer in answers:
            assert answer.error["message"]


async def test_every_answer_is_recorded_with_its_model(folder: Path) -> None:
    engine = Engine(held=True)
    async with proxy(folder, "fast", engine) as served:
        cached(served)
        notes = Notes(served.pipeline.observers)
        first, second = [await served.connect() for _ in range(2)]
        for client in (first, second):
            await client.send(ask())
        await until(lambda: len(served.pipeline.running) == 2 and engine.calls == 1)
        engine.gate.set()
        told_of = [told(await client.answer()) for client in (first, second)]
        assert {*told_of, told(await served.ask(ask()))} == {"miss", "shared", "hit"}
        assert [(record.served.model, record.served.backend) for record in notes.records] == [("ai/m", "fake")] * 3


async def test_signs_of_life_are_for_those_who_wait(folder: Path) -> None:
    async with proxy(folder, "fast", engine := Engine()) as served:
        cached(served)
        served.scheduler.is_warm = False
        first, second = [await served.connect() for _ in range(2)]
        await first.send(ask(stream=True, head={"X-Progress": "events"}))
        await second.send(ask(stream=True))
        answer = await first.head()
        assert b"modelrunner.progress" in await first.more(answer)
        await until(lambda: served.scheduler.waiting == 2)
        served.scheduler.gate.set()
        while await first.more(answer):
            pass
        assert b"modelrunner.progress" not in (await second.answer()).body
        for _ in range(2):
            again = await served.ask(ask(stream=True, head={"X-Progress": "events"}))
            assert b"modelrunner.progress" not in again.body.partition(b"begun")[2]
        served.scheduler.is_warm = True
        for _ in range(2):
            again = await served.ask(ask(stream=True, head={"X-Progress": "events"}))
            assert b"modelrunner.progress" not in again.body
        assert told(again) == "hit"
        assert engine.calls == 5


class Aliases:
    def __init__(self, model: str) -> None:
        self.model = model

    def find(self, family: str, name: str) -> Alias | None:
        return Alias((self.model,)) if name == "alias" else None

    async def choose(self, alias: Alias, backend: str | None, mode: Mode) -> str:
        return alias.models[0]


async def test_an_alias_that_means_another_model_now(folder: Path) -> None:
    async with proxy(folder, "fast", engine := Engine()) as served:
        cached(served)
        served.pipeline.use_aliases(Aliases("m"))
        assert [told(await served.ask(ask(model="alias"))) for _ in range(2)] == ["miss", "hit"]
        served.pipeline.use_aliases(Aliases("other"))
        assert told(await served.ask(ask(model="alias"))) == "miss"
        assert engine.calls == 2
