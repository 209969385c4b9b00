"""What the Puller promises whatever the source, with a source that does what the test says."""

import asyncio
import errno
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from modelrunner.errors import InsufficientDisk, InvalidModel, ModelNotFound, SourceFailed, StorageFailed
from modelrunner.pull import Fetched, Puller, Report, Source
from modelrunner.store import Store
from modelrunner.types import WorkProgress
from tests.pull.models import gguf

Step = Callable[[Path, Report], Awaitable[Fetched]]


class ScriptedSource(Source):
    """Each fetch takes the next of `steps`; `now` is what `revision` says or raises."""

    def __init__(self, *steps: Step, now: str | Exception | None = None) -> None:
        self.steps = list(steps)
        self.now = now
        self.texts: list[str] = []

    def claims(self, text: str) -> bool:
        return text.lower().startswith("pypi:")

    async def revision(self, text: str, folder: Path, token: str | None, *, trust: bool = False) -> str | None:
        if isinstance(self.now, Exception):
            raise self.now
        return self.now

    async def fetch(
        self, text: str, folder: Path, report: Report, token: str | None, *, trust: bool = False
    ) -> Fetched:
        self.texts.append(text)
        return await self.steps.pop(0)(folder, report)


def deliver(data: bytes, revision: str | None = None) -> Step:
    async def step(folder: Path, report: Report) -> Fetched:
        (folder / "file").write_bytes(data)
        return Fetched({"model.gguf": folder / "file"}, revision=revision)

    return step


def fail(error: Exception) -> Step:
    async def step(folder: Path, report: Report) -> Fetched:
        (folder / "kept").write_bytes(b"half")
        raise error

    return step


def ignore(line: WorkProgress) -> None:
    """Nobody looks."""


def partial(store: Store) -> list[str]:
    return [path.name for path in store.partial.rglob("*") if path.is_file()]


async def test_joiners_see_the_progress_so_far_and_the_rate(store: Store) -> None:
    told, go_on = asyncio.Event(), asyncio.Event()

    async def step(folder: Path, report: Report) -> Fetched:
        for current in (100, 300):
            report(WorkProgress("Downloading", total=1000, current=current, phase="downloading"))
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

    async def slow_to_stop(folder: Path, report: Report) -> Fetched:
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
    assert (await coming).tags == ["pypi:x"]
    await asyncio.wait([leaving])
    assert leaving.cancelled()


async def test_all_callers_get_the_failure_and_the_next_one_a_new_try(store: Store) -> None:
    puller = Puller(store, [ScriptedSource(fail(SourceFailed("cut")), deliver(gguf()))])
    results = await asyncio.gather(*(puller.pull("pypi:x", ignore) for _ in range(3)), return_exceptions=True)
    assert [str(result) for result in results] == ["cut"] * 3
    assert partial(store) == ["kept"]
    assert (await puller.pull("pypi:x", ignore)).tags == ["pypi:x"]
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
    assert (await puller.pull("pypi:x", ignore, name="mine:v1")).tags == ["mine:v1"]


async def test_an_unchanged_revision_is_not_fetched_even_by_the_next_daemon(store: Store) -> None:
    source = ScriptedSource(deliver(gguf(), "1"), now="1")
    first = await Puller(store, [source]).pull("pypi:x", ignore)
    seen: list[WorkProgress] = []
    assert await Puller(store, [source]).pull("pypi:x", seen.append) == first
    assert [line.message for line in seen] == ["Using cached model"]


async def test_a_new_revision_is_fetched_and_takes_the_name(store: Store) -> None:
    source = ScriptedSource(deliver(gguf(), "1"), deliver(gguf(seed=2), "2"), now="2")
    puller = Puller(store, [source])
    first = await puller.pull("pypi:x", ignore)
    second = await puller.pull("pypi:x", ignore)
    assert store.get("pypi:x") == second != first


@pytest.mark.parametrize("error", [SourceFailed("no network"), ModelNotFound("withdrawn")])
async def test_a_source_that_cannot_be_asked_leaves_the_model_usable(store: Store, error: Exception) -> None:
    puller = Puller(store, [ScriptedSource(deliver(gguf(), "1"), now=error)])
    first = await puller.pull("pypi:x", ignore)
    seen: list[WorkProgress] = []
    assert await puller.pull("pypi:x", seen.append) == first
    assert (seen[0].warning, seen[0].message) == (True, f"{error}; the model that is here stays in use")


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
    with pytest.raises(ModelNotFound, match="pull it as"):
        await Puller(store).pull("smollm2", ignore)
