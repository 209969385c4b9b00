"""What the Puller promises whatever the source, with a source that does what the test says."""

import asyncio
import errno
import hashlib
import itertools
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from modelrunner.errors import InsufficientDisk, InvalidModel, ModelNotFound, SourceFailed, StorageFailed
from modelrunner.progress import ProgressReport, WorkProgress
from modelrunner.pull import Context, FetchResult, Puller, PullSpec, Source
from modelrunner.store import Store
from tests.pull.models import gguf
from tests.waiting import HUNG

Step = Callable[[Path, ProgressReport], Awaitable[FetchResult]]


class ScriptedSource(Source):
    """Each fetch takes the next of `steps`; `now` is what `revision` says or raises."""

    def __init__(self, *steps: Step, now: str | Exception | None = None) -> None:
        self.steps = list(steps)
        self.now = now
        self.texts: list[str] = []

    def claims(self, text: str) -> bool:
        return text.lower().startswith("pypi:")

    async def revision(self, wanted: PullSpec) -> str | None:
        if isinstance(self.now, Exception):
            raise self.now
        return self.now

    async def fetch(self, wanted: PullSpec, context: Context) -> FetchResult:
        self.texts.append(wanted.text)
        return await self.steps.pop(0)(context.folder, context.report)


def deliver(data: bytes, revision: str | None = None) -> Step:
    async def step(folder: Path, report: ProgressReport) -> FetchResult:
        (folder / "file").write_bytes(data)
        return FetchResult({"model.gguf": folder / "file"}, revision=revision)

    return step


def fail(error: Exception) -> Step:
    async def step(folder: Path, report: ProgressReport) -> FetchResult:
        (folder / "kept").write_bytes(b"half")
        raise error

    return step


def ignore(line: WorkProgress) -> None:
    """Nobody looks."""


def partial(store: Store) -> list[str]:
    return [path.name for path in store.partial.rglob("*") if path.is_file()]


async def test_joiners_see_the_progress_so_far_and_the_rate(store: Store) -> None:
    told, go_on = asyncio.Event(), asyncio.Event()

    async def step(folder: Path, report: ProgressReport) -> FetchResult:
        for current in (100, 300):
            report(WorkProgress("Downloading", "downloading", 1000, current))
        told.set()
        await go_on.wait()
        return await deliver(gguf())(folder, report)

    puller = Puller(store, [ScriptedSource(step)], clock=itertools.count(0.0, 2.0).__next__)
    first = asyncio.create_task(puller.pull("pypi:a-model", ignore))
    await told.wait()
    seen: list[WorkProgress] = []
    second = asyncio.create_task(puller.pull("PyPI:A_Model", seen.append))
    await asyncio.sleep(0)
    assert [(line.phase, line.current, line.total, line.rate) for line in seen] == [("downloading", 300, 1000, 100.0)]
    go_on.set()
    assert await first == await second


async def test_a_caller_who_comes_while_the_download_is_stopping_gets_a_new_one(store: Store) -> None:
    began, stopping, stopped = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow_to_stop(folder: Path, report: ProgressReport) -> FetchResult:
        began.set()
        try:
            return await asyncio.Future()
        finally:
            stopping.set()
            await stopped.wait()

    source = ScriptedSource(slow_to_stop, deliver(gguf()))
    puller = Puller(store, [source])
    leaving = asyncio.create_task(puller.pull("pypi:x", ignore))
    await began.wait()
    leaving.cancel()
    await stopping.wait()
    coming = asyncio.create_task(puller.pull("pypi:x", ignore))
    await asyncio.sleep(0)
    assert len(source.texts) == 1
    stopped.set()
    assert (await coming).name == "pypi:x"
    await asyncio.wait([leaving])
    assert leaving.cancelled()


async def test_all_callers_get_the_failure_and_the_next_one_a_new_try(store: Store) -> None:
    puller = Puller(store, [ScriptedSource(fail(SourceFailed("cut")), deliver(gguf()))])
    results = await asyncio.gather(*(puller.pull("pypi:x", ignore) for _ in range(3)), return_exceptions=True)
    assert [str(result) for result in results] == ["cut"] * 3
    assert partial(store) == ["kept"]
    assert (await puller.pull("pypi:x", ignore)).name == "pypi:x"
    assert partial(store) == []


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.ENOSPC, InsufficientDisk), (errno.EDQUOT, InsufficientDisk), (errno.EROFS, StorageFailed)],
)
async def test_a_disk_that_fails_midway(store: Store, number: int, expected: type[Exception]) -> None:
    puller = Puller(store, [ScriptedSource(deliver(gguf()), fail(OSError(number, "as the kernel says")))])
    await puller.pull("pypi:before", ignore)
    with pytest.raises(expected):
        await puller.pull("pypi:x", ignore)
    assert [model.tags for model in store.list()] == [["pypi:before"]]
    assert partial(store) == ["kept"]


async def test_what_is_no_model_is_not_kept(store: Store) -> None:
    puller = Puller(store, [ScriptedSource(deliver(b"GGUF and then nothing of the kind"))])
    with pytest.raises(InvalidModel):
        await puller.pull("pypi:x", ignore)
    assert (store.list(), partial(store)) == ([], [])


async def test_a_name_of_the_callers_choice(store: Store) -> None:
    puller = Puller(store, [ScriptedSource(deliver(gguf()))])
    assert (await puller.pull("pypi:x", ignore, name="mine:v1")).name == "mine:v1"


async def test_an_unchanged_revision_is_not_fetched_even_by_the_next_daemon(store: Store) -> None:
    source = ScriptedSource(deliver(gguf(), "1"), now="1")
    first = await Puller(store, [source]).pull("pypi:x", ignore)
    seen: list[WorkProgress] = []
    assert await Puller(store, [source]).pull("pypi:x", seen.append) == replace(first, cached=True)
    assert [line.message for line in seen] == ["Using cached model"]


async def test_a_new_revision_is_fetched_and_takes_the_name(store: Store) -> None:
    source = ScriptedSource(deliver(gguf(), "1"), deliver(gguf(seed=2), "2"), now="2")
    puller = Puller(store, [source])
    first = await puller.pull("pypi:x", ignore)
    second = await puller.pull("pypi:x", ignore)
    assert store.get("pypi:x").id == second.id != first.id


@pytest.mark.parametrize("error", [SourceFailed("no network"), ModelNotFound("withdrawn")])
async def test_a_source_that_cannot_be_asked_leaves_the_model_usable(store: Store, error: Exception) -> None:
    puller = Puller(store, [ScriptedSource(deliver(gguf(), "1"), now=error)])
    first = await puller.pull("pypi:x", ignore)
    seen: list[WorkProgress] = []
    assert await puller.pull("pypi:x", seen.append) == replace(first, cached=True)
    assert (seen[0].warning, seen[0].message) == (True, f"{error}; the model in the store stays in use")


async def test_a_name_that_now_means_another_model_is_fetched(store: Store) -> None:
    source = ScriptedSource(deliver(gguf(), "1"), deliver(gguf(seed=2)), deliver(gguf(), "1"), now="1")
    puller = Puller(store, [source])
    first = await puller.pull("pypi:x", ignore)
    await puller.pull("pypi:other", ignore)
    store.tag("pypi:other", "pypi:x")
    assert (await puller.pull("pypi:x", ignore)).id == first.id
    assert len(source.texts) == 3


@pytest.mark.parametrize("garbage", [b"", b"[]", b'{"pypi:x": {"origin": 1}}', b"\xff\xfe"])
async def test_a_lost_journal_costs_a_download_and_nothing_else(store: Store, garbage: bytes) -> None:
    source = ScriptedSource(deliver(gguf(), "1"), deliver(gguf(), "1"), now="1")
    first = await Puller(store, [source]).pull("pypi:x", ignore)
    (journal,) = (store.data / "state").iterdir()
    journal.write_bytes(garbage)
    assert await Puller(store, [source]).pull("pypi:x", ignore) == first
    assert len(source.texts) == 2


async def test_a_text_that_no_source_claims(store: Store) -> None:
    with pytest.raises(ModelNotFound, match="not a name of any source"):
        await Puller(store).pull("smollm2", ignore)


def blob_of(store: Store, id: str) -> Path:
    """The stored file of a model of one file."""
    return store.data / "blobs" / "sha256" / hashlib.sha256(store.bundle(id).model_file.read_bytes()).hexdigest()


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    os.chmod(path, 0o600)
    match how:
        case "missing":
            path.unlink()
        case "short":
            os.truncate(path, len(data) // 2)
        case "flipped":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize(("how", "verify"), [("missing", False), ("short", False), ("flipped", True)])
async def test_pulling_again_heals_a_damaged_model(store: Store, how: str, verify: bool) -> None:
    source = ScriptedSource(deliver(gguf(), "1"), deliver(gguf(), "1"), now="1")
    puller = Puller(store, [source])
    first = await puller.pull("pypi:x", ignore)
    damage(blob_of(store, first.id), how)
    seen: list[WorkProgress] = []
    healed = await puller.pull("pypi:x", seen.append, verify=verify)
    assert healed == first
    assert any(line.warning and "damaged" in line.message for line in seen)
    assert store.verify(first.id) == ()
    assert store.bundle(first.id).model_file.read_bytes() == gguf()
    assert (await puller.pull("pypi:x", ignore, verify=True)).cached


async def test_who_wants_every_byte_read_does_not_join_one_who_does_not(store: Store) -> None:
    go_on = asyncio.Event()

    async def step(folder: Path, report: ProgressReport) -> FetchResult:
        await go_on.wait()
        return await deliver(gguf(), "1")(folder, report)

    puller = Puller(store, [ScriptedSource(step, now="1")])
    plain = asyncio.create_task(puller.pull("pypi:x", ignore))
    thorough = asyncio.create_task(puller.pull("pypi:x", ignore, verify=True))
    await asyncio.sleep(0)
    go_on.set()
    assert (await plain, await thorough) == (plain.result(), replace(plain.result(), cached=True))


@pytest.mark.parametrize("error", [KeyError("siblings"), OverflowError("int too large"), RecursionError(), TypeError()])
async def test_whatever_a_source_does_is_answered_in_words_and_cleared(store: Store, error: Exception) -> None:
    puller = Puller(store, [ScriptedSource(fail(error), deliver(gguf()))])
    with pytest.raises(SourceFailed, match="cannot be read"):
        await puller.pull("pypi:x", ignore)
    assert list(store.partial.iterdir()) == []
    await puller.pull("pypi:x", ignore)


async def test_a_failed_pull_of_which_nothing_came_leaves_no_folder(store: Store) -> None:
    async def step(folder: Path, report: ProgressReport) -> FetchResult:
        (folder / "empty").write_bytes(b"")
        raise SourceFailed("no network")

    puller = Puller(store, [ScriptedSource(step)])
    with pytest.raises(SourceFailed):
        await puller.pull("pypi:x", ignore)
    assert list(store.partial.iterdir()) == []


async def test_what_a_pull_left_can_be_pruned_while_another_pull_runs(store: Store) -> None:
    async def forever(folder: Path, report: ProgressReport) -> FetchResult:
        (folder / "kept").write_bytes(b"more")
        running.set()
        return await asyncio.Future()

    running = asyncio.Event()
    puller = Puller(store, [ScriptedSource(fail(SourceFailed("cut")), forever)])
    with pytest.raises(SourceFailed):
        await puller.pull("pypi:x", ignore)
    going = asyncio.create_task(puller.pull("pypi:y", ignore))
    await running.wait()
    (pruned,) = await puller.prune()
    assert (pruned.kind, pruned.size) == ("unfinished download", len(b"half"))
    assert await puller.prune() == ()
    assert partial(store) == ["kept"]  # of the running one
    going.cancel()
    await asyncio.wait([going])
    assert len(await puller.prune()) == 1


async def test_what_a_pull_left_goes_a_week_later(store: Store) -> None:
    with pytest.raises(SourceFailed):
        await Puller(store, [ScriptedSource(fail(SourceFailed("cut")))]).pull("pypi:x", ignore)
    Store(store.data)
    assert partial(store) == ["kept"]
    (folder,) = store.partial.iterdir()
    os.utime(folder, (0, 0))
    Store(store.data)
    assert partial(store) == ["kept"]  # the file is new
    for path in (folder, folder / "kept"):
        os.utime(path, (0, 0))
    Store(store.data)
    assert list(store.partial.iterdir()) == []


async def test_a_pasted_address_is_understood(store: Store) -> None:
    class Hub(ScriptedSource):
        def claims(self, text: str) -> bool:
            return text.startswith(("hf.co/", "huggingface.co/"))

    puller = Puller(store, [Hub(deliver(gguf()))])
    assert (await puller.pull("https://huggingface.co/Org/Repo/tree/main?x=1", ignore)).name == "hf.co/org/repo"


async def test_a_pull_that_is_cancelled_does_not_read_its_files_to_the_end(store: Store) -> None:
    """To hash this file would take hours. What came stays for the next attempt, and no model is visible."""

    async def huge(folder: Path, report: ProgressReport) -> FetchResult:
        (folder / "file").write_bytes(gguf())
        os.truncate(folder / "file", 1 << 40)
        return FetchResult({"model.gguf": folder / "file"})

    storing = asyncio.Event()

    def watch(line: WorkProgress) -> None:
        if line.phase == "storing":
            storing.set()

    pulling = asyncio.create_task(Puller(store, [ScriptedSource(huge)]).pull("pypi:big", watch))
    async with asyncio.timeout(HUNG):
        await storing.wait()
        pulling.cancel()
        await asyncio.wait([pulling])
    assert pulling.cancelled()
    assert store.list() == []
    assert len(list(store.partial.glob("*/file"))) == 1


async def test_a_file_that_goes_with_another_model_is_fetched(store: Store) -> None:
    """Another client removes the model that had it, after the source has looked and before this model is stored."""
    data = gguf(seed=5)
    other = store.create({"m.gguf": store.ingest(written(store, data))}, "other")
    sha256 = hashlib.sha256(data).hexdigest()

    async def shared(folder: Path, report: ProgressReport) -> FetchResult:
        store.remove(other.id)
        return FetchResult({}, stored={"model.gguf": sha256})

    source = ScriptedSource(shared, deliver(data))
    pulled = await Puller(store, [source]).pull("pypi:mine", ignore)
    assert store.verify(pulled.id) == ()
    assert len(source.texts) == 2


def written(store: Store, data: bytes) -> Path:
    path = store.partial / "written.gguf"
    path.write_bytes(data)
    return path
