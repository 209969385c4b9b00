"""A pull or a push that is killed or fails at any system call is wholly done or wholly absent, and the next one
succeeds."""

import shutil
from pathlib import Path

import pytest

from modelrunner.oci.push import Pusher
from modelrunner.progress import WorkProgress
from modelrunner.store import Store
from tests.oci.artifacts import published
from tests.oci.conftest import Machine
from tests.oci.registry import Registry, publish
from tests.store.samples import add_model
from tests.strace import exists, needs_strace, numbers, some_or_all, strike

pytestmark = needs_strace
# System calls of a kind, and a few more than a pull or push makes of them.
KINDS = {
    "pwritev": 6,
    "write": 24,
    "fsync": 20,
    "rename": 14,
    "link": 12,
    "unlink": 20,
    "sendto": 40,
}


def ignore(line: WorkProgress) -> None:
    """Progress that nobody watches."""


MODEL, FILES = published()["docker v0.1, GGUF"]


def sweep(tmp_path: Path, what: str, call: str, fault: str, name: str, step: int = 1) -> list[tuple[Path, str]]:
    """The folders of all children and how each ended; child N was struck at its Nth call."""
    children = KINDS[call]
    template = Store(tmp_path / "template")
    add_model(template, "kept", seed=0)
    add_model(template, "new", seed=1)
    folders = [tmp_path / "runs" / str(n) for n in numbers(children, step)]
    for folder in folders:
        shutil.copytree(tmp_path / "template", folder / "data", symlinks=True)
    strike(
        tmp_path / "trace",
        call,
        children,
        fault,
        "tests.oci.scenario",
        what,
        call,
        str(children),
        tmp_path / "runs",
        name,
    )
    ends = ("done", "refused storage_failed", "refused insufficient_disk", "refused source_failed")
    found = [next((end for end in ends if (folder / end).exists()), "killed") for folder in folders]
    assert found[-1] == "done"  # the sweep reaches beyond the last call
    assert len(set(found)) > 1
    return list(zip(folders, found, strict=True))


async def check_pull(folder: Path, end: str, name: str) -> None:
    machine = Machine(folder)
    assert machine.store.verify("kept") == ()
    if here := exists(machine.store, name):
        assert machine.store.verify(name) == ()
    assert here or end != "done"
    assert not (here and end.startswith("refused")), end
    made = {path.relative_to(folder / "data").parts[0] for path in (folder / "data").rglob("*.tmp")}
    assert made <= {"state"}  # which the daemon sweeps when it starts
    pulled = await machine.puller.pull(name, ignore)
    assert pulled.id == MODEL.id
    assert machine.store.bundle(name).model_file.read_bytes() == FILES["model.gguf"]
    assert [path for path in machine.store.partial.rglob("*") if path.is_file()] == []


@some_or_all
@pytest.mark.parametrize("call", [call for call in KINDS if call != "sendto"])
async def test_a_pull_that_is_killed_at_any_call(registry: Registry, tmp_path: Path, call: str, step: int) -> None:
    name = publish(registry, "team/tiny", "v1", MODEL)
    for folder, end in sweep(tmp_path, "pull", call, "signal=KILL", name, step):
        await check_pull(folder, end, name)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("call", "fault", "code"),
    [
        ("write", "error=ENOSPC", "insufficient_disk"),
        ("pwritev", "error=ENOSPC", "insufficient_disk"),
        ("fsync", "error=EIO", "storage_failed"),
        ("rename", "error=ENOSPC", "insufficient_disk"),
        ("link", "error=ENOSPC", "insufficient_disk"),
        ("unlink", "error=EIO", "storage_failed"),
    ],
)
async def test_a_pull_that_fails_at_any_call(
    registry: Registry, tmp_path: Path, call: str, fault: str, code: str
) -> None:
    name = publish(registry, "team/tiny", "v1", MODEL)
    swept = sweep(tmp_path, "pull", call, fault, name)
    assert f"refused {code}" in {end for _, end in swept}
    for folder, end in swept:
        await check_pull(folder, end, name)


@pytest.mark.parametrize(
    ("fault", "step"),
    [
        ("signal=KILL", 10),
        pytest.param("signal=KILL", 1, marks=pytest.mark.nightly),
        pytest.param("error=ECONNRESET", 1, marks=pytest.mark.nightly),
    ],
)
async def test_a_push_that_is_killed_or_fails_at_any_call(
    registry: Registry, tmp_path: Path, fault: str, step: int
) -> None:
    """The tag at the registry means the old model or the new one, whole."""
    for count in numbers(KINDS["sendto"], step):
        publish(registry, f"push-{fault[:5]}/{count}", "v1", MODEL)
    name = f"{registry.host}/push-{fault[:5]}/NUMBER:v1"
    for folder, end in sweep(tmp_path, "push", "sendto", fault, name, step):
        number = folder.name
        machine, target = Machine(folder), name.replace("NUMBER", number)
        new = machine.store.get("new").id
        there = await Machine(tmp_path / "elsewhere" / number).puller.pull(target, ignore)
        assert there.id in ({new} if end == "done" else {new, MODEL.id})
        await Pusher(machine.store, machine.registries, machine.credentials).push("new", target, ignore)
        again = await Machine(tmp_path / "elsewhere" / number).puller.pull(target, ignore)
        assert again.id == new
