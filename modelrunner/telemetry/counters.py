"""Counters and histograms of requests and events for Prometheus."""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

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


class _Times:
    """Times in seconds, counted by upper `bounds`."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        bounds = [floatToGoString(bound) for bound in (*self._bounds, math.inf)]  # type: ignore[no-untyped-call]
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)


class RequestCounters:
    """Counts finished requests. Models that no runner served share one label value, since clients choose their names.
    The client library's own counters would take five times as long."""

    def __init__(self) -> None:
        self._requests = defaultdict[tuple[str, str, str, int, str, str], int](int)
        self._tokens = defaultdict[tuple[str, str], int](int)
        self._times: dict[tuple[str, str], list[_Times]] = {}

    def add(self, record: RequestRecord) -> None:
        labels, served, tokens = record.labels, record.served, record.tokens
        family, model, backend = labels.family, served.model or _UNKNOWN, served.backend if served.model else _UNKNOWN
        self._requests[family, model, backend, record.status, record.error, labels.key] += 1
        if not served.model:
            return
        if (times := self._times.get((family, model))) is None:
            times = self._times[family, model] = [_Times(bounds) for _, _, bounds in _TIMES]
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
                self._tokens[model, kind] += count

    def families(self) -> Iterable[Metric]:
        labels = ("family", "model", "backend", "status", "error", "key")
        requests = CounterMetricFamily("modelrunner_requests", "Requests that ended", labels=labels)
        for (family, model, backend, status, error, key), count in self._requests.items():
            requests.add_metric((family, model, backend, str(status), error, key), count)
        tokens = CounterMetricFamily("modelrunner_tokens", "Tokens, as the engines count", labels=("model", "type"))
        for of, count in self._tokens.items():
            tokens.add_metric(of, count)
        yield from (requests, tokens)
        for number, (name, meaning, _) in enumerate(_TIMES):
            histogram = HistogramMetricFamily(name, meaning, labels=("family", "model"))
            for of, times in self._times.items():
                times[number].add_to(histogram, of)
            yield histogram


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
