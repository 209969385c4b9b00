"""Traces for OpenTelemetry: a span for each request, whose children are its waits and the engine's work.

Spans are made when a request has ended, and a thread of the SDK sends them. The variables OTEL_* configure where
(https://opentelemetry.io/docs/specs/otel/protocol/exporter/). Only `tracing.py` imports this module: the SDK is an
extra."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from prometheus_client.core import CounterMetricFamily

from modelrunner.engineapi import MESSAGES_ENDPOINTS, OPENAI_ENDPOINTS, ApiShape
from modelrunner.gateway.request.observers import RequestRecord
from modelrunner.gateway.request.trace_context import Trace
from modelrunner.gateway.routes import all_routes
from modelrunner.types import Mode

_PATIENCE = 2000  # milliseconds to send the last spans when the daemon ends
# From https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/; other operations have the names of routes.
_OF_MODE = {Mode.EMBEDDING: "embeddings", Mode.RERANKING: "rerank"}
_OF_SHAPE = {ApiShape.CHAT: "chat", ApiShape.MESSAGES: "chat", ApiShape.COMPLETION: "text_completion"}
_ENDPOINTS = {**OPENAI_ENDPOINTS, **MESSAGES_ENDPOINTS}
_OF_PATH = {path: _OF_SHAPE[known.shape] for path, known in _ENDPOINTS.items() if known.shape in _OF_SHAPE}


@cache
def _operations() -> Mapping[str, str]:
    """Returns the operation of each route, by its pattern."""
    return {
        route.pattern: _OF_MODE.get(route.mode) or _OF_PATH.get(route.path) or route.path.rpartition("/")[2]
        for _, _, route in all_routes()
    }


class _GivenIds(IdGenerator):
    """Gives spans the IDs of their records: the engine gets its span's ID before the span is made."""

    trace = span = 0

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        return self.span


class _CountingExporter(OTLPSpanExporter):
    sent = failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self.sent += len(spans)
        else:
            self.failed += len(spans)
        return result


class Traces:
    """An `Observer`. A failing collector loses spans, which are counted, but affects no request."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it logs every lost span
        named = "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        resource = Resource.create({} if named else {"service.name": "modelrunner"})
        self._ids, self._exporter = _GivenIds(), _CountingExporter()
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("modelrunner")
        self._sampled = 0

    def finished(self, record: RequestRecord) -> None:
        if record.trace is not None:
            self._add(record, record.trace)

    def families(self) -> list[CounterMetricFamily]:
        """Returns the spans by their fate. Spans that were neither sent nor failed wait, or were dropped."""
        spans = CounterMetricFamily("modelrunner_spans", "Spans of traces", labels=("fate",))
        for fate in ("made", "sent", "failed"):
            spans.add_metric([fate], self._sampled if fate == "made" else getattr(self._exporter, fate))
        return [spans]

    def close(self) -> None:
        """Sends the remaining spans, for at most two seconds. Blocks."""
        self._provider.force_flush(_PATIENCE)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
        self._provider.shutdown()

    def _add(self, record: RequestRecord, trace: Trace) -> None:
        parent = Context()
        if trace.parent:
            flags = TraceFlags(int(trace.flags, 16))
            remote = SpanContext(int(trace.trace, 16), int(trace.parent, 16), is_remote=True, trace_flags=flags)
            parent = set_span_in_context(NonRecordingSpan(remote))
        ended = int(record.time * 1e9)
        arrived = ended - int(record.duration * 1e9)
        queued = arrived + int(record.queued * 1e9)
        sent = queued + int(record.loading * 1e9)
        operation = _operations()[record.labels.route]
        name, kind = f"{operation} {record.served.model or record.model}", SpanKind.SERVER
        whole = self._begin(name, trace, trace.span, parent, kind, arrived, _attributes(record, operation))
        if record.error:
            whole.set_status(StatusCode.ERROR, record.error)
        inside = set_span_in_context(whole)
        parts = [("queue", secrets.token_hex(8), SpanKind.INTERNAL, arrived, queued)]
        parts += [("load", secrets.token_hex(8), SpanKind.INTERNAL, queued, sent)]
        parts += [("engine", trace.engine, SpanKind.CLIENT, sent, ended)] if record.served.runner else []
        for name, id, kind, start, end in parts:
            if end > start:
                self._begin(name, trace, id, inside, kind, start, {}).end(end)
        whole.end(ended)

    def _begin(
        self, name: str, trace: Trace, id: str, above: Context, kind: SpanKind, start: int, attributes: dict[str, Any]
    ) -> Span:
        self._ids.trace, self._ids.span = int(trace.trace, 16), int(id, 16)
        span = self._tracer.start_span(name, above, kind, attributes, start_time=start)
        self._sampled += span.is_recording()
        return span


def _attributes(record: RequestRecord, operation: str) -> dict[str, Any]:
    """Returns the attributes, which have no part of a prompt or an answer."""
    tokens = record.tokens
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": record.served.backend,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.served.model,
        "gen_ai.usage.input_tokens": tokens.prompt,
        "gen_ai.usage.output_tokens": tokens.answer,
        "http.route": record.labels.route,
        "http.response.status_code": record.status,
        "error.type": record.error,
        "modelrunner.request_id": record.request_id,
        "modelrunner.runner": record.served.runner,
        "modelrunner.key": record.labels.key,
    }
    if record.first_byte is not None:
        attributes["modelrunner.first_byte"] = record.first_byte
    return {name: value for name, value in attributes.items() if value != ""}
