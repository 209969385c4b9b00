"""Folders of models on two file systems: nothing is linked from one to the other, and one of them may fail."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from modelrunner.errors import InsufficientDisk, SourceFailed, StorageFailed
from modelrunner.progress import ProgressReport, WorkProgress
from modelrunner.pull import FetchResult, Puller
from modelrunner.pull.file import LocalFiles
from modelrunner.pull.huggingface import HuggingFaceSource
from modelrunner.pull.loading import LoadOptions
from modelrunner.pull.uploads import UploadedFiles, Uploads
from modelrunner.store import Store
from modelrunner.store.layout import archive_of
from tests.pull.disks import asked_on_this_thread, die, fill
from tests.pull.hub import Fault, Hub, Repository, sha256
from tests.pull.models import gguf
from tests.pull.test_hostile import at_once
from tests.pull.test_puller import ScriptedSource, deliver, ignore
from tests.waiting import HUNG

SIZE = 2 << 20
MODEL = gguf(SIZE)
NAME, OTHER = "hf.co/Org/Tiny-GGUF", "hf.co/Org/Same-GGUF"


@pytest.fixture
def store(tmp_path: Path, other_disk: Path) -> Iterator[Store]:
    """The other disk comes first."""
    store = Store(tmp_path / "data", None, [other_disk])
    yield store
    store.close()


@pytest.fixture
def puller(store: Store, hub: Hub) -> Puller:
    hub.repositories["Org/Tiny-GGUF"] = Repository({"tiny-Q4_K_M.gguf": MODEL})
    hub.repositories["Org/Same-GGUF"] = Repository({"same-Q4_K_M.gguf": MODEL})
    return puller_of(store, hub)


def puller_of(store: Store, hub: Hub) -> Puller:
    uploads = Uploads(store)
    hugging = HuggingFaceSource(hub.endpoint, pause=at_once)
    return Puller(store, [hugging], uploads=uploads)


def waiting(folder: Path) -> list[str]:
    return [path.name for path in (folder / "partial").iterdir()]


def folder_of(store: Store, name: str) -> Path:
    return next(folder for folder in store.folders if store.bundle(name).directory.is_relative_to(folder))


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def upload(puller: Puller, data: bytes = MODEL) -> UploadedFiles:
    digest = f"sha256:{sha256(data)}"
    await puller.uploads.take(digest, pieces(data), len(data))
    return UploadedFiles.parse(puller.uploads, {"m.gguf": digest})


async def test_a_pull_into_each_file_system(puller: Puller, store: Store, hub: Hub, other_disk: Path) -> None:
    await puller.pull(NAME, ignore, folder=other_disk)
    first = store.bundle(NAME).model_file
    await puller.pull(OTHER, ignore, folder=store.data)  # what is here is copied and not fetched again
    second = max((store.data / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    assert first.stat().st_dev == other_disk.stat().st_dev != second.stat().st_dev == store.data.stat().st_dev
    assert first.read_bytes() == second.read_bytes() == MODEL
    assert hub.sent == len(MODEL)
    assert store.verify(NAME) == store.verify(OTHER) == ()
    assert waiting(other_disk) == waiting(store.data) == []


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("outwards", [True, False])
async def test_a_file_of_the_other_file_system(
    puller: Puller, store: Store, tmp_path: Path, other_disk: Path, linked: bool, outwards: bool
) -> None:
    source, target = (tmp_path, other_disk) if outwards else (other_disk, store.data)
    file = source / "m.gguf"
    file.write_bytes(MODEL)
    await puller.pull(LocalFiles(file, linked=linked), ignore, name="mine", folder=target)
    stored = store.bundle("mine").model_file
    assert stored.read_bytes() == file.read_bytes() == MODEL
    assert stored.stat().st_dev == target.stat().st_dev != file.stat().st_dev
    assert store.verify("mine") == ()


async def test_what_was_sent_waits_on_another_file_system_than_its_model(
    puller: Puller, store: Store, other_disk: Path
) -> None:
    origin = await upload(puller)
    assert waiting(other_disk) == [f"upload-{sha256(MODEL)}"]
    await puller.pull(origin, ignore, name="sent", folder=store.data)
    assert folder_of(store, "sent") == store.data
    assert store.bundle("sent").model_file.read_bytes() == MODEL
    assert waiting(other_disk) == waiting(store.data) == []


async def test_what_was_sent_is_found_in_any_folder(
    puller: Puller, store: Store, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = {other_disk}
    fill(monkeypatch, full)
    origin = await upload(puller)
    full.clear()
    assert (waiting(other_disk), waiting(store.data)) == ([], [f"upload-{sha256(MODEL)}"])
    assert await puller.uploads.has(f"sha256:{sha256(MODEL)}")
    await puller.pull(origin, ignore, name="sent")
    assert folder_of(store, "sent") == store.data  # where it is already
    assert waiting(store.data) == []


async def test_no_room_for_a_copy_is_told_before_it_is_made(
    puller: Puller, store: Store, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = await upload(puller)
    fill(monkeypatch, {store.data})
    with pytest.raises(InsufficientDisk, match=f"not enough room on the disk: needed {len(MODEL) * 105 // 100} bytes"):
        await puller.pull(origin, ignore, name="sent", folder=store.data)
    assert waiting(other_disk) == [f"upload-{sha256(MODEL)}"]
    assert waiting(store.data) == []


def huge(puller: Puller, folder: Path) -> UploadedFiles:
    """Something that was sent, which would take hours to read or to copy."""
    path = folder / "partial" / f"upload-{'a' * 64}"
    path.write_bytes(b"GGUF")
    os.truncate(path, 1 << 40)
    return UploadedFiles.parse(puller.uploads, {"m.gguf": f"sha256:{'a' * 64}"})


async def test_what_was_sent_is_kept_while_a_pull_takes_it_and_a_cancelled_one_stops(
    puller: Puller, store: Store, other_disk: Path
) -> None:
    origin, storing = huge(puller, other_disk), asyncio.Event()

    def watch(line: WorkProgress) -> None:
        if line.phase == "storing":
            storing.set()

    pulling = asyncio.create_task(puller.pull(origin, watch, name="sent", folder=store.data))
    async with asyncio.timeout(HUNG):
        await storing.wait()
        assert await puller.prune() == ()
        puller.uploads.drop(origin.sent)
        assert waiting(other_disk) == [f"upload-{'a' * 64}"]
        pulling.cancel()
        await asyncio.wait([pulling])
    assert pulling.cancelled()
    assert waiting(store.data) == []
    assert [leftover.path.parent.parent for leftover in await puller.prune()] == [other_disk]


async def test_who_waits_for_another_to_store_its_files_can_be_cancelled(
    puller: Puller, store: Store, other_disk: Path
) -> None:
    origin, pulls = huge(puller, other_disk), []
    async with asyncio.timeout(HUNG):
        for name in ("first", "second"):
            storing = asyncio.Event()

            def watch(line: WorkProgress, storing: asyncio.Event = storing) -> None:
                if line.phase == "storing":
                    storing.set()

            pulls.append(asyncio.create_task(puller.pull(origin, watch, name=name)))
            await storing.wait()
        for pull in reversed(pulls):
            assert not pull.done()
            pull.cancel()
            await asyncio.wait([pull])
    assert all(pull.cancelled() for pull in pulls)


def test_a_copy_that_is_stopped_leaves_nothing(store: Store, other_disk: Path) -> None:
    (other_disk / "partial/m").write_bytes(MODEL)
    blob, read = store.ingest(other_disk / "partial/m"), 0

    def stop(count: int) -> None:
        nonlocal read
        read += count
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        store.create({"m": blob}, "m", progress=stop, folder=store.data)
    assert 0 < read < len(MODEL)
    assert waiting(other_disk) == ["m"]
    assert waiting(store.data) == []


async def cut(puller: Puller, hub: Hub) -> None:
    """A pull that brings a half."""
    hub.faults.extend(Fault(cut=SIZE // 2 if first else 0) for first in (True, False, False, False, False, False))
    with pytest.raises(SourceFailed):
        await puller.pull(NAME, ignore)


async def test_a_pull_that_moves_on_leaves_nothing_behind(
    puller: Puller, store: Store, hub: Hub, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cut(puller, hub)
    assert waiting(other_disk) == [sha256(MODEL)]
    fill(monkeypatch, {other_disk})
    seen: list[WorkProgress] = []
    await puller.pull(NAME, seen.append)
    assert [line.message.endswith(f"; it goes to {store.data}") for line in seen if line.warning] == [True]
    assert folder_of(store, NAME) == store.data
    assert store.verify(NAME) == ()
    assert waiting(other_disk) == waiting(store.data) == []


async def test_what_has_come_stays_where_no_folder_has_room(
    puller: Puller, store: Store, hub: Hub, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cut(puller, hub)
    full = {other_disk, store.data}
    fill(monkeypatch, full)
    with pytest.raises(InsufficientDisk, match="not enough room"):
        await puller.pull(NAME, ignore)
    full.clear()
    await puller.pull(NAME, ignore)
    assert folder_of(store, NAME) == other_disk
    assert hub.sent == len(MODEL)


async def test_a_download_that_another_pull_uses_stays(
    puller: Puller, store: Store, hub: Hub, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = asyncio.Event()
    hub.faults.append(Fault(hold=hold))
    first = asyncio.create_task(puller.pull(NAME, ignore))
    await hub.held.wait()
    full = {other_disk}
    fill(monkeypatch, full)
    await puller.pull(OTHER, ignore)
    assert folder_of(store, OTHER) == store.data
    assert sha256(MODEL) in waiting(other_disk)
    full.clear()
    hold.set()
    assert (await first).name == "hf.co/org/tiny-gguf"
    assert store.verify(NAME) == ()
    assert waiting(other_disk) == []


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
async def test_a_disk_that_fails_passes_a_pull_on_to_the_next(
    store: Store, other_disk: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    async def dies(folder: Path, report: ProgressReport) -> FetchResult:
        die(monkeypatch, other_disk)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    if moment == "before":
        die(monkeypatch, other_disk)
    puller = Puller(store, [ScriptedSource(*([dies] if moment == "meanwhile" else []), deliver(gguf()))])
    seen: list[WorkProgress] = []
    await puller.pull("pypi:x", seen.append)
    monkeypatch.undo()
    warned = [line.message for line in seen if line.warning]
    assert len(warned) == (moment == "meanwhile")
    for message in warned:
        assert message.startswith(f"pulling pypi:x failed: Input/output error ({other_disk}")
        assert message.endswith(f"; it goes to {store.data}")
    assert folder_of(store, "pypi:x") == store.data


async def test_a_failure_of_the_source_is_not_tried_again_elsewhere(store: Store, other_disk: Path) -> None:
    async def fails(folder: Path, report: ProgressReport) -> FetchResult:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/elsewhere")

    source = ScriptedSource(fails, deliver(gguf()))
    with pytest.raises(StorageFailed, match=r"Input/output error \(/elsewhere\)"):
        await Puller(store, [source]).pull("pypi:x", ignore)
    assert len(source.texts) == 1


async def test_a_disk_that_fails_takes_nothing_that_is_sent(
    puller: Puller, store: Store, hub: Hub, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await puller.pull(NAME, ignore, folder=store.data)
    archive = b"".join(archive_of(store, NAME).pieces())
    store.remove(NAME)
    with monkeypatch.context() as patch:
        die(patch, other_disk)
        origin = await upload(puller)
        assert (await puller.pull(origin, ignore, name="sent")).name == "sent"
        store.remove("sent")
        loaded = await puller.load(pieces(archive), ignore, LoadOptions())
        assert [model.name for model in loaded] == ["hf.co/org/tiny-gguf"]
        die(patch, store.data)
        for work in (upload(puller), puller.load(pieces(archive), ignore, LoadOptions())):
            with pytest.raises(StorageFailed, match=r"no folder for models can be used: .*: Input/output"):
                await work
    assert folder_of(store, NAME) == store.data


async def test_the_event_loop_never_waits_for_a_disk(
    puller: Puller, store: Store, hub: Hub, tmp_path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await puller.pull(NAME, ignore)
    archive = b"".join(archive_of(store, NAME).pieces())
    store.remove(NAME)
    (tmp_path / "m.gguf").write_bytes(gguf(seed=1))
    with monkeypatch.context() as patch:
        asked = asked_on_this_thread(patch, store.data, other_disk)
        assert store.have(f"sha256:{sha256(MODEL)}") is None
        assert len(asked) == 2  # it would be noticed
        asked.clear()
        await puller.pull(NAME, ignore)
        await puller.pull(OTHER, ignore, folder=store.data)
        await puller.pull(LocalFiles(tmp_path / "m.gguf"), ignore, name="file")
        sent = gguf(seed=2)
        assert not await puller.uploads.has(f"sha256:{sha256(sent)}")
        await puller.pull(await upload(puller, sent), ignore, name="sent", folder=store.data)
        await puller.load(pieces(archive), ignore, LoadOptions("loaded"), len(archive))
        assert asked == []
