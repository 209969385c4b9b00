"""Metrics outlive what is wrong around them."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from modelrunner.concurrency.feed import Feed
from modelrunner.errors import RequestNotFound
from modelrunner.gateway.calls import labels
from modelrunner.gateway.request.observers import Observers, RequestRecord
from modelrunner.gateway.request.tokens import Tokens
from modelrunner.scheduler.devices import Device
from modelrunner.scheduler.state import Phase
from modelrunner.telemetry import exposition
from modelrunner.telemetry.accesslog import AccessLog
from modelrunner.telemetry.counters import RequestCounters
from modelrunner.telemetry.exposition import EngineMetrics, fetch, merged, read_drafts
from modelrunner.telemetry.recent import RequestFilter
from modelrunner.telemetry.telemetry import Telemetry
from modelrunner.types import Endpoint, Served
from modelrunner.wire import DraftStatus
from tests.waiting import HUNG


def test_an_engine_with_broken_metrics_hides_no_other() -> None:
    broken = '# HELP a b\n# TYPE a counter\na{x="y", ="\\n"} \\ 2a'
    good = "# TYPE b gauge\nb 1\n"
    assert [family.name for family in merged([], [EngineMetrics({}, broken), EngineMetrics({}, good)])] == ["b"]


@pytest.mark.parametrize(
    ("template", "proposed", "accepted", "counts"),
    [
        ("# TYPE llamacpp:{0} counter\nllamacpp:{0} {1}\n", "96", "31", (96, 31)),
        ('vllm:{0}{{engine="0",model_name="m"}} {1}\n', "1.2e+03", "400.0", (1200, 400)),
        ("llamacpp:{0} {1}\n", "1.2.3", "nan", (0, 0)),
        ("llamacpp:{0} {1}\n", "1e19", "0", (2**53, 0)),
    ],
)
def test_drafts_of_an_engine_s_metrics(template: str, proposed: str, accepted: str, counts: tuple[int, int]) -> None:
    text = template.format("spec_decode_num_draft_tokens_total", proposed)
    text += template.format("spec_decode_num_accepted_tokens_total", accepted)
    assert read_drafts(text) == DraftStatus(*counts)


def series(families: Iterable[Metric]) -> list[tuple[str, dict[str, str], float]]:
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


@pytest.mark.parametrize(
    "claim",
    [
        '# TYPE modelrunner_memory_budget_bytes gauge\nmodelrunner_memory_budget_bytes{runner="r"} 0',
        "# TYPE modelrunner_new gauge\nmodelrunner_new 1",
        '# TYPE modelrunner histogram\nmodelrunner_bucket{le="+Inf"} 1\nmodelrunner_sum 1\nmodelrunner_count 1',
        'gen_ai_server_request_duration_seconds_count{model="m"} 9',
        "# TYPE process_resident_memory_bytes gauge\nprocess_resident_memory_bytes 0",
    ],
)
def test_an_engine_adds_nothing_to_what_the_daemon_tells_of_itself(claim: str) -> None:
    own = GaugeMetricFamily("modelrunner_memory_budget_bytes", "x", value=5)
    found = merged([own], [EngineMetrics({"runner": "r"}, f"{claim}\n# TYPE b gauge\nb 1\n")])
    assert series(found) == [("modelrunner_memory_budget_bytes", {}, 5), ("b", {"runner": "r"}, 1)]


def test_a_series_is_told_once() -> None:
    """Also where only a label differed that the daemon sets, and where two families have a sample's name."""
    text = '# TYPE b gauge\nb{x="1"} 1\nb{x="1"} 2\nb{x="1",runner="mine"} 3\nb{x="2"} 4\n'
    text += "# TYPE c summary\nc_count 1\nc_sum 1\n# TYPE c_sum gauge\nc_sum 2\n"
    found = series(merged([], [EngineMetrics({"runner": "r"}, text), EngineMetrics({"runner": "s"}, "b 5\n")]))
    assert [(name, value) for name, _, value in found] == [("b", 1), ("b", 4), ("c_count", 1), ("c_sum", 1)]


async def test_an_engine_that_does_not_answer_is_left_out(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    place = Endpoint(path=tmp_path / "engine.sock")
    async with await asyncio.start_unix_server(silent, str(place.path)), asyncio.timeout(HUNG):
        names = {"model_name": "m", "backend_name": "fake", "id": "r1"}
        runner: Any = SimpleNamespace(state=Phase.READY, endpoint=place, metrics="/metrics", host="", **names)
        assert [answer.text for answer in await fetch([runner], limit=0.01)] == [None]


async def test_a_burst_of_events_does_not_end_the_counting(tmp_path: Path) -> None:
    events = Feed[Any](1, 3)
    scheduler: Any = SimpleNamespace(events=events)
    telemetry = Telemetry(scheduler, lambda: (), tmp_path)
    counting = asyncio.create_task(telemetry.count_events())
    await asyncio.sleep(0)
    for _ in range(10):
        events.add(SimpleNamespace(event="load", model="m", details={}))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not counting.done()
    events.close()
    await counting


class Requests:
    """A telemetry, and requests that end."""

    def __init__(self, folder: Path) -> None:
        scheduler: Any = SimpleNamespace()
        self.telemetry = Telemetry(scheduler, lambda: (), folder)

    def end(self, id: str, status: int = 200, model: str = "m", model_name: str = "full/m") -> None:
        self.telemetry.finished(
            RequestRecord(
                id, labels("openai", "/v1/completions"), status, "", model, Served(model_name), tokens=Tokens(1, 2)
            )
        )


async def test_requests_are_chosen_by_model_and_status(tmp_path: Path) -> None:
    requests = Requests(tmp_path)
    requests.end("a")
    requests.end("b", status=503)
    requests.end("c", model="other", model_name="full/other")

    def ids(wanted: RequestFilter, limit: int | None = None) -> list[str]:
        return [one.request_id for one in requests.telemetry.requests(wanted, limit)]

    assert ids(RequestFilter("m")) == ids(RequestFilter("full/m")) == ["b", "a"]
    assert ids(RequestFilter("m", 200)) == ["a"]
    assert ids(RequestFilter(), 1) == ["c"]
    with pytest.raises(RequestNotFound):
        requests.telemetry.cancel("a")


def test_requests_and_their_times_are_counted() -> None:
    """A time on a bound counts below it, one above all bounds counts as well; models without a runner are one."""
    counters, asked = RequestCounters(), labels("openai", "/v1/completions")
    for duration, first_byte in ((0.05, 0.01), (0.06, 0.05), (601.0, None)):
        counters.add(
            RequestRecord(
                "a", asked, 200, "", "m", Served("full/m", "b"), 0.0, 0.0, first_byte, duration, tokens=Tokens(5, 2)
            )
        )
    counters.add(RequestRecord("b", asked, 404, "model_not_found", "anything"))
    told = {(name, *each.values()): value for name, each, value in series(counters.families())}
    of = "openai", "full/m"
    assert told["modelrunner_requests_total", "openai", "full/m", "b", "200", "", ""] == 3
    assert told["modelrunner_requests_total", "openai", "unknown", "unknown", "404", "model_not_found", ""] == 1
    assert {kind: told.get(("modelrunner_tokens_total", "full/m", kind)) for kind in ("input", "output", "cached")} == {
        "input": 15,
        "output": 6,
        "cached": None,
    }
    below = {each[-1]: value for each, value in told.items() if each[0].endswith("duration_seconds_bucket")}
    assert [below[bound] for bound in ("0.02", "0.05", "0.1", "600.0", "+Inf")] == [0, 1, 2, 2, 3]
    assert told["gen_ai_server_request_duration_seconds_sum", *of] == pytest.approx(601.11)
    assert told["gen_ai_server_time_to_first_token_seconds_count", *of] == 2
    assert told["gen_ai_server_time_per_output_token_seconds_sum", *of] == pytest.approx(0.04 + 0.01)


def test_an_access_log_that_cannot_be_written_costs_lines_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = AccessLog(tmp_path / "logs" / "access.log", Observers())
    (tmp_path / "logs").touch()  # in the place of the folder
    log.use("text")
    for _ in range(3):
        log.finished(RequestRecord("a", labels("openai", "/v1/completions"), 200))
    log.close()
    assert caplog.text.count("access.log is not written for now") == 1


def test_each_device_is_told_as_far_as_its_driver_tells() -> None:
    sound = Device(24, 20, others=3, name="NVIDIA A30", utilization=7, temperature=61)
    lost = Device(0, 0, name="Vulkan", fault="it does not answer")
    told = {
        (s.name, s.labels["device"]): s.value for family in exposition._devices([sound, lost]) for s in family.samples
    }
    assert told == {
        ("modelrunner_device_up", "gpu0"): 1,
        ("modelrunner_device_up", "gpu1"): 0,
        ("modelrunner_device_total_bytes", "gpu0"): 24,
        ("modelrunner_device_total_bytes", "gpu1"): 0,
        ("modelrunner_device_free_bytes", "gpu0"): 20,
        ("modelrunner_device_free_bytes", "gpu1"): 0,
        ("modelrunner_device_others_bytes", "gpu0"): 3,
        ("modelrunner_device_others_bytes", "gpu1"): 0,
        ("modelrunner_device_utilization_ratio", "gpu0"): 0.07,
        ("modelrunner_device_temperature_celsius", "gpu0"): 61,
    }
