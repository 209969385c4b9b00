"""Spans, as a collector receives them over OTLP."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.api.conftest import Daemon, StartDaemon, start_daemon
from tests.waiting import HUNG

__all__ = ["start_daemon"]
TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = {"model": "smol", "messages": [{"role": "user", "content": "the secret of my heart"}]}


class Collector:
    """`status` is its answer."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.texts = b""
        self.status = 200
        self.asked = 0
        self._news = asyncio.Condition()

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.asked += 1
        if self.status == 200:
            self.texts += body
            for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.spans += [span for scope in part.scope_spans for span in scope.spans]
        async with self._news:
            self._news.notify_all()
        return web.Response(status=self.status)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(HUNG), self._news:
            await self._news.wait_for(condition)


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    found = Collector()
    app = web.Application()
    app.add_routes([web.post("/v1/traces", found.take)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{host}:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    yield found
    await runner.cleanup()


async def ask(daemon: Daemon, **headers: str) -> int:
    async with daemon.unix.post("/v1/chat/completions", json=CHAT, headers=headers) as answer:
        await answer.read()
        return answer.status


def length(span: Span) -> int:
    return span.end_time_unix_nano - span.start_time_unix_nano


async def test_the_times_of_a_request_add_up(start_daemon: StartDaemon, collector: Collector, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"smol": 0})
    record = tmp_path / "record"
    daemon.backend.knobs = ("--record", str(record), "--rate", "200")
    assert await ask(daemon, traceparent=f"00-{TRACE}-{CLIENT}-01") == 200
    await collector.until(lambda: len(collector.spans) >= 3)
    spans = {span.name: span for span in collector.spans}
    whole, load, engine = spans["chat smol"], spans["load"], spans["engine"]
    parts = [span for span in collector.spans if span is not whole]
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert whole.parent_span_id.hex() == CLIENT
    assert {span.parent_span_id for span in parts} == {whole.span_id}
    assert abs(sum(map(length, parts)) - length(whole)) <= len(parts)  # nanoseconds, as they are rounded
    assert length(load) > 0
    assert engine.end_time_unix_nano == whole.end_time_unix_nano
    [asked] = [json.loads(line) for line in record.read_text().splitlines() if "messages" in line]
    assert asked["headers"]["traceparent"] == f"00-{TRACE}-{engine.span_id.hex()}-01"
    told = {pair.key: pair.value for pair in whole.attributes}
    assert told["gen_ai.operation.name"].string_value == "chat"
    assert told["gen_ai.response.model"].string_value == "smol"
    assert told["gen_ai.usage.output_tokens"].int_value == 8
    assert b"secret of my heart" not in collector.texts


async def test_a_request_without_a_trace_begins_one(start_daemon: StartDaemon, collector: Collector) -> None:
    daemon = await start_daemon(models={"smol": 0})
    assert await ask(daemon, traceparent="nonsense") == 200
    assert await ask(daemon) == 200
    await collector.until(lambda: sum(span.name == "chat smol" for span in collector.spans) == 2)
    roots = [span for span in collector.spans if span.name == "chat smol"]
    assert len({span.trace_id for span in roots}) == 2
    assert {span.parent_span_id for span in roots} == {b""}


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/completions", {"prompt": "x"}, "text_completion"),
        ("/engines/fake/v1/embeddings", {"input": "x"}, "embeddings"),
        ("/api/embed", {"input": "x"}, "embeddings"),
        ("/v2/rerank", {"query": "x", "documents": ["y"]}, "rerank"),
        ("/v1/tokenize", {"content": "x"}, "tokenize"),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 3}, "chat"),
    ],
)
async def test_a_span_names_its_operation(
    start_daemon: StartDaemon, collector: Collector, path: str, body: Any, operation: str
) -> None:
    daemon = await start_daemon(models={"smol": 0})
    async with daemon.unix.post(path, json={"model": "smol", **body}) as answer:
        await answer.read()
    await collector.until(lambda: any(span.name.endswith(" smol") for span in collector.spans))
    [whole] = [span for span in collector.spans if span.name.endswith(" smol")]
    told = {pair.key: pair.value.string_value for pair in whole.attributes}
    assert (whole.name, told["gen_ai.operation.name"]) == (f"{operation} smol", operation)


async def test_a_failing_collector_costs_a_count(start_daemon: StartDaemon, collector: Collector, caplog: Any) -> None:
    collector.status = 400
    daemon = await start_daemon(models={"smol": 0})
    assert await ask(daemon) == 200
    await collector.until(lambda: collector.asked)

    async def spans() -> dict[str, float]:
        """Their number by their fate."""
        async with daemon.unix.get("/metrics") as answer:
            found = re.findall(r'^modelrunner_spans_total{fate="(\w+)"} (\S+)', await answer.text(), re.MULTILINE)
        return {fate: float(count) for fate, count in found}

    async with asyncio.timeout(HUNG):
        while not (found := await spans())["failed"]:  # noqa: ASYNC110 - a thread sends them
            await asyncio.sleep(0.01)
    assert (found["failed"], found["sent"]) == (found["made"], 0)
    assert "opentelemetry" not in {record.name.partition(".")[0] for record in caplog.records}


async def test_nothing_is_traced_unless_it_is_asked_for(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"smol": 0})
    record = tmp_path / "record"
    daemon.backend.knobs = ("--record", str(record))
    assert await ask(daemon, traceparent=f"00-{TRACE}-{CLIENT}-01") == 200
    assert "traceparent" not in record.read_text()
