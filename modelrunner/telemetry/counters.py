"""Counters and histograms of requests and events for Prometheus."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import Metric

from modelrunner.gateway.request.observers import RequestRecord
from modelrunner.scheduler import EventRecord

BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds in seconds, from the first token of a small model to the load of a large one."""
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_UNKNOWN = "unknown"
# Names and meanings are from https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/, if they exist there.
_TIMES = (
    ("modelrunner_request_queue_seconds", "Time in the queue, without the load of the model", BUCKETS),
    ("modelrunner_request_load_seconds", "Time that the request waited for its model to load", BUCKETS),
    ("gen_ai_server_time_to_first_token_seconds", "Time until the first byte of the engine's answer", BUCKETS),
    ("gen_ai_server_time_per_output_token_seconds", "Time per token after the first", _TOKEN_BUCKETS),
    ("gen_ai_server_request_duration_seconds", "Time from the request's arrival to its end", BUCKETS),
)
_BY_REASON = (
    ("modelrunner_crashes", "Runners that ended by themselves, by the code of the error", ("crash",)),
    ("modelrunner_evictions", "Runners that the daemon ended, by the reason", ("evict", "stop")),
    ("modelrunner_refusals", "Requests that waited for a runner and got none, by the code of the error", ("refuse",)),
)
_OF_RUNNERS = frozenset(("load", "ready", "sleep", "wake", "evict", "stop", "crash"))

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each series, of times that nobody asks for


class RequestCounters:
    """Counts finished requests. Models that no runner served share one label value, since clients choose their
    names."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        labels = ("family", "model", "backend", "status", "error", "key")
        self._requests = Counter("modelrunner_requests", "Requests that ended", labels, registry=registry)
        self._tokens = Counter(
            "modelrunner_tokens", "Tokens, as the engines count", ("model", "type"), registry=registry
        )
        self._times = [
            Histogram(name, meaning, ("family", "model"), registry=registry, buckets=bounds)
            for name, meaning, bounds in _TIMES
        ]
        self._times_of: dict[
            tuple[str, str], list[Histogram]
        ] = {}  # a look-up by labels costs more than an observation

    def add(self, record: RequestRecord) -> None:
        labels, served, tokens = record.labels, record.served, record.tokens
        model, backend = (served.model, served.backend) if served.model else (_UNKNOWN, _UNKNOWN)
        self._requests.labels(labels.family, model, backend, str(record.status), record.error, labels.key).inc()
        if not served.model:
            return
        times = self._times_of.get((labels.family, model))
        if times is None:
            times = [each.labels(labels.family, model) for each in self._times]
            self._times_of[labels.family, model] = times
        queue, load, first_token, each_token, duration = times
        queue.observe(record.queued)
        load.observe(record.loading)
        duration.observe(record.duration)
        if record.first_byte is not None:
            first_token.observe(record.first_byte)
            if tokens.answer > 1:
                each_token.observe((record.duration - record.first_byte) / (tokens.answer - 1))
        counts = ("input", tokens.prompt), ("output", tokens.answer), ("cached", tokens.cached)
        for kind, count in (*counts, ("drafted", tokens.drafted)):
            if count:
                self._tokens.labels(model, kind).inc(count)

    def families(self) -> Iterable[Metric]:
        return self._registry.collect()


class EventCounters:
    """Counts the events of runners, and measures loads."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        meaning = "What happened: loads, evictions, crashes, refusals"
        self._events = Counter("modelrunner_events", meaning, ("event", "model"), registry=registry)
        self._reasons = {
            kinds: Counter(name, meaning, ("model", "reason"), registry=registry) for name, meaning, kinds in _BY_REASON
        }
        self._downloaded = Counter("modelrunner_pulled_bytes", "Bytes that pulls downloaded", registry=registry)
        loads = "modelrunner_model_load_seconds"
        self._loads = Histogram(loads, "Time to load a model", ("model",), registry=registry, buckets=BUCKETS)

    def add(self, event: EventRecord) -> None:
        self._events.labels(event.event, event.model if event.event in _OF_RUNNERS else "").inc()
        for kinds, counter in self._reasons.items():
            if event.event in kinds and (code := event.details.get("code")):
                counter.labels(event.model, code).inc(event.details.get("requests", 1))
        self._downloaded.inc(event.details.get("downloaded", 0))
        if event.event == "ready" and (seconds := event.details.get("seconds")) is not None:
            self._loads.labels(event.model).observe(seconds)

    def families(self) -> Iterable[Metric]:
        return self._registry.collect()
