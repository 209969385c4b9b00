"""Counters and histograms of requests and events for Prometheus.

They are plain numbers: a request adds to them in about two microseconds, and only a scrape turns them into families of
prometheus_client.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from modelrunner.scheduler import EventRecord
from modelrunner.telemetry.columns import Columns

BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds in seconds, from the first token of a small model to the load of a large one."""
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_UNKNOWN = "unknown"
# Names and meanings are from https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/, if they exist there.
_HISTOGRAMS = (
    ("modelrunner_request_queue_seconds", "Time in the queue, without the load of the model", BUCKETS),
    ("modelrunner_request_load_seconds", "Time that the request waited for its model to load", BUCKETS),
    ("gen_ai_server_time_to_first_token_seconds", "Time until the first byte of the engine's answer", BUCKETS),
    ("gen_ai_server_time_per_output_token_seconds", "Time per token after the first", _TOKEN_BUCKETS),
    ("gen_ai_server_request_duration_seconds", "Time from the request's arrival to its end", BUCKETS),
)
_BY_REASON = {
    "modelrunner_crashes": ("Runners that ended by themselves, by the code of the error", ("crash",)),
    "modelrunner_evictions": ("Runners that the daemon ended, by the reason", ("evict", "stop")),
    "modelrunner_refusals": ("Requests that waited for a runner and got none, by the code of the error", ("refuse",)),
}
_OF_RUNNERS = frozenset(("load", "ready", "sleep", "wake", "evict", "stop", "crash"))


class Histogram:
    """Observations in buckets with the upper bounds `bounds`, in seconds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, values: Sequence[float]) -> None:
        """Adds the values, in seconds. They are sorted: a search for each bound is cheaper than one for each value."""
        ordered, below = sorted(values), 0
        for number, bound in enumerate(self.bounds):
            if below == len(ordered):
                break
            upto = bisect_right(ordered, bound, below)
            self.counts[number] += upto - below
            below = upto
        self.counts[-1] += len(ordered) - below
        self.total += sum(ordered)

    def buckets(self) -> list[tuple[str, float]]:
        """Returns (upper bound, observations up to it), the last bound being +Inf."""
        below, found = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            found.append((bound, float(below)))
        return found


class RequestCounters:
    """Counts finished requests. Models that no runner served share one label value, since clients choose their
    names."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, str, int, str, str], int] = {}
        self._tokens: dict[str, list[int]] = {}
        self._times: dict[tuple[str, str], tuple[Histogram, ...]] = {}

    def add(self, alike: Columns) -> None:
        asked, model, backend = alike.asked, alike.served.model, alike.served.backend
        if not model:
            model = backend = _UNKNOWN
        series = asked.family, model, backend, alike.status, alike.error, asked.key
        self._requests[series] = self._requests.get(series, 0) + alike.count
        if model is _UNKNOWN:
            return
        times = self._times.get((asked.family, model))
        if times is None:
            times = self._times[asked.family, model] = tuple([Histogram(bounds) for _, _, bounds in _HISTOGRAMS])
        values = alike.queued, alike.loading, alike.firsts, alike.each, alike.durations
        for histogram, column in zip(times, values, strict=True):
            histogram.observe(column)
        sums = self._tokens.get(model)
        if sums is None:
            sums = self._tokens[model] = [0, 0, 0, 0]
        for kind, count in enumerate((alike.prompt, alike.answer, alike.cached, alike.drafted)):
            sums[kind] += count

    def families(self) -> Iterator[Metric]:
        labels = ("family", "model", "backend", "status", "error", "key")
        requests = CounterMetricFamily("modelrunner_requests", "Requests that ended", labels=labels)
        for key, count in self._requests.items():
            requests.add_metric([str(label) for label in key], count)
        yield requests
        tokens = CounterMetricFamily("modelrunner_tokens", "Tokens, as the engines count", labels=("model", "type"))
        for model, sums in self._tokens.items():
            for kind, count in zip(("input", "output", "cached", "drafted"), sums, strict=True):
                if count:
                    tokens.add_metric((model, kind), count)
        yield tokens
        for number, (name, meaning, _) in enumerate(_HISTOGRAMS):
            family = HistogramMetricFamily(name, meaning, labels=("family", "model"))
            for pair, times in self._times.items():
                family.add_metric(pair, times[number].buckets(), times[number].total)
            yield family


class EventCounters:
    """Counts the events of runners, and measures loads."""

    def __init__(self) -> None:
        self._events: Counter[tuple[str, str]] = Counter()
        self._reasons: dict[str, Counter[tuple[str, str]]] = {name: Counter() for name in _BY_REASON}
        self._downloaded = 0
        self._loads: dict[str, Histogram] = {}

    def add(self, event: EventRecord) -> None:
        self._events[event.event, event.model if event.event in _OF_RUNNERS else ""] += 1
        for name, (_, kinds) in _BY_REASON.items():
            if event.event in kinds and (code := event.details.get("code")):
                self._reasons[name][event.model, code] += event.details.get("requests", 1)
        self._downloaded += event.details.get("downloaded", 0)
        if event.event == "ready" and (seconds := event.details.get("seconds")) is not None:
            self._loads.setdefault(event.model, Histogram(BUCKETS)).observe([seconds])

    def families(self) -> Iterator[Metric]:
        events = CounterMetricFamily(
            "modelrunner_events", "What happened: loads, evictions, crashes, refusals", labels=("event", "model")
        )
        for pair, count in self._events.items():
            events.add_metric(pair, count)
        yield events
        for name, (meaning, _) in _BY_REASON.items():
            family = CounterMetricFamily(name, meaning, labels=("model", "reason"))
            for pair, count in self._reasons[name].items():
                family.add_metric(pair, count)
            yield family
        yield CounterMetricFamily("modelrunner_pulled_bytes", "Bytes that pulls downloaded", value=self._downloaded)
        loads = HistogramMetricFamily("modelrunner_model_load_seconds", "Time to load a model", labels=("model",))
        for model, times in self._loads.items():
            loads.add_metric((model,), times.buckets(), times.total)
        yield loads
