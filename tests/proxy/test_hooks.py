"""What metrics and recording are told of a request, and that nothing is told twice."""

from pathlib import Path

from modelrunner.proxy.record import Record
from tests.proxy.fakes import SSE, Call, event, until
from tests.proxy.harness import proxy, request


class Notes:
    """A hook that keeps everything."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.pieces = bytearray()

    def finished(self, record: Record) -> None:
        self.records.append(record)

    def tap(self, request_id: str) -> object:
        return self.pieces.extend


async def test_an_answer_is_recorded(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE)
        await call.send(event("a"))
        await call.send(event("b") + b"0\r\n\r\n")

    async with proxy(folder, kind, script) as served:
        served.pipeline.hooks = notes = Notes()  # type: ignore[assignment]
        answer = await served.ask(request(stream=True, X_Request_ID="mine"))
        [record] = notes.records
        assert (record.request_id, record.status, record.error) == ("mine", 200, None)
        assert (record.model, record.runner, record.path) == ("m", "runner-m", "/v1/chat/completions")
        assert record.body == served.engine.received[0].body
        assert b"data: a\n\n" in notes.pieces
        assert b"data: b\n\n" in notes.pieces
        assert answer.body == b"data: a\n\ndata: b\n\n"


async def test_one_who_left_and_one_who_was_refused(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, Call.left) as served:
        served.pipeline.hooks = notes = Notes()  # type: ignore[assignment]
        await served.ask(request(body={"model": "nope"}))
        client = await served.connect()
        await client.send(request())
        await served.engine.until(lambda e: len(e.received) == 1)
        await client.leave()
        await until(lambda: len(notes.records) == 2)
        assert [(r.status, r.error) for r in notes.records] == [(404, "model_not_found"), (499, None)]
