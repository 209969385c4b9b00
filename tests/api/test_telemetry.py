"""Metrics, the last requests and usage of a whole daemon."""

import asyncio
import json
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from modelrunner.types import RequiredMemory
from tests.api.conftest import Daemon, StartDaemon
from tests.waiting import HUNG

CHAT = {"model": "smol", "messages": [{"role": "user", "content": "the secret of my heart"}]}


async def ask(daemon: Daemon, body: dict[str, Any] = CHAT, caller: str = "") -> int:
    async with daemon.unix.post("/v1/chat/completions", json=body, headers={"X-Caller": caller}) as answer:
        await answer.read()
        return answer.status


async def get(daemon: Daemon, path: str, status: int = 200, **headers: str) -> Any:
    async with daemon.unix.get(path, headers=headers) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


async def metrics(daemon: Daemon) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    async with daemon.unix.get("/metrics") as answer:
        assert answer.content_type == "text/plain"
        families = list(text_string_to_metric_families(await answer.text()))
    assert len({family.name for family in families}) == len(families)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def total(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return sum(value for (each, has), value in found.items() if each == name and labels.items() <= dict(has).items())


async def test_metrics_equal_what_the_clients_counted(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1})
    assert [await ask(daemon) for _ in range(3)] == [200] * 3
    assert await ask(daemon, {**CHAT, "stream": True, "stream_options": {"include_usage": True}}) == 200
    assert await ask(daemon, {**CHAT, "model": "other"}) == 200
    for number in range(20):
        assert await ask(daemon, {**CHAT, "model": f"made-up-{number}"}) == 404
    found = await metrics(daemon)
    assert total(found, "modelrunner_requests_total", status="200", model="smol") == 4
    assert total(found, "modelrunner_requests_total", status="200", family="openai") == 5
    assert total(found, "modelrunner_requests_total", model="unknown", error="model_not_found") == 20
    assert not any("made-up" in str(labels) for _, labels in found)
    assert total(found, "modelrunner_tokens_total", type="output", model="smol") == 4 * 8
    assert total(found, "modelrunner_tokens_total", type="input", model="smol") == 4 * 3
    assert total(found, "gen_ai_server_request_duration_seconds_count", model="smol", family="openai") == 4
    assert total(found, "gen_ai_server_time_to_first_token_seconds_count", model="smol") == 4
    assert total(found, "modelrunner_events_total", event="ready") == 2
    assert total(found, "modelrunner_runners", state="ready") == 2
    assert total(found, "modelrunner_runner_memory_bytes", figure="estimated", device="ram", model="smol") > 0
    assert total(found, "process_resident_memory_bytes") > 0


async def test_why_runners_ended_and_requests_were_refused(start_daemon: StartDaemon) -> None:
    """Each way in which a runner ends, but for the daemon's own end, which the next test is about."""
    daemon = await start_daemon(models={"smol": 0, "other": 1, "huge": 2}, memory_budget="66MiB")

    async def post(path: str, **body: Any) -> None:
        async with daemon.unix.post(path, json=body) as answer:
            assert answer.status < 300, await answer.text()

    assert await ask(daemon) == 200
    assert await ask(daemon, {**CHAT, "model": "other"}) == 200
    await post("/engines/unload", models=["other"])
    assert await ask(daemon, {**CHAT, "keep_alive": 0}) == 200
    async with daemon.unix.get("/engines/events?since=0") as events:
        seen = list[bytes]()
        while len(seen) < 3:
            line = await events.content.readline()
            if line.startswith(b"data: ") and json.loads(line[6:])["event"] in ("evict", "stop"):
                seen.append(line)
    assert await ask(daemon) == 200
    await post("/engines/pause", model="smol")
    await post("/engines/resume", model="smol")
    assert await ask(daemon) == 200
    await post("/engines/_configure", model="smol", **{"context-size": 1024, "apply": "restart"})
    daemon.backend.memory = RequiredMemory(200 << 20)
    assert await ask(daemon, {**CHAT, "model": "huge"}) == 507
    daemon.backend.memory = RequiredMemory(64 << 20)
    await post("/engines/unload", models=["smol"])
    daemon.backend.knobs = ("--crash", "as you wished")
    assert await ask(daemon, {**CHAT, "model": "other"}) == 502
    found = await metrics(daemon)

    def reasons(name: str) -> dict[tuple[str, str], float]:
        labels = [(dict(has), value) for (each, has), value in found.items() if each == name]
        return {(each["model"], each["reason"]): value for each, value in labels}

    assert reasons("modelrunner_evictions_total") == {
        ("smol", "room"): 1,
        ("other", "unload"): 1,
        ("smol", "idle"): 1,
        ("smol", "paused"): 1,
        ("smol", "replaced"): 1,
        ("smol", "unload"): 1,
    }
    assert reasons("modelrunner_refusals_total") == {
        ("huge", "insufficient_memory"): 1,
        ("other", "engine_exited"): 1,
    }
    assert reasons("modelrunner_crashes_total") == {("other", "engine_exited"): 1}


async def test_what_the_end_of_the_daemon_ends_is_counted(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """The metrics are read as long as an answer goes on."""
    daemon = await start_daemon(models={"smol": 0, "other": 1}, drain_limit=HUNG)
    assert await ask(daemon, {**CHAT, "model": "other"}) == 200
    daemon.backend.knobs = (f"--token-gate={tmp_path / 'gate'}",)
    async with daemon.unix.post("/v1/chat/completions", json={**CHAT, "stream": True, "max_tokens": 30}) as answer:
        await answer.content.readline()
        async with daemon.unix.post("/shutdown") as asked:
            assert asked.status == 202
        async with asyncio.timeout(HUNG):
            while not total(await metrics(daemon), "modelrunner_evictions_total", model="other", reason="shutdown"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (tmp_path / "gate").touch()
        assert b"[DONE]" in await answer.content.read()
    await daemon.task


async def test_metrics_of_the_engines_tell_their_runner(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1})
    await ask(daemon)
    await ask(daemon, {**CHAT, "model": "other"})
    found = await metrics(daemon)
    runners = {each["id"]: each["model_name"] for each in await get(daemon, "/engines/ps")}
    told = {dict(labels)["runner"]: dict(labels)["model"] for name, labels in found if name == "fake_batches_total"}
    assert told == runners


async def test_ps_tells_how_many_drafts_were_accepted(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1})
    daemon.backend.knobs = ("--drafts", "40", "10")
    change = {"model": "smol", "speculative": {"draft_model": "smol"}}
    async with daemon.unix.post("/engines/_configure", json=change) as answer:
        assert answer.status in (200, 202)
    for model in ("smol", "other"):
        await ask(daemon, {**CHAT, "model": model})
    found = {each["model_name"]: each["drafts"] for each in await get(daemon, "/engines/ps")}
    assert found == {"smol": {"proposed": 40, "accepted": 10}, "other": None}


async def test_openmetrics_where_it_is_asked_for(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    await ask(daemon)
    async with daemon.unix.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}) as answer:
        assert answer.content_type == "application/openmetrics-text"
        assert (await answer.text()).endswith("# EOF\n")


async def test_the_last_requests(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    await ask(daemon, caller="kim")
    await ask(daemon, {**CHAT, "model": "nope"})
    newest, oldest = await get(daemon, "/engines/requests")
    assert (newest["status"], newest["error"], newest["model"]) == (404, "model_not_found", "nope")
    assert (oldest["model_name"], oldest["caller"], oldest["status"]) == ("smol", "kim", 200)
    assert (oldest["prompt_tokens"], oldest["completion_tokens"]) == (3, 8)
    assert 0 < oldest["loading"] <= oldest["first_byte"] <= oldest["duration"]
    assert [each["status"] for each in await get(daemon, "/engines/requests?status=404")] == [404]
    assert [each["model"] for each in await get(daemon, "/engines/requests?model=smol&limit=1")] == ["smol"]
    assert "secret" not in json.dumps(await get(daemon, "/engines/requests"))
    await get(daemon, "/engines/requests?status=x", 400)


async def test_requests_are_followed(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    async with daemon.unix.get("/engines/requests?model=smol", headers={"Accept": "text/event-stream"}) as feed:
        await ask(daemon, {**CHAT, "model": "nope"})
        await ask(daemon)
        lines = [(await feed.content.readline()).decode().strip() for _ in range(2)]
    assert lines[0] == "event: request"
    assert json.loads(lines[1].removeprefix("data: "))["model"] == "smol"


async def test_a_request_under_way_is_shown_and_cancelled(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--rate=20", "--tokens=100000")
    body = {**CHAT, "stream": True}
    async with daemon.unix.post("/v1/chat/completions", json=body, headers={"X-Request-ID": "mine"}) as answer:
        await answer.content.readline()
        [running] = await get(daemon, "/engines/requests?status=0")
        assert (running["request_id"], running["model_name"]) == ("mine", "smol")
        async with daemon.unix.post("/engines/requests/mine/cancel") as cancelled:
            assert cancelled.status == 200
        rest = await answer.read()
    [over] = await get(daemon, "/engines/requests")
    assert (over["request_id"], over["error"]) == ("mine", "request_cancelled")
    assert b"request_cancelled" in rest
    assert b"[DONE]" not in rest
    async with daemon.unix.post("/engines/requests/mine/cancel") as again:
        assert again.status == 404


async def test_usage_survives_a_restart(start_daemon: StartDaemon) -> None:
    first = await start_daemon(models={"smol": 0})
    await asyncio.gather(*(ask(first) for _ in range(4)))
    async with first.unix.post("/shutdown") as answer:
        assert answer.status == 202
    await first.task
    second = await start_daemon()
    await ask(second)
    [smol] = await get(second, "/usage")
    assert (smol["name"], smol["requests"], smol["completion_tokens"], smol["prompt_tokens"]) == ("smol", 5, 40, 15)
    assert smol["engine_seconds"] > 0
    assert [each["requests"] for each in await get(second, "/usage?by=day&since=1d")] == [5]
    await get(second, "/usage?by=mood", 400)
    await get(second, "/usage?since=-1h", 400)


async def test_without_telemetry_nothing_is_kept(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, telemetry=False)
    await ask(daemon)
    assert await get(daemon, "/engines/requests") == []
    assert await get(daemon, "/usage") == []
    assert total(await metrics(daemon), "modelrunner_runners", state="ready") == 1


async def test_usage_since_before_the_calendar(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    for since in ("999999w", "99999999999h"):
        async with daemon.unix.get(f"/usage?since={since}") as answer:
            assert answer.status == 200


async def test_the_access_log(start_daemon: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('access_log = "text"')
    daemon = await start_daemon(models={"smol": 0}, telemetry=False)
    path = daemon.settings.data_dir / "logs" / "access.log"
    asked = (("smol", "kim"), ("n\no", ""), ("smol", "kim"), ("smol", ""), ("a b", "c 200 'd"))
    for model, caller in asked:
        client = daemon.tcp if model == "a b" else daemon.unix
        headers = {"X-Caller": caller}
        async with client.post("/v1/chat/completions", json={**CHAT, "model": model}, headers=headers) as answer:
            await answer.read()
    (tmp_path / "config.toml").write_text('access_log = "json"')
    async with daemon.unix.post("/engines/reload") as answer:
        assert answer.status == 200
    await ask(daemon, {**CHAT, "model": "n\no"})
    (tmp_path / "config.toml").write_text('access_log = "off"')
    async with daemon.unix.post("/engines/reload") as answer:
        assert answer.status == 200
    await ask(daemon)
    *text, line = [each for each in path.read_text().splitlines() if "/v1/chat/completions" in each]
    words = [each.split() for each in text]
    assert [each[2] for each in words] == ["/v1/chat/completions"] * len(asked)
    assert {len(each) for each in words} == {10}
    assert [each[3:5] + each[-3:-1] for each in words] == [
        ["'smol'", "200", "'kim'", "-"],
        [r"'n\no'", "400", "-", "invalid_reference"],
        ["'smol'", "200", "'kim'", "-"],
        ["'smol'", "200", "-", "-"],
        [r"'a\x20b'", "400", r""" "c\x20200\x20'd" """.strip(), "invalid_reference"],
    ]
    assert [each[-1] for each in words] == ["-"] * (len(asked) - 1) + ["127.0.0.1"]
    assert len({each[1] for each in words}) == len(asked)
    assert [each[0] for each in words] == sorted(each[0] for each in words)
    assert (json.loads(line)["model"], json.loads(line)["error"]) == ("n\no", "invalid_reference")
    assert "secret" not in path.read_text()


async def test_a_client_that_leaves_pays_for_what_was_generated(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--rate=200", "--tokens=100000")
    async with daemon.unix.get("/engines/requests", headers={"Accept": "text/event-stream"}) as feed:
        async with daemon.unix.post("/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
            seen = 0
            while seen < 20:
                seen += (await answer.content.readline()).startswith(b"data: ")
            answer.close()
        told = [await feed.content.readline() for _ in range(2)]
    over = json.loads(told[1].removeprefix(b"data: "))
    assert over["status"] == 499
    assert over["completion_tokens"] >= 15
