"""What observers are told of requests, and that each is told once."""

from pathlib import Path

import pytest

from modelrunner.gateway.request.observers import Observers, RequestRecord
from modelrunner.telemetry.accesslog import AccessLog
from tests.gateway.fakes import SSE, Call, event, until
from tests.gateway.harness import CHAT, proxy, request


class Notes:
    """Keeps everything that the observers are told."""

    def __init__(self, observers: Observers) -> None:
        self.records: list[RequestRecord] = []
        observers.add(self)

    def finished(self, record: RequestRecord) -> None:
        self.records.append(record)


class Faulty:
    def finished(self, record: RequestRecord) -> None:
        raise RuntimeError("an observer's own fault")


async def stream(call: Call) -> None:
    await call.send(SSE)
    await call.send(event("a"))
    await call.send(event("b") + b"0\r\n\r\n")


async def test_an_answer_is_told(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, stream) as served:
        few, notes = Notes(served.pipeline.observers), Notes(served.pipeline.observers)
        served.scheduler.is_warm = False
        served.scheduler.gate.set()
        answer = await served.ask(request(stream=True, X_Request_ID="mine", X_Caller="nightly"))
        assert answer.body == b"data: a\n\ndata: b\n\n"
        [record] = notes.records
        assert few.records == [record]
        assert (record.request_id, record.status, record.error) == ("mine", 200, "")
        assert (record.labels.family, record.labels.route, record.model) == ("openai", CHAT, "m")
        assert record.served.model == "ai/m"
        assert (record.served.backend, record.served.runner, record.labels.caller) == ("fake", "runner-m", "nightly")
        assert record.bytes_in == len(served.engine.received[0].body)
        assert (record.queued, record.loading) == (0.5, 0.5)
        assert record.first_byte is not None
        assert 0 < record.first_byte <= record.duration
        assert record.bytes_out >= len(answer.body)


async def test_a_path_with_a_name_is_told_by_its_pattern(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        notes = Notes(served.pipeline.observers)
        await served.ask(request(f"/engines/fake{CHAT}"))
        await served.ask(request("/runners/runner-m/v1/completions"))
        assert [r.labels.route for r in notes.records] == [
            "/engines/{backend}" + CHAT,
            "/runners/{runner}/v1/completions",
        ]


async def test_who_left_and_who_was_refused_by_the_scheduler(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, Call.left) as served:
        notes = Notes(served.pipeline.observers)
        await served.ask(request(body={"model": "nope"}))
        client = await served.connect()
        await client.send(request())
        await served.engine.until(lambda e: len(e.received) == 1)
        await client.leave()
        await until(lambda: len(notes.records) == 2)
        assert [(r.status, r.error) for r in notes.records] == [(404, "model_not_found"), (499, "")]
        assert [r.first_byte for r in notes.records] == [None, None]


@pytest.mark.parametrize(
    ("events", "status"),
    [(["a", "[DONE]"], 200), (["a", '{"type":"message_stop"}'], 200), (["a"], 499), (["[DONE]", "a"], 499)],
)
@pytest.mark.parametrize("begun", [b"", b"0", b"0\r\n"])
async def test_who_leaves_with_the_last_event_has_the_whole_stream(
    folder: Path, kind: str, events: list[str], status: int, begun: bytes
) -> None:
    """As OpenAI's own client does: the last chunk is not waited for, of which a part may have come."""

    async def answer(call: Call) -> None:
        await call.send(SSE + b"".join(map(event, events)) + begun)
        await call.left()

    async with proxy(folder, kind, answer) as served:
        notes = Notes(served.pipeline.observers)
        client = await served.connect()
        await client.send(request(body={"model": "m", "messages": [], "stream": True}))
        await client.reader.readuntil(events[-1].encode() + b"\n\n\r\n" + begun)
        await client.leave()
        await until(lambda: bool(notes.records))
        assert [record.status for record in notes.records] == [status]


async def test_a_prompt_that_the_engine_did_not_count_is_estimated(folder: Path, kind: str) -> None:
    """From what its body has, at most the window: of a stream without counts, of one that its client left, and of an
    answer that had not begun."""

    async def answer(call: Call) -> None:
        asked = call.request.body
        if b"left" in asked:
            if b"begun" in asked:
                await call.send(SSE + event("a"))
            await call.left()
        elif b"refused" in asked:
            await call.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\nno")
        else:
            await stream(call)

    async with proxy(folder, kind, answer) as served:
        notes = Notes(served.pipeline.observers)
        window = 4096  # of the fake runner
        texts = {"whole": "x" * 400, "refused": "x" * 400, "left begun": "x" * 400, "left": "x" * 8 * window}
        for number, (name, text) in enumerate(texts.items()):
            body = {"model": "m", "messages": [{"role": "user", "content": name + text}], "stream": True}
            client = await served.connect()
            await client.send(request(body=body))
            if name == "left":
                await served.engine.until(lambda e: len(e.received) == 4)
            else:
                await client.head()
            if name.startswith("left"):
                await client.leave()
            await until(lambda: len(notes.records) == number + 1)  # noqa: B023
        whole, refused, left, unbegun = notes.records
        assert [one.tokens.prompt for one in (whole, refused)] == [whole.bytes_in // 4, 0]
        assert (left.tokens.prompt, left.tokens.answer) == (left.bytes_in // 4, 1)
        assert (unbegun.tokens.prompt, unbegun.tokens.answer) == (window, 0)


async def test_refusals_before_the_exchange_are_told(folder: Path) -> None:
    refused = {
        "not_json": request(body=b"{"),
        "other_page": request("/v1/messages", Origin="http://evil.example"),
        "no_length": b"POST /v1/completions HTTP/1.1\r\nHost: test\r\n\r\n",
        "no_http": b"hello\r\n\r\n",
    }
    async with proxy(folder, "fast") as served:
        served.pipeline.observers.add(Faulty())
        notes = Notes(served.pipeline.observers)
        for data in refused.values():
            await served.ask(data)
        told = [(r.labels.family, r.labels.route, r.status, r.error) for r in notes.records]
        assert told == [
            ("openai", CHAT, 400, "bad_request"),
            ("anthropic", "/v1/messages", 403, "forbidden"),
            ("openai", "/v1/completions", 411, "length_required"),
            ("control", "", 400, "bad_request"),
        ]


async def test_no_record_is_longer_than_it_must_be_and_no_line_is_forged(folder: Path, kind: str) -> None:
    """Records are kept, logged and sent: a client must not choose how long they are."""
    async with proxy(folder, kind) as served:
        notes = Notes(served.pipeline.observers)
        log = AccessLog(folder / "access.log", served.pipeline.observers)
        log.use("text")
        assert (await served.ask(request(body={"model": "a" * 640}))).status == 404
        assert (await served.ask(request(body={"model": "é" * (1 << 20)}))).status == 404
        assert (await served.ask(request(CHAT + "?" + "x" * 10_000, b"{}"))).status == 400
        assert (await served.ask(b"GET /" + b"x" * 10_000 + b" HTTP/2\r\n\r\n")).status == 400
        assert (await served.ask(b"GET /\n2026-11-23T06:00:00.000Z\x1b[2J HTTP/1.1\r\n\r\n")).status == 400
        assert (await served.ask(request(X_Caller="kim\x1b[2J"))).status == 400
        assert (await served.ask(request(body={"model": "nope"}, X_Caller="kim\x9b2J é"))).status == 404
        assert [record.model for record in notes.records] == ["a" * 640, "é" * 639 + "…", *[""] * 4, "nope"]
        assert [len(record.labels.route) for record in notes.records] == [20, 20, 20, 640, 0, 20, 20]
        log.close()
    text = (folder / "access.log").read_text()
    assert (len(text) < 8000, len(text.splitlines()), text.replace("\n", "").isprintable()) == (True, 7, True)


async def test_an_observer_that_fails_is_logged_and_costs_no_answer(
    folder: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxy(folder, kind) as served:
        served.pipeline.observers.add(Faulty())
        notes = Notes(served.pipeline.observers)
        assert (await served.ask()).status == 200
        assert len(notes.records) == 1
    assert "Faulty failed" in caplog.text
