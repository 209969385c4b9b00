"""The metrics of the running engines, fetched for each scrape of the daemon."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from modelrunner.engine.connections import UpstreamPool
from modelrunner.errors import ModelRunnerError
from modelrunner.scheduler import RunnerView
from modelrunner.scheduler.state import Phase

_LIMIT = 2.0  # seconds for all engines, which are asked at the same time
_LARGEST = 4 << 20  # bytes of one engine's answer
_OURS = ("modelrunner_", "gen_ai_server_", "process_")  # the prefixes of the daemon's own names


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """The answer of one runner's engine: `text` in Prometheus' text format, None if it gave none."""

    labels: Mapping[str, str]
    text: str | None


async def fetch(runners: Iterable[RunnerView], limit: float = _LIMIT) -> list[EngineMetrics]:
    """Asks the engines of the ready runners, and waits at most `limit` seconds for all of them."""
    asking = [
        _ask(runner, runner.metrics, limit)
        for runner in runners
        if runner.state is Phase.READY and runner.metrics is not None
    ]
    return list(await asyncio.gather(*asking))


async def _ask(runner: RunnerView, path: str, limit: float) -> EngineMetrics:
    labels = {"model": runner.model_name, "backend": runner.backend_name, "runner": runner.id}
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
    families = {_told(family): family for family in own}
    homes: dict[str, str] = {}
    told: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for answer in answers:
        try:
            found = [family for family in text_string_to_metric_families(answer.text or "") if family.samples]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):  # from the parser, for invalid text
            continue
        for family in found:
            name, names = _told(family), {sample.name for sample in family.samples}
            if any(each.startswith(_OURS) or homes.setdefault(each, name) != name for each in names):
                continue
            new = Metric(family.name, family.documentation or "Of the engine", family.type)
            home = families.setdefault(name, new)
            if home.type != family.type:
                continue
            for sample in family.samples:
                labels = {**sample.labels, **answer.labels}
                if (series := (sample.name, frozenset(labels.items()))) not in told:
                    told.add(series)
                    home.add_sample(sample.name, labels, sample.value)
    return list(families.values())


def _told(family: Metric) -> str:
    """Returns the name without the suffix of a counter: families that differ only in the suffix collide."""
    return family.name.removesuffix("_total")
