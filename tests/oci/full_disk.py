"""Run by test_full_disk.py with a small file system of its own: pulls while it fills up, or may not be written."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from aiohttp import web

from modelrunner.errors import InsufficientDisk, ModelRunnerError, StorageFailed
from tests.oci.conftest import Machine
from tests.oci.fake import FakeRegistry
from tests.oci.registry import digest
from tests.oci.test_pull import tiny
from tests.pull.models import gguf
from tests.pull.test_puller import ignore
from tests.store.full_disk import fill
from tests.store.samples import add_model

SIZE = 8 << 20
WEIGHTS = gguf(SIZE)


async def fault(machine: Machine, name: str) -> ModelRunnerError:
    try:
        await machine.puller.pull(name, ignore)
    except ModelRunnerError as error:
        return error
    raise AssertionError("it fitted after all")


def require_whole(machine: Machine, names: list[str]) -> None:
    assert [model.tags for model in Machine(machine.folder).store.list()] == [[name] for name in names]
    for name in names:
        assert machine.store.verify(name) == ()


async def filled_midway(root: Path, registry: FakeRegistry, share: float) -> None:
    """The registry fills the disk when it has sent this share of the weights."""
    machine, name = Machine(root / str(share)), f"{registry.host}/ai/tiny"
    add_model(machine.store, "kept", seed=1)
    add_model(machine.store, "doomed", seed=2)

    async def filling(request: web.Request) -> web.StreamResponse | None:
        if not request.path.endswith(digest(WEIGHTS)) or (root / "filler").exists():
            return None
        response = web.StreamResponse()
        response.content_length = len(WEIGHTS)
        await response.prepare(request)
        await response.write(WEIGHTS[: int(len(WEIGHTS) * share)])
        fill(root, "filler")
        await response.write(WEIGHTS[int(len(WEIGHTS) * share) :])
        return response

    registry.answers = [("GET .*blobs", filling)]
    error = await fault(machine, name)
    assert isinstance(error, InsufficientDisk), error
    assert "make room" in error.message or "modelrunner rm" in error.message, error
    require_whole(machine, ["kept", "doomed"])
    machine.store.remove("doomed")  # at zero free
    require_whole(machine, ["kept"])
    registry.answers, registry.seen = [], []
    (root / "filler").unlink()
    assert (await machine.puller.pull(name, ignore)).id == registry.models["ai/tiny"].id
    require_whole(machine, ["kept", name])
    assert list(machine.store.partial.iterdir()) == []
    machine.store.remove(name)


async def said_before(root: Path, registry: FakeRegistry) -> None:
    machine = Machine(root / "before")
    fill(root, "filler")
    os.truncate(root / "filler", (root / "filler").stat().st_size - SIZE // 2)
    registry.seen.clear()
    error = await fault(machine, f"{registry.host}/ai/tiny")
    assert isinstance(error, InsufficientDisk), error
    assert f"free {SIZE // 2} bytes" in error.message, error
    assert [path for _, path, _ in registry.seen if "/blobs/" in path] == []
    (root / "filler").unlink()


async def read_only(root: Path, registry: FakeRegistry) -> None:
    machine, name = Machine(root / "read-only"), f"{registry.host}/ai/tiny"
    add_model(machine.store, "kept", seed=1)
    await asyncio.to_thread(subprocess.check_call, ["mount", "-o", "remount,ro", root])
    error = await fault(machine, name)
    assert isinstance(error, StorageFailed), error
    assert "Read-only file system" in error.message, error
    assert (machine.store.list()[0].tags, machine.store.verify("kept")) == (["kept"], ())
    await asyncio.to_thread(subprocess.check_call, ["mount", "-o", "remount,rw", root])
    assert (await machine.puller.pull(name, ignore)).id == registry.models["ai/tiny"].id
    require_whole(machine, ["kept", name])


async def main(root: Path) -> None:
    async with FakeRegistry({"ai/tiny": tiny(SIZE)}).running() as registry:
        for share in (0.1, 0.5, 0.99):
            await filled_midway(root, registry, share)
        await said_before(root, registry)
        await read_only(root, registry)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
