"""A model on its way to a host: its room, its parts, and what happens when it does not come."""

import asyncio
import os
import shutil
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import pytest

from modelrunner.cluster import hostserver, remotehost, transfers
from modelrunner.cluster.messages import HostAddress, ModelAnnounced, Received
from modelrunner.cluster.transfers import SendTurns, rest_of
from modelrunner.errors import BadRequest, HostLost, InsufficientDisk, ModelNotFound
from modelrunner.store.files import size_of
from modelrunner.store.layout import ModelArchive, archive_of
from modelrunner.types import Bundle
from tests.cluster.machines import Cluster
from tests.gateway.fakes import until
from tests.waiting import HUNG


@dataclass
class Sending:
    """One model of the head, whose bytes go to the host as the test says."""

    cluster: Cluster
    name: str
    vocabulary: int = 16  # makes a model larger

    def __post_init__(self) -> None:
        id = self.cluster.target(self.name, vocabulary=self.vocabulary).key.files
        self.archive: ModelArchive = archive_of(self.cluster.head.parts.store, id)
        self.digest = self.archive.model_id.removeprefix("sha256:")
        self.partial = self.cluster.there.folder / "cluster" / f"{self.digest}.tar"
        self.go_on = asyncio.Event()

    @property
    def size(self) -> int:
        return self.archive.size

    async def announce(self, size: int | None = None, folder: str = "") -> Received:
        body = ModelAnnounced(self.size if size is None else size, folder=folder)
        return await self.cluster.host.call(
            "POST", f"/models/{self.digest}", Received, content=msgspec.json.encode(body), timeout=HUNG
        )

    async def send(self, offset: int = 0) -> int:
        """Returns the status. The second half waits for `go_on`. It does not need the host's connection to its head."""
        where, whole = self.cluster.host.where, b"".join(self.archive.pieces())[offset:]

        async def halves() -> AsyncIterator[bytes]:
            yield whole[: len(whole) // 2]
            await self.go_on.wait()
            yield whole[len(whole) // 2 :]

        trusted = ssl.create_default_context(cadata=where.certificate)
        headers = {"Authorization": f"Bearer {where.key}", "Content-Length": str(len(whole))}
        async with httpx.AsyncClient(verify=trusted, trust_env=False, timeout=HUNG) as client:
            url = f"https://{where.address}:{where.port}/models/{self.digest}?offset={offset}"
            return (await client.put(url, content=halves(), headers=headers)).status_code

    async def begun(self) -> "asyncio.Task[int]":
        """The first half is under way."""
        task = asyncio.create_task(self.send())
        await until(self.partial.exists)
        return task

    @property
    def is_there(self) -> bool:
        return self.archive.model_id in {model.id for model in self.cluster.there.parts.store.list()}


async def test_room_is_kept_for_a_model_that_was_announced_and_no_longer_than_it_needs_to_begin(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Sending(cluster, "a"), Sending(cluster, "b")
    cluster.there.parts.store.quota = first.size + second.size - 1
    await first.announce()
    with pytest.raises(InsufficientDisk):
        await second.announce()
    monkeypatch.setattr(hostserver, "_CLAIM", 0.0)
    await first.announce()
    assert await second.announce() == Received(0, False, frozenset())


async def test_a_model_that_comes_keeps_room_and_archive_though_the_head_seems_gone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes. Its state is asked by another connection, which breaks and comes again."""
    first, second = Sending(cluster, "a"), Sending(cluster, "b")
    cluster.there.parts.store.quota = first.size
    with monkeypatch.context() as patched:
        patched.setattr(hostserver, "_CLAIM", 0.0)
        await first.announce()
    sending = await first.begun()
    cluster.host.leave()
    await until(cluster.server._left.is_set)
    cluster.join()
    await cluster.ready()
    for size in (second.size, first.size + 1):  # without the room of the first; without any
        with pytest.raises(InsufficientDisk):
            await second.announce(size)
    first.go_on.set()
    assert await sending == 204
    assert first.is_there
    assert not first.partial.exists()


async def test_a_model_of_which_nothing_comes_any_more_gives_its_room_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Sending(cluster, "a"), Sending(cluster, "b")
    cluster.there.parts.store.quota = first.size + second.size - 1
    await first.announce()
    monkeypatch.setattr(hostserver, "_CLAIM", 0.01)
    sending = await first.begun()
    await until(lambda: not cluster.server._coming)
    assert (await second.announce()).bytes == 0
    first.go_on.set()
    with suppress(httpx.HTTPError):
        assert await sending == 400
    assert not first.is_there


async def test_what_is_announced_anew_ends_a_transfer_that_hangs(cluster: Cluster) -> None:
    """As after a cut of the network, which closed nothing. The rest is taken once."""
    first = Sending(cluster, "a")
    await first.announce()
    hanging = await first.begun()
    there = await first.announce()
    assert not there.complete
    first.go_on.set()
    assert await first.send(there.bytes) == 204
    with suppress(httpx.HTTPError):
        await hanging
    assert first.is_there
    assert cluster.there.parts.store.verify("a") == ()


async def test_a_question_for_what_it_sees_ends_no_transfer(cluster: Cluster) -> None:
    """As a run over several hosts asks for a model that another run has sent at the same time."""
    first = Sending(cluster, "a")
    await first.announce()
    sending = await first.begun()
    await first.announce(0)
    first.go_on.set()
    assert await sending == 204
    assert first.is_there


async def test_more_bytes_than_were_announced_are_not_taken(cluster: Cluster) -> None:
    """Nor kept: what is announced then begins anew."""
    first = Sending(cluster, "a")
    first.go_on.set()
    await first.announce(first.size - 1)
    with suppress(httpx.HTTPError):
        assert await first.send() == 400
    await until(lambda: not cluster.server._coming)
    assert not first.is_there
    assert (await first.announce()).bytes == 0
    assert await first.send() == 204


@pytest.mark.parametrize("method", ["PUT", "GET"])
@pytest.mark.parametrize("offset", ["", "?offset=", "?offset=-1", "?offset=many", f"?offset={'9' * 5000}"])
async def test_a_wrong_offset_is_refused(cluster: Cluster, method: str, offset: str) -> None:
    with pytest.raises(BadRequest, match="offset must be a number of at least 0, and is"):
        await cluster.host.call(method, f"/models/{Sending(cluster, 'a').digest}{offset}", type(None))


async def test_a_part_that_goes_before_its_rest_is_announced_is_not_counted_on(cluster: Cluster) -> None:
    """Other models took its room, while the announcement waited."""
    first = Sending(cluster, "a")
    first.partial.parent.mkdir()
    first.partial.write_bytes(b"".join(first.archive.pieces())[:1000])
    async with cluster.server._placing:
        announcing = asyncio.create_task(first.announce())
        await until(lambda: bool(cluster.server._placing._waiters))
        first.partial.unlink()
    assert (await announcing).bytes == 0


async def test_files_of_a_model_that_is_unpacked_are_not_counted_twice(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk holds two models that come, and one that is there: nothing goes for the second one."""
    old, first, second = Sending(cluster, "old"), Sending(cluster, "a", 20_000), Sending(cluster, "b")
    old.go_on.set()
    await old.announce()
    assert await old.send() == 204
    folder, whole = cluster.there.folder, asyncio.Event()
    room = size_of(folder) + 2 * first.size + 2 * second.size + first.size // 2  # for logs and such
    free = shutil.disk_usage(folder)

    def usage(path: Path) -> object:
        return free._replace(free=room - size_of(folder))

    pieces = hostserver._pieces

    async def to_the_last(path: Path) -> AsyncIterator[bytes]:
        async for piece in pieces(path):  # the only one
            yield piece[:-1024]
            await whole.wait()  # its files are written, and the end of the archive is not seen
            yield piece[-1024:]

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(hostserver, "_pieces", to_the_last)
    await first.announce()
    first.go_on.set()
    sending = asyncio.create_task(first.send())
    await until(lambda: any(claim.unpacked > 0.9 * first.size for claim in cluster.server._coming.values()))
    await second.announce()
    assert old.is_there
    whole.set()
    assert await sending == 204


async def test_a_host_gets_a_model_from_another_one_that_has_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing from the head, which has its clients."""
    id = cluster.target("smol").key.files
    await cluster.host.bring(id)

    def refuse(*arguments: object) -> None:
        raise AssertionError("the head sends it")

    monkeypatch.setattr(remotehost, "rest_of", refuse)
    for name in ("c", "d"):
        machine, host = await cluster.another(name)
        await host.bring(id)
        assert machine.parts.store.verify("smol") == ()
        assert host.has(id)


@pytest.mark.parametrize("at", [0, 5000])
async def test_the_head_sends_the_rest_where_another_host_stops(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    id = cluster.target("smol").key.files
    await cluster.host.bring(id)

    async def breaks(archive: ModelArchive, *options: object) -> AsyncIterator[bytes]:
        yield b"".join(archive.pieces())[:at]
        raise ConnectionResetError

    begun = []

    def noted(archive: ModelArchive, offset: int, is_busy: Callable[[], bool]) -> AsyncIterator[bytes]:
        begun.append(offset)
        return rest_of(archive, offset, is_busy)

    monkeypatch.setattr(hostserver, "rest_of", breaks)
    monkeypatch.setattr(remotehost, "rest_of", noted)
    machine, host = await cluster.another("c")
    await host.bring(id)
    assert begun == [at]
    assert machine.parts.store.verify("smol") == ()


async def test_of_many_hosts_that_lack_a_model_the_head_sends_it_to_one_at_a_time() -> None:
    @dataclass
    class Host:
        name: str
        models: set[str]
        where: HostAddress
        is_usable: bool = True

        def keeps(self, model_id: str) -> bool:
            return model_id in self.models

    hosts = [Host(str(number), set(), HostAddress("", 0, "", "")) for number in range(7)]
    turns = SendTurns(lambda: hosts)
    under_way: dict[str, tuple[str, asyncio.Event]] = {}  # by the host that gets it: who sends it, and when it is there

    async def get(host: Host) -> None:
        async with turns.turn("m") as sender:
            whole = asyncio.Event()
            under_way[host.name] = sender.name if sender else "", whole
            await whole.wait()
            host.models.add("m")

    rounds: list[list[str]] = []
    async with turns.turn("another"), asyncio.TaskGroup() as tasks:  # it is not in the way of it
        for host in hosts:
            tasks.create_task(get(host))
        for count in 1, 2, 4:
            await until(lambda: len(under_way) == count)  # noqa: B023
            rounds.append([sender for sender, _ in under_way.values()])
            for name in list(under_way):
                under_way.pop(name)[1].set()
    assert all(len(set(senders)) == len(senders) and "" in senders for senders in rounds)
    assert all(host.models for host in hosts)


async def test_a_sender_with_requests_rests_as_long_as_it_sends(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Sending(cluster, "a", 200_000).archive
    assert archive.size > 1 << 20
    sent: list[float] = []
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    monkeypatch.setattr(transfers, "asyncio", SimpleNamespace(to_thread=asyncio.to_thread, sleep=rest))
    async for _ in rest_of(archive, 0, lambda: True):
        began = time.monotonic()
        await asyncio.sleep(0.01)
        sent.append(time.monotonic() - began)
    assert len(sent) > 3
    assert all(resting >= sending for sending, resting in zip(sent, rests, strict=True))
    rests.clear()
    assert b"".join([piece async for piece in rest_of(archive, 7, lambda: False)]) == b"".join(archive.pieces())[7:]
    assert not any(rests)


async def test_a_transfer_to_a_host_that_is_lost_ends(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing was closed."""
    hangs = asyncio.Event()

    async def stuck(*options: object) -> AsyncIterator[bytes]:
        yield b"x"
        await hangs.wait()

    monkeypatch.setattr(remotehost, "rest_of", stuck)
    bringing = asyncio.create_task(cluster.host.bring(cluster.target("smol").key.files))
    await until(lambda: bool(cluster.server._coming))
    cluster.host._lost()
    with pytest.raises(HostLost, match="does not answer any more"):
        await bringing


async def test_files_of_a_model_may_lie_on_another_disk_than_its_archive(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one of the data folder has room for the archive alone."""
    first, store, free = Sending(cluster, "a"), cluster.there.parts.store, shutil.disk_usage("/")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        other = Path(name)
        if other.stat().st_dev == store.data.stat().st_dev:
            pytest.skip("there is one file system alone")
        store.set_folders([other])
        rooms = {store.data: first.size, other: first.size}
        monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=rooms.get(Path(path), free.free)))
        assert (await first.announce()).bytes == 0
        for disk in store.data, other:
            with monkeypatch.context() as patched:
                patched.setitem(rooms, disk, first.size - 1)
                with pytest.raises(InsufficientDisk, match="lacks 1B for it"):
                    await first.announce()
        store.set_folders([])


@pytest.fixture
async def seeing(tmp_path: Path, not_measured: None) -> AsyncIterator[Cluster]:
    """Its host sees the head's models at the same path."""
    made = Cluster(tmp_path)
    await made.start(shared=True)
    await made.ready()
    yield made
    await made.close()


async def test_a_host_that_sees_the_models_of_the_head_reads_them_where_they_are(seeing: Cluster) -> None:
    """And changes nothing there."""
    folder = seeing.head.folder / "data_dir"
    target = seeing.target("smol")
    before = _look_of(folder)
    (await seeing.lease()).release()
    [run] = seeing.server._runners.values()
    assert run.runner.spec.bundle.directory == target.spec.bundle.directory
    assert seeing.there.parts.store.list() == []
    assert _look_of(folder) == before
    await until(lambda: seeing.host.has(target.key.files))


async def test_a_model_that_a_host_only_sees_is_not_got_from_it(
    seeing: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are the head's: a host that does not see them gets them from there."""
    id = seeing.target("smol").key.files
    await seeing.host.bring(id)
    assert seeing.host.has(id)
    assert seeing.turns._free(id) == [None]

    def blind(data: Path, id: str) -> Bundle:
        raise ModelNotFound(f"the model {id} is not in {data}")

    monkeypatch.setattr(hostserver, "bundle_at", blind)
    machine, other = await seeing.another("c")
    await other.bring(id)
    assert machine.parts.store.verify("smol") == ()
    assert seeing.turns._free(id) == [other, None]


@pytest.mark.parametrize("fault", ["manifest", "size", "laid out", "unreadable", "elsewhere"])
async def test_what_a_host_does_not_see_whole_is_sent(
    seeing: Cluster, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    id = seeing.target("smol").key.files
    folder = seeing.head.folder / "data_dir"
    whole = seeing.head.folder / "whole"
    [model] = folder.glob("bundles/*/*.gguf")
    manifest = folder / "manifests/sha256" / id.removeprefix("sha256:")
    announced = Sending(seeing, "smol")
    match fault:
        case "manifest":
            manifest.write_bytes(manifest.read_bytes().replace(b"1", b"2"))
        case "size":
            os.truncate(model, 10)
        case "laid out":
            model.unlink()
        case "unreadable":
            monkeypatch.setattr(os, "access", lambda path, mode: False)
        case "elsewhere":
            folder = whole
    there = await announced.announce(folder=str(folder))
    assert there == Received(0, False, frozenset())
    assert announced.archive.model_id == id


async def test_a_model_that_is_not_seen_any_more_is_looked_for_anew(seeing: Cluster) -> None:
    target = seeing.target("smol")
    await seeing.host.bring(target.key.files)
    seeing.server._shared[target.key.files] = seeing.head.folder / "away"
    with pytest.raises(ModelNotFound, match="cannot be read there"):
        await seeing.lease()
    await until(lambda: not seeing.host.has(target.key.files))
    await seeing.host.bring(target.key.files)
    assert seeing.server._shared == {target.key.files: seeing.head.folder / "data_dir"}


def _look_of(folder: Path) -> list[tuple[str, float]]:
    return sorted((str(path), path.lstat().st_mtime) for path in folder.glob("[bm]*/**/*"))
