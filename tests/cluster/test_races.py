"""What is under way when a host, its cluster or its runner goes: nothing is left there, and requests go elsewhere."""

import asyncio
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from modelrunner.cluster import hostserver, remotehost, transfers
from modelrunner.cluster.members import ClusterMember, Members
from modelrunner.cluster.messages import HostReport, RunnerReport
from modelrunner.cluster.raymembers import HostActor
from modelrunner.cluster.reservations import Reservations
from modelrunner.errors import EngineFailed
from modelrunner.sandbox import Sandbox
from modelrunner.types import RequiredMemory
from tests.cluster.machines import Cluster
from tests.cluster.rig import Rig
from tests.gateway.fakes import until
from tests.waiting import HUNG


class SlowRay(Reservations):
    """Answers no order."""

    def __init__(self) -> None:
        super().__init__("node", 0, lambda order: None)
        self.asked = asyncio.Event()

    async def take(self, runner: str, files: str, memory: RequiredMemory) -> None:
        self.asked.set()
        await super().take(runner, files, memory)


async def test_a_runner_that_is_ended_before_it_began_never_begins(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.host.bring(cluster.target("smol").model_id)
    specs, loop = cluster.server._specs, asyncio.get_running_loop()
    real, inside, go = specs.opened, asyncio.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        loop.call_soon_threadsafe(inside.set)
        go.wait(HUNG)
        return real(*given)

    monkeypatch.setattr(specs, "opened", slow)
    asking = asyncio.create_task(cluster.scheduler.acquire(cluster.target("smol")))
    await asyncio.wait_for(inside.wait(), HUNG)
    await cluster.scheduler.unload(all=True, force=True)
    await asyncio.gather(asking, return_exceptions=True)
    go.set()
    await until(lambda: not cluster.server._starting)
    assert cluster.server._runners == {}
    monkeypatch.setattr(specs, "opened", real)
    (await cluster.lease()).release()


async def test_a_runner_whose_end_was_not_told_ends_all_the_same(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (await cluster.lease()).release()
    real, failed = cluster.host.call, list[str]()

    async def call(method: str, path: str, *given: Any, **options: Any) -> Any:
        if method == "DELETE" and not failed:
            failed.append(path)
            raise EngineFailed("a cable was pulled for a moment")
        return await real(method, path, *given, **options)

    monkeypatch.setattr(cluster.host, "call", call)
    await cluster.scheduler.unload(all=True)
    assert failed
    await until(lambda: not cluster.server._runners)
    assert cluster.host.state == "ready"


async def test_a_host_that_flaps_while_ray_is_asked_runs_one_engine(cluster: Cluster) -> None:
    await cluster.host.bring(cluster.target("smol").model_id)
    ray = cluster.host.reservations = SlowRay()
    cluster.scheduler.expect_hosts(lambda: cluster.host.moved)
    asking = asyncio.create_task(cluster.scheduler.acquire(cluster.target("smol")))
    await asyncio.wait_for(ray.asked.wait(), HUNG)
    cluster.host.reservations = None
    cluster.host._lost()  # the next report is a new coming
    lease = await asyncio.wait_for(asking, HUNG)
    assert cluster.server._runners.keys() == {lease.runner.id}
    assert not ray._users, "what was asked of Ray is given back"
    lease.release()


@pytest.mark.parametrize("what", ["host", "cluster"])
async def test_who_waits_for_ray_is_answered_elsewhere_when_it_is_lost(cluster: Cluster, what: str) -> None:
    await cluster.host.bring(cluster.target("smol").model_id)
    ray = cluster.host.reservations = SlowRay()
    asking = asyncio.create_task(cluster.scheduler.acquire(cluster.target("smol")))
    await asyncio.wait_for(ray.asked.wait(), HUNG)
    await cluster.another("c")
    cluster.scheduler.expect_hosts(lambda: max([host.moved for host in cluster.hosts.values()]))
    if what == "cluster":
        ray.end()
    cluster.host.leave()
    lease = await asyncio.wait_for(asking, HUNG)
    assert lease.slot.option.place.host == "c"
    lease.release()


async def test_who_joins_a_transfer_that_is_given_up_starts_it_anew(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = cluster.target("smol").model_id
    real, begun = transfers.rest_of, asyncio.Event()

    async def slow(*given: Any) -> Any:
        async for piece in real(*given):
            yield piece
            begun.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(remotehost, "rest_of", slow)
    first = asyncio.create_task(cluster.host.bring(id))
    await asyncio.wait_for(begun.wait(), HUNG)
    first.cancel()
    await asyncio.sleep(0)  # the transfer is being ended
    monkeypatch.setattr(remotehost, "rest_of", real)
    await asyncio.wait_for(cluster.host.bring(id), HUNG)
    assert cluster.host.keeps(id)


async def test_the_log_of_a_runner_that_is_not_there_yet_is_empty(cluster: Cluster) -> None:
    assert [piece async for piece in cluster.host._log("nobody", None, None)] == []


async def test_a_host_that_tells_nonsense_is_tried_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotehost, "_AGAIN", 0.01)
    report = hostserver.HostServer._report

    def told() -> HostReport:
        assert cluster.host.report is not None
        return cluster.host.report

    runner = RunnerReport("", True, None, {}, 0, None, Sandbox())
    numbers = {"fake": (10**15,)}  # of a device that its budget has not

    def lies(server: hostserver.HostServer) -> HostReport:
        return msgspec.structs.replace(report(server), runners={"a\x00b\n/..": runner}, numbers=numbers)

    with monkeypatch.context() as patched:
        patched.setattr(hostserver.HostServer, "_report", lies)
        cluster.server._changes.set()
        await until(lambda: bool(told().runners))
        assert cluster.host.numbers("fake") == (0,)
    cluster.server._changes.set()
    await until(lambda: not told().runners)
    assert not cluster.host._following.done()
    (await cluster.lease()).release()


async def test_a_host_that_sends_without_end_is_lost_and_tried_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remotehost, "_AGAIN", 0.01)
    with monkeypatch.context() as patched:
        patched.setattr(remotehost, "_LONGEST", 10_000)
        patched.setattr(cluster.server, "_own", lambda: frozenset(["x" * 20_000]))
        cluster.server._changes.set()
        await until(lambda: cluster.host.report is None)
        assert "it sends a line of more than 10,000 bytes" in caplog.text
        with pytest.raises(EngineFailed, match="more than 10,000 bytes"):
            await cluster.host._ask("GET", "/state")
    await cluster.ready()
    (await cluster.lease()).release()


async def test_a_host_where_the_estimate_fails_refuses_for_itself_alone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.another("c")
    numbers = remotehost.RemoteHost.numbers
    monkeypatch.setattr(
        remotehost.RemoteHost, "numbers", lambda self, name: (10**15,) if self.name == "c" else numbers(self, name)
    )
    lease = await cluster.lease()
    assert lease.slot.option.place.host == "b"
    lease.release()


class ClusterOfTwo(Members):
    """Members of the machines of a test; no Ray is asked."""

    def __init__(self, cluster: Cluster) -> None:
        parts = cluster.head.parts
        super().__init__(cluster.scheduler, parts.registry, parts.store, "127.0.0.1:1")
        self._key, self._where = "key", cluster.where

    def come(self, node: str, certificate: str = "", name: str = "b") -> None:
        there = self._where
        self._learn(ClusterMember(node, name, there.address, there.port, certificate=certificate or there.certificate))

    def go(self, node: str, name: str = "b") -> None:
        self._learn(ClusterMember(node, name, gone=True))


@pytest.fixture
async def members(cluster: Cluster) -> Any:
    cluster.host.leave()
    members = ClusterOfTwo(cluster)
    yield members
    for host in members.hosts.values():
        await host.close()


async def test_a_node_that_goes_takes_no_other_of_its_name_with_it(members: ClusterOfTwo) -> None:
    members.come("first")
    members.come("second")
    await until(lambda: members.hosts["b"].state == "ready")
    members.go("first")
    assert members.hosts["b"].state == "ready"
    members.go("second")
    await until(lambda: members.hosts["b"].state == "gone")


async def test_one_that_is_drained_stays_so_when_it_comes_anew(members: ClusterOfTwo) -> None:
    members.come("node")
    await until(lambda: members.hosts["b"].state == "ready")
    await members.drain("b", on=True)
    members.go("node")
    members.come("node")
    await until(lambda: members.hosts["b"].state == "draining")


async def test_one_that_went_long_ago_is_forgotten(
    members: ClusterOfTwo, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("old", "drained"):
        members.come(name, name=name)
        await until(lambda name=name: members.hosts[name].state == "ready")  # type: ignore[misc]
    await members.drain("drained", on=True)
    for name in ("old", "drained"):
        members.go(name, name=name)
    members.come("node")
    assert {host.name for host in members.view()} == {"old", "drained", "b"}
    await until(lambda: members.hosts["old"].state == "gone")
    members.go("node")
    monkeypatch.setattr("modelrunner.cluster.members._SHOWN", 0.0)
    members.come("node")
    assert {host.name for host in members.view()} == {"drained", "b"}
    await until(lambda: members.hosts["b"].state == "ready")
    assert "old" not in cluster.scheduler._hosts


async def test_a_certificate_that_cannot_be_read_is_told(members: ClusterOfTwo) -> None:
    members.come("node", "nonsense")
    [view] = members.view()
    assert view.state.startswith("its certificate cannot be read")
    members.come("node")
    await until(lambda: members.hosts["b"].state == "ready")


async def test_a_cluster_that_no_process_can_ask_is_told_and_asked_again(
    members: ClusterOfTwo, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = asyncio.Semaphore(0)

    async def none(*given: Any, **options: Any) -> None:
        tries.release()
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("modelrunner.cluster.members._AGAIN", (0.0, 0.0))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", none)
    following = asyncio.create_task(members.run())
    for _ in range(3):
        await asyncio.wait_for(tries.acquire(), HUNG)
    assert "Resource temporarily unavailable" in members.problem
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


@pytest.mark.parametrize(
    ("says", "report"),
    [
        ("echo hello; echo '[1]'; echo '{\"port\": 5}'; read line", {"address": "here", "port": 5}),
        (
            "echo hello; exit 3",
            {"address": "here", "problem": "modelrunner does not start there: exit code 3"},
        ),
    ],
)
def test_other_words_before_a_hosts_report_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, report: dict[str, Any]
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    actor = HostActor()
    assert actor.start("here", "key") == report
    actor._process.communicate(timeout=HUNG)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, nodes=("b",), models=("m",))
    yield made
    made.close()


def test_a_daemon_that_is_asked_to_stop_lets_the_answers_of_its_hosts_end(rig: Rig) -> None:
    rig.start()
    rig.add_models()
    assert rig.ask("m").status_code == 200
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 80}
    with (
        rig.head.client(HUNG) as client,
        client.stream("POST", "/engines/mine/v1/chat/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        first = next(lines)
        assert rig.head.process is not None
        rig.head.process.send_signal(signal.SIGTERM)
        text = "\n".join([first, *lines])
    assert text.count("data: {") > 60, text[-500:]
    assert "data: [DONE]" in text, text[-500:]
    assert rig.head.process.wait(HUNG) == 0
    rig.head.process = None
