"""Downloads in ranges: several connections to one file, and what is left when they are cut."""

import asyncio
import os
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from modelrunner.errors import SourceFailed
from modelrunner.web.download import Downloader
from modelrunner.web.partial import ByteRange, PartialFile, RemoteFile, received
from modelrunner.web.session import new_client
from modelrunner.web.transfers import Transfers
from tests.pull.hub import Fault, Hub, Repository, sha256
from tests.pull.test_hostile import at_once
from tests.waiting import HUNG

SIZE = 48 << 20
DATA = random.Random(1).randbytes(SIZE)
FILE = "weights.safetensors"


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    async with Hub().running() as hub:
        hub.repositories["Org/Big"] = Repository({FILE: DATA})
        yield hub


def remote(hub: Hub) -> RemoteFile:
    return RemoteFile(FILE, f"{hub.endpoint}/Org/Big/resolve/main/{FILE}", SIZE, sha256(DATA))


def eager(per_host: int = 6, whole: int = 12) -> Transfers:
    """Opens a further connection at every opportunity."""
    return Transfers(fast=float("inf"), settle=0.0, per_host=per_host, whole=whole)


async def until(condition: Callable[[], bool]) -> None:
    """What a server or another process does is no event here."""
    async with asyncio.timeout(HUNG):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def fetch(
    hub: Hub,
    path: Path,
    transfers: Transfers | None = None,
    advanced: Callable[[int], None] = lambda _: None,
) -> None:
    async with new_client(hub.endpoint) as client, asyncio.timeout(HUNG):
        await Downloader(client, {}, pause=at_once).fetch(remote(hub), path, advanced, transfers or eager())


def ranges(hub: Hub) -> list[str]:
    return [content.headers.get("Range", "") for content in hub.contents]


async def test_a_slow_file_comes_over_several_connections(hub: Hub, tmp_path: Path) -> None:
    hold = asyncio.Event()
    hub.faults.append(Fault(hold=hold))

    def advanced(current: int) -> None:
        if current >= SIZE * 0.6:  # more than the first connection has brought
            hold.set()

    await fetch(hub, tmp_path / "x", advanced=advanced)
    assert (tmp_path / "x").read_bytes() == DATA
    asked = ranges(hub)
    assert asked[0] == ""
    assert len(asked) > 2
    assert all(one.startswith("bytes=") and not one.endswith("-") for one in asked[1:-1])
    starts = [one.partition("-")[0] for one in asked]
    assert len(set(starts)) == len(starts)  # nothing is asked for twice
    assert hub.most_at_once > 1


async def test_a_fast_file_comes_over_one_connection(hub: Hub, tmp_path: Path) -> None:
    await fetch(hub, tmp_path / "x", Transfers(fast=0.0, settle=0.0))
    assert (tmp_path / "x").read_bytes() == DATA
    assert ranges(hub) == [""]


@pytest.mark.parametrize(("per_host", "whole"), [(2, 12), (6, 3)])
async def test_connections_are_bounded_over_all_files(hub: Hub, tmp_path: Path, per_host: int, whole: int) -> None:
    transfers = eager(per_host, whole)
    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(fetch(hub, tmp_path / str(number), transfers))
    assert 1 < hub.most_at_once <= min(per_host, whole)
    assert {(tmp_path / str(number)).read_bytes() == DATA for number in range(4)} == {True}


async def test_a_server_without_ranges(hub: Hub, tmp_path: Path) -> None:
    hold = asyncio.Event()
    hub.faults.extend([Fault(hold=hold, whole=True), *[Fault(whole=True)] * 50])
    task = asyncio.create_task(fetch(hub, tmp_path / "x"))
    await until(lambda: len(hub.contents) > 1)
    hold.set()
    await task
    assert (tmp_path / "x").read_bytes() == DATA
    assert ranges(hub).count("") == 1  # it was not begun again
    assert len(hub.contents) <= 6


@pytest.mark.parametrize("fault", [Fault(flip=40 << 20), Fault(shift=5), Fault(status=416), Fault(cut=1 << 20)])
async def test_a_server_that_lies_about_ranges(hub: Hub, tmp_path: Path, fault: Fault) -> None:
    hold = asyncio.Event()
    hub.faults.extend([Fault(hold=hold), fault])

    task = asyncio.create_task(fetch(hub, tmp_path / "x"))
    await until(lambda: len(hub.contents) > 1)
    hold.set()
    await task
    assert (tmp_path / "x").read_bytes() == DATA


@pytest.mark.parametrize("kill", [False, True])
async def test_a_half_that_is_here_is_not_fetched_again(hub: Hub, tmp_path: Path, kill: bool) -> None:
    hold, half = asyncio.Event(), asyncio.Event()
    hub.faults.extend([Fault(hold=hold), *[Fault(hold=hold)] * 3])
    path, file = tmp_path / "x", remote(hub)
    if kill:
        command = (sys.executable, "-m", "tests.web.interrupted", file.url, str(SIZE), file.digest, str(path))
        process = await asyncio.create_subprocess_exec(*command)
        await until(lambda: received(path, SIZE) >= SIZE * 0.5)
        process.kill()
        await process.wait()
    else:
        task = asyncio.create_task(fetch(hub, path, advanced=lambda n: half.set() if n >= SIZE * 0.5 else None))
        await asyncio.wait_for(half.wait(), HUNG)
        task.cancel()
        await asyncio.wait([task])
    here = received(path, SIZE)
    assert here >= SIZE * 0.5
    hold.set()
    hub.faults.clear()
    hub.contents.clear()
    await fetch(hub, path, Transfers(fast=0.0))
    assert path.read_bytes() == DATA
    asked = [one.removeprefix("bytes=").split("-") for one in ranges(hub)]
    assert sum(int(end or SIZE - 1) + 1 - int(start or 0) for start, end in asked) <= SIZE - here


def journal(path: Path, file: RemoteFile) -> None:
    partial = PartialFile(path, file)
    partial.write(20, [b"c" * 10])
    partial.close()


@pytest.mark.parametrize("change", ["none", "seal", "size", "cut", "garbage"])
def test_the_list_of_ranges_on_disk_is_checked(tmp_path: Path, change: str) -> None:
    file, path = RemoteFile("x", "https://x.example/", 100, sha256(b"x")), tmp_path / "x"
    journal(path, file)
    written = path.read_bytes()
    match change:
        case "seal":
            path.write_bytes(written.replace(b"[20,30]", b"[20,31]"))
        case "size":
            file = RemoteFile("x", file.url, 90, file.digest)
        case "cut":
            path.write_bytes(written[:110])
        case "garbage":
            path.write_bytes(os.urandom(len(written)))
    partial = PartialFile(path, file)
    expected = [ByteRange(0, 20), ByteRange(30, 100)] if change == "none" else [ByteRange(0, file.size)]
    assert partial.gaps() == expected
    partial.close()


def test_ranges_in_any_order_are_hashed_as_one_file(tmp_path: Path) -> None:
    data = os.urandom(100_000)
    file, path = RemoteFile("x", "https://x.example/", len(data), sha256(data)), tmp_path / "x"
    cuts = sorted(random.Random(2).sample(range(1, len(data)), 50))
    parts = list(zip([0, *cuts], [*cuts, len(data)], strict=True))
    random.Random(3).shuffle(parts)
    for half in (parts[:25], parts[25:]):
        partial = PartialFile(path, file)  # the second time, as after a restart
        partial.read_through(stop=_never())
        for start, end in half:
            partial.write(start, [data[start : (start + end) // 2], data[(start + end) // 2 : end]])
        if half is parts[25:] or not partial.gaps():
            partial.finish(_never())
            assert (partial.gaps(), partial.digest) == ([], file.digest)
        partial.close()
    assert path.read_bytes() == data


def _never() -> threading.Event:
    return threading.Event()


async def test_a_rate_is_kept_over_all_downloads(hub: Hub, tmp_path: Path) -> None:
    now, slept = 0.0, 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now, slept
        now, slept = now + seconds, slept + seconds

    transfers = Transfers(rate=1 << 20, clock=lambda: now, pause=sleep)
    async with asyncio.TaskGroup() as group:
        for number in range(2):
            group.create_task(fetch(hub, tmp_path / str(number), transfers))
    assert slept == pytest.approx(2 * SIZE / (1 << 20), rel=0.05)


async def test_an_error_in_a_further_connection_is_the_first_ones_to_judge(tmp_path: Path) -> None:
    """A mock transport has no connection of its own to read from."""
    asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        return httpx.Response(500)

    file = RemoteFile("x", "https://93.184.216.34/x", SIZE, sha256(DATA))
    async with new_client(file.url, transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(SourceFailed, match="answered 500"):
            await Downloader(client, {}, pause=at_once).fetch(file, tmp_path / "x", lambda _: None, eager())
    assert asked == 5
