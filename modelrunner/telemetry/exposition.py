"""The answer of `GET /metrics`: the daemon's own figures, and those of every running engine; and what engines say there
of their draft tokens."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from modelrunner import __version__
from modelrunner.engine.connections import UpstreamPool
from modelrunner.errors import ModelRunnerError
from modelrunner.scheduler import RunnerView, Scheduler
from modelrunner.scheduler.devices import Device
from modelrunner.scheduler.state import Phase
from modelrunner.telemetry.counters import EventCounters, RequestCounters
from modelrunner.types import RequiredMemory
from modelrunner.wire import DraftStatus

if TYPE_CHECKING:
    from modelrunner.telemetry.traces import Traces

_PULSE = 0.005  # seconds of a sleep that measures the delay of the event loop
_LIMIT = 2.0  # seconds for all engines, which are asked at the same time
_LARGEST = 4 << 20  # bytes of one engine's answer
_DRAFTS_LIMIT = 1.0  # seconds: llama.cpp answers between two batches
# llama.cpp (tools/server/server-context.cpp) and vLLM (v1/spec_decode/metrics.py) use the same names after a prefix.
_DRAFT_COUNT = re.compile(
    r"^\w+:spec_decode_num_(draft|accepted)_tokens_total(?:\{[^}\n]*\})?"
    r" ([0-9]{1,15}(?:\.[0-9]{1,15})?(?:e\+?[01][0-9])?)$",
    re.M,
)
_MOST_TOKENS = 2**53  # JSON numbers are exact up to there
_OURS = ("modelrunner_", "gen_ai_server_", "process_")  # the prefixes of the daemon's own names


class Exposition:
    """`running` returns the number of requests under way."""

    def __init__(
        self, scheduler: Scheduler, requests: RequestCounters, events: EventCounters, running: Callable[[], int]
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._events = events
        self._running = running
        self.traces: Traces | None = None

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Returns body and content type: OpenMetrics 1.0 (https://prometheus.io/docs/specs/om/open_metrics_spec/) if
        the header `Accept` asks for it, else Prometheus' text format 0.0.4."""
        runners = self._scheduler.runners()
        answers = await fetch(runners)
        own = [*self._families(await _lag()), *_runners(runners)]
        encode, content_type = choose_encoder(accept)
        return await asyncio.to_thread(lambda: encode(_Given(merged(own, answers)))), content_type

    def _families(self, lag: float) -> Iterator[Metric]:
        yield from self._requests.families()
        yield from self._events.families()
        if self.traces is not None:
            yield from self.traces.families()
        info = GaugeMetricFamily("modelrunner_info", "The daemon's version", labels=("version",))
        info.add_metric((__version__,), 1)
        yield info
        yield _gauge("modelrunner_event_loop_lag_seconds", "How late the daemon's event loop is", lag)
        yield _gauge("modelrunner_requests_running", "Requests under way", self._running())
        waiting = GaugeMetricFamily(
            "modelrunner_requests_waiting", "Requests that wait for a runner", labels=("model",)
        )
        for model, count in self._scheduler.waiting().items():
            waiting.add_metric((model,), count)
        yield waiting
        memory = self._scheduler.memory()
        for name in ("budget", "used", "free"):
            size = getattr(memory, name).ram
            yield _gauge(f"modelrunner_memory_{name}_bytes", f"Main memory for runners: {name}", size)
        devices = GaugeMetricFamily(
            "modelrunner_device_memory_bytes", "Memory for runners on each device", labels=("device", "figure")
        )
        for figure, sizes in (("budget", memory.budget), ("free", memory.free)):
            for device, size in _by_device(sizes):
                devices.add_metric((device, figure), size)
        yield devices
        yield from _devices(self._scheduler.devices())
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        yield from registry.collect()


class _Given(Collector):
    """Presents existing families as a registry."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


async def _lag() -> float:
    clock = asyncio.get_running_loop().time
    began = clock()
    await asyncio.sleep(_PULSE)
    return max(0.0, clock() - began - _PULSE)


def _runners(runners: list[RunnerView]) -> Iterator[Metric]:
    """Of the machine of the daemon the host is "", which Prometheus reads as no label."""
    labels = ("model", "backend", "runner", "host")
    states = GaugeMetricFamily("modelrunner_runners", "Runners by state", labels=("backend", "state", "host"))
    for where, count in Counter([(view.backend_name, str(view.state), view.host) for view in runners]).items():
        states.add_metric(where, count)
    yield states
    leases = GaugeMetricFamily("modelrunner_runner_leases", "Requests that a runner answers", labels=labels)
    memory = GaugeMetricFamily(
        "modelrunner_runner_memory_bytes",
        "Memory of a runner, estimated and measured",
        labels=(*labels, "device", "figure"),
    )
    for view in runners:
        key = view.model_name, view.backend_name, view.id, view.host
        leases.add_metric(key, view.leases)
        for figure, value in (("estimated", view.memory.estimated), ("measured", view.memory.measured)):
            if value is not None:
                for device, size in _by_device(value):
                    memory.add_metric((*key, device, figure), size)
    yield leases
    yield memory


def _devices(seen: Iterable[Device]) -> Iterator[Metric]:
    """Yields what drivers and engines say of each device; a figure that they do not tell is left out."""
    labels = ("device", "name")
    works = GaugeMetricFamily("modelrunner_device_up", "1 for a device that works, else 0", labels=labels)
    total = GaugeMetricFamily("modelrunner_device_total_bytes", "Memory of a device", labels=labels)
    free = GaugeMetricFamily("modelrunner_device_free_bytes", "Memory of a device that nobody holds", labels=labels)
    others = GaugeMetricFamily(
        "modelrunner_device_others_bytes", "Memory of a device that other programs hold", labels=labels
    )
    busy = GaugeMetricFamily("modelrunner_device_utilization_ratio", "How busy a device is, 0 to 1", labels=labels)
    warm = GaugeMetricFamily("modelrunner_device_temperature_celsius", "How warm a device is", labels=labels)
    for number, device in enumerate(seen):
        key = f"gpu{number}", device.name
        works.add_metric(key, not device.fault)
        total.add_metric(key, device.total)
        free.add_metric(key, device.free)
        others.add_metric(key, device.others)
        if device.utilization is not None:
            busy.add_metric(key, device.utilization / 100)
        if device.temperature is not None:
            warm.add_metric(key, device.temperature)
    yield from (works, total, free, others, busy, warm)


def _by_device(memory: RequiredMemory) -> Iterator[tuple[str, int]]:
    yield "ram", memory.ram
    for number, size in enumerate(memory.vram):
        yield f"gpu{number}", size


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value=value)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """The answer of one runner's engine: `text` in Prometheus' text format, None if it gave none."""

    labels: Mapping[str, str]
    text: str | None


async def fetch(runners: Iterable[RunnerView], limit: float = _LIMIT) -> list[EngineMetrics]:
    """Asks the engines of the ready runners for their metrics, and waits at most `limit` seconds for all of them."""
    asking = [
        _ask(runner, runner.metrics, limit)
        for runner in runners
        if runner.state is Phase.READY and runner.metrics is not None
    ]
    return list(await asyncio.gather(*asking))


async def _ask(runner: RunnerView, path: str, limit: float) -> EngineMetrics:
    labels = {"model": runner.model_name, "backend": runner.backend_name, "runner": runner.id}
    labels |= {"host": runner.host} if runner.host else {}
    try:
        status, body = await UpstreamPool(runner.endpoint).fetch("GET", path, timeout=limit)
    except (OSError, ModelRunnerError):
        return EngineMetrics(labels, None)
    fits = status == 200 and len(body) <= _LARGEST
    return EngineMetrics(labels, body.decode("utf-8", "replace") if fits else None)


def merged(own: Iterable[Metric], answers: Iterable[EngineMetrics]) -> list[Metric]:
    """Adds the engines' families to our `own`. Families of one name become one family, whose samples name the runner.
    Left out are families with the daemon's own names, since an engine must not change the daemon's figures, and all
    that the format forbids: families whose type differs from an earlier one of the same name or sample, repeated
    samples, and answers that cannot be parsed. Takes tens of milliseconds for a large engine: call it in a thread."""
    families = {_name(family): family for family in own}
    homes: dict[str, str] = {}
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for answer in answers:
        try:
            parsed = [family for family in text_string_to_metric_families(answer.text or "") if family.samples]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):  # from the parser, for invalid text
            continue
        for family in parsed:
            name, names = _name(family), {sample.name for sample in family.samples}
            if any(each.startswith(_OURS) or homes.setdefault(each, name) != name for each in names):
                continue
            new = Metric(family.name, family.documentation or "Of the engine", family.type)
            home = families.setdefault(name, new)
            if home.type != family.type:
                continue
            for sample in family.samples:
                labels = {**sample.labels, **answer.labels}
                if (series := (sample.name, frozenset(labels.items()))) not in seen:
                    seen.add(series)
                    home.add_sample(sample.name, labels, sample.value)
    return list(families.values())


def _name(family: Metric) -> str:
    """Returns the name without the suffix of a counter: families that differ only in the suffix collide."""
    return family.name.removesuffix("_total")


async def drafts_of(runners: Sequence[RunnerView]) -> Mapping[str, DraftStatus]:
    """Asks the engines of the ready `runners`, at most a second for all of them. Returns the counts by the IDs of
    runners, without those of engines that do not tell or have proposed nothing."""
    answers = await fetch(runners, _DRAFTS_LIMIT)
    by_runner = {answer.labels["runner"]: read_drafts(answer.text or "") for answer in answers}
    return {runner: drafts for runner, drafts in by_runner.items() if drafts.proposed}


def read_drafts(text: str) -> DraftStatus:
    """Reads metrics in Prometheus' text format; a count that is missing is 0."""
    sums = {"draft": 0.0, "accepted": 0.0}
    for name, count in _DRAFT_COUNT.findall(text):
        sums[name] += float(count)
    return DraftStatus(*(int(min(count, _MOST_TOKENS)) for count in sums.values()))
