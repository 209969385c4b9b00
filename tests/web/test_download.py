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


@pytest.mark.parametrize(
    ("rate", "beside", "busy"),
    [(1 << 20, 1 << 30, False), (None, 1 << 20, True), (1 << 20, 1 << 21, True), (1 << 21, 1 << 20, True)],
)
async def test_a_rate_is_kept_over_all_downloads(
    hub: Hub, tmp_path: Path, rate: int | None, beside: int, busy: bool
) -> None:
    """Also one that holds while the daemon answers: downloads come to their end however long that is."""
    now, slept = 0.0, 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now, slept
        now, slept = now + seconds, slept + seconds

    transfers = Transfers(rate=rate, beside=beside, busy=lambda: busy, settle=0.0, clock=lambda: now, pause=sleep)
    async with asyncio.TaskGroup() as group:
        for number in range(2):
            group.create_task(fetch(hub, tmp_path / str(number), transfers))
    assert slept == pytest.approx(2 * SIZE / (1 << 20), rel=0.05)
    assert ranges(hub) == ["", ""]  # no further connections: it is not the source that is slow


async def test_a_download_is_held_back_only_while_the_daemon_answers(hub: Hub, tmp_path: Path) -> None:
    now, slept, here = 0.0, 0.0, 0

    async def sleep(seconds: float) -> None:
        nonlocal now, slept
        now, slept = now + seconds, slept + seconds

    def advanced(current: int) -> None:
        nonlocal here
        here = current

    answers = range(SIZE // 4, SIZE // 2)
    transfers = Transfers(beside=1 << 20, busy=lambda: here in answers, fast=0.0, clock=lambda: now, pause=sleep)
    await fetch(hub, tmp_path / "x", transfers, advanced)
    assert 0 < slept < 0.75 * SIZE / (1 << 20)  # what has come is told a few MiB later


async def test_what_a_limit_held_back_did_not_come_slowly(hub: Hub, tmp_path: Path) -> None:
    """The daemon answers for a moment, and its limit holds the download back beyond that."""
    now, here, over = 0.0, 0, False
    during: list[int] = []

    def advanced(current: int) -> None:
        nonlocal here
        here = current

    async def sleep(seconds: float) -> None:
        nonlocal now, over
        over, before = True, len(hub.contents)
        transfers.fast = float("inf")  # from here on a further one would be welcome
        for _ in range(200):  # as many chances to open one
            await asyncio.sleep(0)
        during.append(len(hub.contents) - before)
        now += seconds

    hold = asyncio.Event()
    hub.faults.append(Fault(hold=hold))
    transfers = Transfers(
        beside=1 << 20, busy=lambda: here > 0 and not over, fast=0.0, settle=0.0, clock=lambda: now, pause=sleep
    )
    task = asyncio.create_task(fetch(hub, tmp_path / "x", transfers, advanced))
    await until(lambda: len(hub.contents) > 1)  # no limit holds any more
    hold.set()
    await task
    assert (tmp_path / "x").read_bytes() == DATA
    assert during == [0]


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


@pytest.mark.parametrize("announced", ["old", "new"])
async def test_a_file_that_changes_between_ranges_is_never_a_mixture(hub: Hub, tmp_path: Path, announced: str) -> None:
    """One size, other bytes: ranges of both come, and only the digest tells."""
    other = random.Random(2).randbytes(SIZE)
    expected = {"old": DATA, "new": other}[announced]
    served, hold = {"now": DATA}, asyncio.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        asked = _asked(request)
        data, served["now"] = served["now"], other
        headers = {"Content-Range": f"bytes {asked.start}-{asked.end - 1}/{SIZE}", "ETag": sha256(data)}
        body = _held(data[asked.start : asked.end], hold if data is DATA else None)
        partly = "Range" in request.headers
        return httpx.Response(206 if partly else 200, headers=headers if partly else {}, content=body)

    def advanced(current: int) -> None:
        if current >= SIZE * 0.6:
            hold.set()

    file = RemoteFile("x", "https://93.184.216.34/x", SIZE, sha256(expected))
    async with new_client(file.url, transport=httpx.MockTransport(answer)) as client, asyncio.timeout(HUNG):
        fetching = Downloader(client, {}, pause=at_once).fetch(file, tmp_path / "x", advanced, eager())
        if announced == "new":
            await fetching
            assert (tmp_path / "x").read_bytes() == other
        else:  # it will not come again
            with pytest.raises(SourceFailed, match="damaged twice"):
                await fetching
            assert not (tmp_path / "x").exists()


def _asked(request: httpx.Request) -> ByteRange:
    start, _, end = request.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
    return ByteRange(int(start), int(end) + 1 if end else SIZE)


async def _held(data: bytes, hold: asyncio.Event | None) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1 << 20):
        if hold is not None and start >= len(data) // 2:
            await hold.wait()
        yield data[start : start + (1 << 20)]


@pytest.mark.parametrize("liar", ["more", "fewer", "elsewhere", "backwards", "no range", "unknown size"])
async def test_an_answer_that_is_not_the_range_asked_for(tmp_path: Path, liar: str) -> None:
    """Every answer to a range lies in its way; a whole file comes as it is."""
    first, most = [True], [0]

    def answer(request: httpx.Request) -> httpx.Response:
        start, end = _asked(request)
        if "Range" not in request.headers:
            body = DATA[: 5 << 20] if first[0] else DATA
            first[0] = False
            return httpx.Response(200, content=_held(body, None))
        told = f"bytes {start}-{end - 1}/{SIZE}"
        match liar:
            case "more":
                body = DATA[start : end + (1 << 20)] + b"x" * (1 << 20)
            case "fewer":
                body = DATA[start : start + (end - start) // 2 + (1 << 20)]
            case "elsewhere":
                told, body = f"bytes {start + 7}-{end - 1}/{SIZE}", DATA[start + 7 : end]
            case "backwards":
                told, body = f"bytes {start}-{max(start - 9, 0)}/{SIZE}", DATA[start:end]
            case "no range":
                told, body = "", DATA[start:end]
            case _:
                told, body = f"bytes {start}-{end - 1}/*", DATA[start:end]
        return httpx.Response(206, headers={"Content-Range": told} if told else {}, content=_held(body, None))

    def advanced(current: int) -> None:
        most[0] = max(most[0], current)

    file = RemoteFile("x", "https://93.184.216.34/x", SIZE, sha256(DATA))
    async with new_client(file.url, transport=httpx.MockTransport(answer)) as client, asyncio.timeout(HUNG):
        await Downloader(client, {}, pause=at_once).fetch(file, tmp_path / "x", advanced, eager())
    assert (tmp_path / "x").read_bytes() == DATA
    assert most == [SIZE]


async def test_no_connection_is_opened_while_the_server_asks_for_a_pause(tmp_path: Path) -> None:
    asked, during = [0], []
    transfers = Transfers(fast=0.0, settle=0.0)

    def answer(request: httpx.Request) -> httpx.Response:
        asked[0] += 1
        start, end = _asked(request)
        if asked[0] == 1:
            return httpx.Response(200, content=_held(DATA[: 4 << 20], None))
        if asked[0] == 2:
            transfers.fast = float("inf")  # from here on a further one would be welcome
            return httpx.Response(429, headers={"Retry-After": "7"})
        told = f"bytes {start}-{end - 1}/{SIZE}"
        return httpx.Response(206, headers={"Content-Range": told}, content=_held(DATA[start:end], None))

    async def pause(seconds: float) -> None:
        before = asked[0]
        for _ in range(200 if seconds == 7 else 0):  # as many chances to open one
            await asyncio.sleep(0)
        during.append((seconds, asked[0] - before))

    file = RemoteFile("x", "https://93.184.216.34/x", SIZE, sha256(DATA))
    async with new_client(file.url, transport=httpx.MockTransport(answer)) as client, asyncio.timeout(HUNG):
        await Downloader(client, {}, pause=pause).fetch(file, tmp_path / "x", lambda _: None, transfers)
    assert (tmp_path / "x").read_bytes() == DATA
    assert (7.0, 0) in during


@pytest.mark.parametrize("moment", ["opening", "closing"])
async def test_a_download_that_is_cancelled_while_threads_are_busy_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The thread is in the middle of it, or has not begun, when the download is cancelled."""
    reached, go_on = asyncio.Event(), threading.Event()
    loop, opened, closed = asyncio.get_running_loop(), [], []
    real_open, real_close = PartialFile.__init__, PartialFile.close

    def held() -> None:
        loop.call_soon_threadsafe(reached.set)
        assert go_on.wait(HUNG)

    def opening(self: PartialFile, path: Path, file: RemoteFile) -> None:
        real_open(self, path, file)
        opened.append(self)
        if moment == "opening":
            held()

    def closing(self: PartialFile) -> None:
        if moment == "closing":
            held()
        real_close(self)
        closed.append(self)

    monkeypatch.setattr(PartialFile, "__init__", opening)
    monkeypatch.setattr(PartialFile, "close", closing)
    file = RemoteFile("x", "https://93.184.216.34/x", 4, sha256(b"GGUF"))
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=b"GGUF"))
    async with new_client(file.url, transport=transport) as client, asyncio.timeout(HUNG):
        task = asyncio.create_task(Downloader(client, {}).fetch(file, tmp_path / "x", lambda _: None))
        await reached.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait([task])
    assert task.cancelled()
    assert opened == closed != []


async def test_no_stream_is_left_to_the_garbage_collector(hub: Hub, tmp_path: Path) -> None:
    """Python would close it in a task of its own, some time later."""
    left: list[str] = []
    usual = sys.get_asyncgen_hooks()

    def dropped(generator: object) -> None:
        left.append(getattr(generator, "__qualname__", ""))
        if usual.finalizer is not None:
            usual.finalizer(generator)  # type: ignore[arg-type]

    half = asyncio.Event()
    sys.set_asyncgen_hooks(finalizer=dropped)
    try:
        await fetch(hub, tmp_path / "x")
        for fault in (Fault(cut=9 << 20), Fault(hold=asyncio.Event())):
            hub.faults.append(fault)
        task = asyncio.create_task(fetch(hub, tmp_path / "y", advanced=lambda n: half.set() if n > SIZE / 3 else None))
        await half.wait()
        task.cancel()
        await asyncio.wait([task])
    finally:
        sys.set_asyncgen_hooks(*usual)
    assert "body_of" not in left  # httpx has some of its own


def test_a_kill_or_a_power_cut_at_any_moment_leaves_only_ranges_that_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each call of the system, the file is read as the next daemon would read it: what it counts as here is what
    came, and, where a list says so, was on the disk before the list was written."""
    size = 12 << 20
    data = random.Random(4).randbytes(size)
    file, path = RemoteFile("x", "https://x.example/", size, sha256(data)), tmp_path / "x"
    synced, looks = [b""], [0]

    def looked(call: Callable[..., int]) -> Callable[..., int]:
        def wrapped(*arguments: object) -> int:
            result = call(*arguments)
            if call.__name__ == "fdatasync":
                synced[0] = path.read_bytes()[:size]
            looks[0] += 1
            other = tmp_path / "other"
            other.write_bytes(path.read_bytes())
            found = PartialFile(other, file)
            here, start = [], 0
            for gap in [*found.gaps(), ByteRange(size, size)]:
                here.append(ByteRange(start, gap.start))
                start = gap.end
            os.close(found._descriptor)
            for known in here:
                assert path.read_bytes()[known.start : known.end] == data[known.start : known.end]
                if path.stat().st_size > size:
                    assert synced[0][known.start : known.end] == data[known.start : known.end]
            return result

        return wrapped

    for name in ("pwritev", "pwrite", "fdatasync"):
        monkeypatch.setattr(os, name, looked(getattr(os, name)))
    partial = PartialFile(path, file)
    parts = [ByteRange(start, start + (1 << 19)) for start in range(0, size, 1 << 19)]
    for start, end in (*parts[:3], *random.Random(5).sample(parts[3:], len(parts) - 4)):
        partial.write(start, [data[start:end]])
    monkeypatch.undo()
    assert looks[0] > len(parts)
    assert received(path, size) > size // 2
    partial.close()


def test_what_follows_when_the_gaps_are_closed_is_listed_too(tmp_path: Path) -> None:
    size, step = 32 << 20, 1 << 20
    file, path = RemoteFile("x", "https://x.example/", size, sha256(b"")), tmp_path / "x"
    partial = PartialFile(path, file)
    partial.write(step, [bytes(step)])
    for start in (0, *range(2 * step, 20 * step, step)):
        partial.write(start, [bytes(step)])
    assert received(path, size) >= 19 * step  # of a killed daemon
    partial.close()
    assert received(path, size) == 20 * step
