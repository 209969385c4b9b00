"""A second machine as a host, over its own listener: two daemons' parts in one process, and real engine processes."""

import asyncio
import os
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec
import psutil
import pytest

from modelrunner.backend import BackendState, BackendStatus
from modelrunner.cluster import hostserver, remotehost
from modelrunner.cluster.members import Members
from modelrunner.cluster.messages import HostReport, HostVersion
from modelrunner.cluster.reservations import Order, RayLimits, Reservations
from modelrunner.daemon import certificates
from modelrunner.errors import (
    BackendUnavailable,
    BadRequest,
    EngineFailed,
    HostLost,
    InsufficientDisk,
    InsufficientMemory,
    ModelNotFound,
    ModelRunnerError,
    NotFound,
    Unauthorized,
    Unavailable,
)
from modelrunner.store.layout import archive_of
from modelrunner.telemetry.counters import EventCounters, RequestCounters
from modelrunner.telemetry.exposition import Exposition
from modelrunner.types import Bundle, KeepAlive, RequiredMemory
from tests.cluster.machines import MIB, MODEL, Cluster
from tests.gateway.fakes import until
from tests.waiting import HUNG, has_ended


async def test_a_model_that_fits_nowhere_else_runs_there_with_its_files(cluster: Cluster) -> None:
    lease = await cluster.lease()
    [view] = cluster.scheduler.runners()
    assert (view.host, view.state) == ("b", "ready")
    assert [model.tags for model in cluster.there.parts.store.list()] == [["smol"]]
    status, body = await lease.runner.upstream.fetch("GET", "/health", timeout=HUNG)
    assert status == 200, body
    log = b"".join([piece async for piece in cluster.scheduler.log(lease.runner.id, None, None)])
    assert log
    lease.release()
    await cluster.scheduler.unload(all=True)
    assert cluster.scheduler.runners() == []
    await until(lambda: cluster.host.report is not None and not cluster.host.report.runners)


async def test_two_models_take_turns_there(cluster: Cluster) -> None:
    for name in ("a", "b", "a"):
        (await cluster.lease(name)).release()
    assert [view.model_name for view in cluster.scheduler.runners()] == ["a"]
    assert len(cluster.there.parts.store.list()) == 2


async def test_nobody_is_answered_without_the_key_or_the_secret(cluster: Cluster) -> None:
    where = cluster.host.where
    trusted = ssl.create_default_context(cadata=where.certificate)
    async with httpx.AsyncClient(verify=trusted, trust_env=False, timeout=HUNG) as client:
        for headers in ({}, {"Authorization": "Bearer other"}):
            answer = await client.get(f"https://127.0.0.1:{where.port}/state", headers=headers)
            assert (answer.status_code, answer.json()["kind"]) == (Unauthorized.status, "Unauthorized")
        endpoint = (await cluster.lease()).runner.upstream.endpoint
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(f"https://127.0.0.1:{endpoint.port}/health")
    assert endpoint.tls is not None


@pytest.mark.parametrize("leaves", ["runner", "reader"])
async def test_a_log_that_is_followed_ends_with_its_runner_and_its_reader(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    """Though the log says nothing more."""
    monkeypatch.setattr(hostserver, "_BEAT", 0.01)
    lease, ended = await cluster.lease(), asyncio.Event()
    read_log = cluster.server._local.log

    async def noted(*arguments: Any) -> AsyncIterator[bytes]:
        async for piece in read_log(*arguments):
            yield piece
        ended.set()

    monkeypatch.setattr(cluster.server._local, "log", noted)
    log = cluster.scheduler.log(lease.runner.id, None, asyncio.Event())
    assert await anext(log)
    lease.release()
    if leaves == "runner":
        await cluster.scheduler.unload(all=True)
        async with asyncio.timeout(HUNG):
            async for _ in log:
                ...
    else:
        await log.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(HUNG):
        await ended.wait()


async def test_a_wrong_count_of_lines_is_refused(cluster: Cluster) -> None:
    lease = await cluster.lease()
    for lines in "", "-1", "many":
        with pytest.raises(BadRequest, match="lines must be a number of at least 0"):
            await cluster.host.call("GET", f"/runners/{lease.runner.id}/log?lines={lines}", type(None))
    lease.release()


async def test_an_engine_that_dies_there_fails_as_one_here(cluster: Cluster) -> None:
    lease = await cluster.lease()
    assert lease.runner.process is not None
    engine = psutil.Process(lease.runner.process.pid)
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: lease.runner.failure is not None)
    assert "ended by signal 9" in str(lease.runner.failure)
    lease.release()
    (await cluster.lease()).release()


async def test_a_host_that_falls_silent_loses_its_runners_and_is_used_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remotehost, "_AGAIN", 0.01)
    lease = await cluster.lease()
    await cluster.server.close()
    await until(lambda: cluster.host.report is None)
    await until(lambda: lease.runner.failure is not None)
    assert isinstance(lease.runner.failure, EngineFailed)
    assert "the host b does not answer" in str(lease.runner.failure)
    lease.release()
    await until(lambda: not cluster.scheduler.runners())  # the scheduler learns of it a moment after the runner
    with pytest.raises(InsufficientMemory):
        await cluster.lease()
    cluster.host.leave()
    await cluster.start()
    await cluster.ready()
    (await cluster.lease()).release()


async def test_a_host_that_leaves_in_its_handshake_leaves_no_connection(cluster: Cluster) -> None:
    hello, gone = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        hello.set()
        while await reader.read(4096):
            pass
        gone.set()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        cluster.host.leave()
        cluster.where = msgspec.structs.replace(cluster.where, port=port)
        cluster.join()
        await asyncio.wait_for(hello.wait(), HUNG)
        cluster.host.leave()
        await asyncio.wait_for(gone.wait(), HUNG)


@pytest.mark.parametrize("way", ["leave", "_lost"])
async def test_no_question_to_a_host_outlives_it(cluster: Cluster, way: str) -> None:
    """Though the host neither answers nor closes anything."""
    asked = asyncio.Semaphore(0)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(4096):
            if b"/state" not in piece:
                asked.release()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0, ssl=cluster.server._tls) as server:
        cluster.where = msgspec.structs.replace(cluster.where, port=server.sockets[0].getsockname()[1])
        cluster.host.leave()
        cluster.join()
        questions = [
            cluster.host.install("fake", lambda stage: None),
            cluster.host.call("GET", "/runners/none/memory", type(None), timeout=None),
            anext(cluster.host._log("none", None, asyncio.Event()), b""),
        ]
        asking = [asyncio.create_task(question) for question in map(awaited, questions)]
        for _ in asking:
            await asyncio.wait_for(asked.acquire(), HUNG)
        getattr(cluster.host, way)()
        async with asyncio.timeout(HUNG):
            *errors, piece = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(error) for error in errors] == [HostLost, HostLost]
        assert piece == b"", "a log ends"
        cluster.host.leave()


async def test_a_host_whose_connections_break_together_is_lost(cluster: Cluster) -> None:
    """Though the one on which it tells its state breaks last: what was asked there is asked elsewhere."""
    writers: dict[bool, asyncio.StreamWriter] = {}
    both = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers[b"/state" in await reader.read(4096)] = writer
        if len(writers) == 2:
            both.set()

    async with await asyncio.start_server(silent, "127.0.0.1", 0, ssl=cluster.server._tls) as server:
        cluster.where = msgspec.structs.replace(cluster.where, port=server.sockets[0].getsockname()[1])
        cluster.host.leave()
        cluster.join()
        question = asyncio.create_task(cluster.host.call("GET", "/runners/none/memory", type(None)))
        await asyncio.wait_for(both.wait(), HUNG)
        for of_state in False, True:
            writers[of_state].transport.abort()
            await asyncio.sleep(0)
        with pytest.raises(HostLost):
            await asyncio.wait_for(question, HUNG)
        cluster.host.leave()


async def awaited(question: Awaitable[Any]) -> Any:
    return await question


async def test_a_host_that_leaves_at_any_step_leaves_no_connection(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With calls under way, and while it closes them itself. `nothing_left` sees the connections."""
    monkeypatch.setattr(remotehost, "_AGAIN", 0.0)

    async def leaves(step: int) -> None:
        server, head = cluster.there.serve(), cluster.head.parts
        where = msgspec.structs.replace(cluster.where, port=await server.start())
        host = remotehost.RemoteHost("c", where, head.registry, head.store, lambda: None)
        await until(lambda: host.state == "ready")
        calls = [asyncio.create_task(host.call("GET", "/runners/none/memory", type(None))) for _ in range(3)]
        closing = asyncio.create_task(server.close()) if step % 2 else None
        for _ in range(step // 2):
            await asyncio.sleep(0)
        await host.close()
        assert all(
            isinstance(error, ModelRunnerError) for error in await asyncio.gather(*calls, return_exceptions=True)
        )
        await (closing or server.close())

    for step in range(80):
        await leaves(step)


async def test_runners_of_a_head_that_is_gone_end(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = await cluster.lease()
    assert lease.runner.process is not None
    engine = psutil.Process(lease.runner.process.pid)
    monkeypatch.setattr(hostserver, "HEADLESS", 1.0)
    monkeypatch.setattr(hostserver, "_BEAT", 0.05)
    cluster.host._following.cancel()  # nothing is closed, but nobody asks any more
    await until(lambda: has_ended(engine))


async def test_a_transfer_goes_on_where_it_stopped(cluster: Cluster) -> None:
    target = cluster.target("smol")
    digest = target.key.files.removeprefix("sha256:")
    folder = cluster.there.folder / "cluster"
    folder.mkdir()
    archive = archive_of(cluster.head.parts.store, target.key.files)
    begun = b"".join(archive.pieces())[:1000]
    (folder / f"{digest}.tar").write_bytes(begun)
    (await cluster.lease()).release()
    assert cluster.there.parts.store.verify("smol") == ()
    assert list(folder.iterdir()) == []


async def test_a_host_of_another_version_is_not_used(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    report = cluster.host.report
    assert isinstance(report, HostReport)
    monkeypatch.setattr(remotehost, "__version__", "9.9")
    assert "of version" in cluster.host.state
    assert cluster.host.budget(()) is None
    with pytest.raises(InsufficientMemory):
        await cluster.lease()


async def test_a_report_of_another_form_tells_the_version(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostserver.HostServer, "_report", lambda self: HostVersion("0.1"))
    await until(lambda: "of version 0.1" in cluster.host.state)
    assert cluster.host.budget(()) is None
    monkeypatch.undo()
    await until(lambda: cluster.host.state == "ready")


async def test_what_the_cluster_does_not_give_is_not_used(cluster: Cluster) -> None:
    held: list[Order] = []
    reservations = cluster.host.reservations = Reservations("node", 0, held.append)
    reservations.limits = RayLimits(MODEL - 1, ())
    with pytest.raises(InsufficientMemory):
        await cluster.lease()
    reservations.limits = None
    leasing = asyncio.create_task(cluster.lease())
    await until(lambda: bool(held))
    assert held[0].memory == MODEL
    reservations.answered(held[0].name, "another job has it")
    with pytest.raises(InsufficientMemory, match="another job has it"):
        await leasing
    assert held[1:] == [Order(held[0].name)]


async def test_what_rays_workers_hold_is_ours(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their processes are not the host's."""

    def budget(ram: int, *vram: int) -> RequiredMemory | None:
        assert cluster.host.report is not None
        cluster.host.report = msgspec.structs.replace(cluster.host.report, budget=RequiredMemory(ram, vram))
        return cluster.host.budget(())

    assert budget(100, 24, 24) == RequiredMemory(100, (24, 24))
    cluster.host.lend("runner", RequiredMemory(10, (0, 20)))
    assert budget(95, 20, 1) == RequiredMemory(100, (20, 24)), "while they load; another program has some of device 0"
    assert budget(60, 20, 1) == RequiredMemory(70, (20, 24))
    cluster.host.take_back("runner")
    assert budget(60, 20, 1) == RequiredMemory(70, (20, 24)), "until the host tells that they are gone"
    monkeypatch.setattr(remotehost, "_ENDING", 0.0)
    cluster.host.take_back("runner")
    assert budget(60, 20, 1) == RequiredMemory(60, (20, 1))


async def test_a_run_over_several_hosts_sends_a_model_to_none(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that has a copy of its own reads it at the head's path all the same."""
    host, spec = cluster.host, cluster.target("smol").spec
    host.reservations, host._shared = Reservations("node", 2, lambda order: None), True
    with monkeypatch.context() as patch:
        patch.setattr(hostserver, "bundle_at", missing)
        with pytest.raises(EngineFailed, match="mount the folder of models there"):
            await host.show(spec)
        assert cluster.there.parts.store.list() == []
        assert not host.joins(spec.model_id, (1,))
        await host.fetch(spec)
    assert [model.tags for model in cluster.there.parts.store.list()] == [["smol"]]
    await host.show(spec)
    assert host.sees(spec.model_id)
    host._unseen.clear()
    assert host.joins(spec.model_id, (1,))
    assert not host.joins(spec.model_id, (1, 2)), "which Ray does not know"


def missing(folder: Path, id: str) -> Bundle:
    raise ModelNotFound("it is not mounted")


async def test_one_that_is_drained_gets_nothing_new(cluster: Cluster) -> None:
    (await cluster.lease("a")).release()
    cluster.host.is_draining = True
    await cluster.scheduler.unload(host="b")
    assert cluster.scheduler.runners() == []
    with pytest.raises(InsufficientMemory):
        await cluster.lease("a")
    cluster.host.is_draining = False
    (await cluster.lease("a")).release()


async def test_what_was_not_used_for_longest_makes_room_on_the_disk(cluster: Cluster) -> None:
    """Where a third model has room if one of two goes."""
    store = cluster.there.parts.store
    for name in ("a", "b", "a"):
        (await cluster.lease(name)).release()
    store.quota = store.used() + archive_of(cluster.head.parts.store, cluster.target("c").spec.model_id).size - 1
    (await cluster.lease("c")).release()
    assert sorted(tag for model in store.list() for tag in model.tags) == ["a", "c"]
    (await cluster.lease("b")).release()
    assert sorted(tag for model in store.list() for tag in model.tags) == ["b", "c"]


async def test_a_model_that_can_have_no_room_takes_none_from_others(cluster: Cluster, tmp_path: Path) -> None:
    store = cluster.there.parts.store
    for name in ("a", "b"):
        (await cluster.lease(name)).release()
    await cluster.scheduler.unload(host="b")
    store.quota = archive_of(cluster.head.parts.store, cluster.target("c").spec.model_id).size - 1
    with pytest.raises(InsufficientDisk, match="lacks 1B for it"):
        await cluster.host.bring(cluster.target("c").spec.model_id)
    assert sorted(tag for model in store.list() for tag in model.tags) == ["a", "b"]


async def test_a_runner_whose_files_found_no_room_is_forgotten(cluster: Cluster) -> None:
    cluster.there.parts.store.quota = 1
    with pytest.raises(InsufficientDisk):
        await cluster.lease("a")
    assert cluster.host.runners == {}


async def test_a_host_without_room_on_its_disk_says_so(cluster: Cluster) -> None:
    """And is used for what it has."""
    (await cluster.lease("a")).release()
    cluster.there.parts.store.quota = 2000
    used = await cluster.lease("a")
    with pytest.raises(InsufficientDisk, match=r"needs .* its models may have"):
        await cluster.host.bring(cluster.target("b").spec.model_id)
    assert "ready, but the model needs" in cluster.host.state
    assert [model.tags for model in cluster.there.parts.store.list()] == [["a"]]
    used.release()
    cluster.there.parts.store.quota = None
    (await cluster.lease("b")).release()
    assert cluster.host.state == "ready"


async def test_a_host_without_the_engine_is_left_out(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    there = cluster.there.backend
    there.state = BackendStatus(BackendState.NOT_INSTALLED, "none")

    async def refuse(progress: object, **options: object) -> None:
        raise BackendUnavailable("there is no engine for this platform")

    monkeypatch.setattr(there, "install", refuse)
    with pytest.raises(BackendUnavailable, match="no engine for this platform"):
        await cluster.lease()
    assert cluster.host.state == "ready, but fake cannot be had there: there is no engine for this platform"
    with pytest.raises(InsufficientMemory):
        await cluster.lease()
    cluster.head.parts.probe.set_limits(100 * MIB, None)
    (await cluster.lease()).release()
    assert [view.host for view in cluster.scheduler.runners()] == [""]


@pytest.mark.usefixtures("not_measured")
async def test_a_clock_an_hour_apart_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the host is ahead: its certificate is of a time that has not come here."""

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + timedelta(hours=1)

    made = Cluster(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(certificates, "datetime", Ahead)
        await made.start()
    await made.ready()
    (await made.lease()).release()
    await made.close()


async def test_a_model_runs_on_the_hosts_that_its_settings_name(cluster: Cluster) -> None:
    """By name or label. The machine of the daemon has room, too."""
    cluster.head.parts.probe.set_limits(100 * MIB, None)
    cluster.host.labels = ["pool=fast"]
    for wanted, where in (("b", "b"), ("here", ""), ("pool=fast", "b")):
        target = replace(cluster.target("smol"), hosts=("elsewhere", wanted))
        async with asyncio.timeout(HUNG):
            (await cluster.scheduler.acquire(target)).release()
        assert [view.host for view in cluster.scheduler.runners()] == [where]
        await cluster.scheduler.unload(all=True)
    with pytest.raises(Unavailable, match="may run on elsewhere alone, and no such host is there"):
        await cluster.scheduler.acquire(replace(cluster.target("smol"), hosts=("elsewhere",)))


async def test_metrics_name_the_host_of_a_runner(cluster: Cluster) -> None:
    (await cluster.lease()).release()
    scheduler = cluster.scheduler
    exposition = Exposition(scheduler, RequestCounters(), EventCounters(), lambda: 0)
    body, _ = await exposition.render("")
    of_runners = [line for line in body.decode().splitlines() if line.startswith("modelrunner_runner")]
    assert of_runners
    assert all('host="b"' in line for line in of_runners)


async def test_models_are_brought_to_all_hosts_before_they_are_asked(cluster: Cluster) -> None:
    members = expecting(cluster)
    target = cluster.target("smol")
    assert await members.preload(target, ()) == {"b": ""}
    assert [model.tags for model in cluster.there.parts.store.list()] == [["smol"]]
    assert cluster.scheduler.runners() == []
    with pytest.raises(NotFound, match="no host 'c'"):
        await members.preload(target, ["c"])
    cluster.there.parts.store.quota = 1
    [problem] = (await members.preload(cluster.target("other"), ["b"])).values()
    assert "the model needs" in problem


def expecting(cluster: Cluster) -> Members:
    """What the daemon has for its cluster, of which the host b is one."""
    parts = cluster.head.parts
    members = Members(parts.scheduler, parts.registry, parts.store, "auto")
    members.hosts["b"] = cluster.host
    return members


@pytest.mark.parametrize("wanted", [(), ("b",)])
async def test_who_needs_a_host_that_was_just_lost_waits_for_it(cluster: Cluster, wanted: tuple[str, ...]) -> None:
    """Also a model that may run nowhere else by its settings."""
    members = expecting(cluster)
    cluster.host.leave()
    waiting = asyncio.create_task(cluster.scheduler.acquire(replace(cluster.target("smol"), hosts=wanted)))
    await until(lambda: bool(cluster.scheduler.waiting()))
    for _ in range(20):
        await asyncio.sleep(0)
    told = await cluster.scheduler.diagnostics.why(cluster.target("smol"))
    assert "for hosts of the cluster that may still come" in told.reason
    cluster.join()
    members.hosts["b"] = cluster.host
    (await asyncio.wait_for(waiting, HUNG)).release()


@pytest.mark.parametrize("wanted", [(), ("b",)])
async def test_a_host_that_does_not_come_back_is_not_waited_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, wanted: tuple[str, ...]
) -> None:
    monkeypatch.setattr("modelrunner.scheduler.state.REJOIN", 0.3)
    expecting(cluster)
    cluster.host.leave()
    waiting = asyncio.create_task(cluster.scheduler.acquire(replace(cluster.target("smol"), hosts=wanted)))
    with pytest.raises(Unavailable if wanted else InsufficientMemory):
        await asyncio.wait_for(waiting, HUNG)


@pytest.mark.usefixtures("not_measured")
async def test_a_request_that_waits_takes_a_host_that_joins(tmp_path: Path) -> None:
    made = Cluster(tmp_path)
    small = made.target("smol")
    made.head.backend.memory = RequiredMemory(MODEL)
    held = replace(small, keep_alive=KeepAlive(300))
    made.head.parts.probe.set_limits(100 * MIB, None)
    first = await made.scheduler.acquire(held)
    waiting = asyncio.create_task(made.scheduler.acquire(made.target("other")))
    await until(lambda: bool(made.scheduler.waiting()))
    await made.start()
    second = await asyncio.wait_for(waiting, HUNG)
    assert sorted(view.host for view in made.scheduler.runners()) == ["", "b"]
    first.release()
    second.release()
    await made.close()
