"""An import from another program's store that is killed or fails at any system call is wholly done or wholly absent,
leaves theirs as it is, and the next one succeeds."""

import asyncio
import shutil
from pathlib import Path

import pytest

from modelrunner.pull import Puller
from modelrunner.store import Store
from modelrunner.store.sweeping import LeftoverKind
from tests.api.test_import import carried, hugging_face, lm_studio, ollama, snapshot
from tests.pull.import_scenario import NAMES, take
from tests.store.samples import add_model
from tests.strace import exists, needs_strace, numbers, some_or_all, strike

pytestmark = needs_strace
# System calls of a kind, and a few more than the imports make of them.
KINDS = {
    "write": 50,
    "fsync": 44,
    "rename": 40,
    "link": 46,
    "unlink": 44,
}


def sweep(tmp_path: Path, call: str, fault: str, step: int = 1) -> list[Path]:
    """The folders of all children; child N was struck at its Nth call."""
    children = KINDS[call]
    add_model(Store(tmp_path / "template/data"), "kept", seed=0)
    theirs = tmp_path / "template/theirs"
    theirs.mkdir()
    hugging_face(theirs / "hub")
    ollama(theirs / "ollama")
    carried(theirs / "ollama", system="You are Mario.", license="Free.")
    lm_studio(theirs / "lmstudio")
    folders = [tmp_path / "runs" / str(n) for n in numbers(children, step)]
    for folder in folders:
        shutil.copytree(tmp_path / "template", folder, symlinks=True)
    before = list(map(snapshot, [folder / "theirs" for folder in folders]))
    strike(
        tmp_path / "trace", call, children, fault, "tests.pull.import_scenario", call, str(children), tmp_path / "runs"
    )
    assert [snapshot(folder / "theirs") for folder in folders] == before
    assert (folders[-1] / f"done {len(NAMES) - 1}").exists()  # the sweep reaches beyond the last call
    return folders


def check(folder: Path) -> frozenset[str]:
    """How the imports of a child ended, after its store was opened again and compared with that."""
    theirs = snapshot(folder / "theirs")
    ended = frozenset(path.name for path in folder.iterdir() if path.name.startswith(("done", "refused", "crashed")))
    store = Store(folder / "data")
    assert store.verify("kept") == ()
    for number, name in enumerate(NAMES):
        if here := exists(store, name):
            assert store.verify(name) == ()
        assert here or f"done {number}" not in ended, (name, ended)
        assert not (here and any(end.startswith(f"refused {number}") for end in ended)), (name, ended)
    assert {each.kind for each in store.leftovers()} <= {LeftoverKind.DOWNLOAD}, ended
    assert [path for path in (folder / "data").rglob("*.tmp") if "state" not in path.parts] == []
    puller = Puller(store, [])

    async def again() -> list[str]:
        return [await take(puller, store, folder, name) for name in NAMES]

    ids = asyncio.run(again())
    assert [store.get(name).id for name in NAMES] == ids
    assert [damage for name in NAMES for damage in store.verify(name)] == []
    for name in NAMES:
        store.remove(name)
    assert snapshot(folder / "theirs") == theirs
    return ended


@some_or_all
@pytest.mark.parametrize("call", KINDS)
def test_killed_at_any_call(tmp_path: Path, call: str, step: int) -> None:
    ends = {check(folder) for folder in sweep(tmp_path, call, "signal=KILL", step)}
    assert len(ends) > (1 if step > 1 else len(NAMES))  # before, between and after them


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("call", "fault", "codes"),
    [
        ("write", "error=ENOSPC", {"insufficient_disk"}),
        ("fsync", "error=EIO", {"storage_failed"}),
        ("rename", "error=ENOSPC", {"insufficient_disk"}),
        ("link", "error=ENOSPC", {"insufficient_disk"}),
        ("unlink", "error=EIO", {"storage_failed"}),
    ],
)
def test_failing_at_any_call(tmp_path: Path, call: str, fault: str, codes: set[str]) -> None:
    ends = frozenset().union(*map(check, sweep(tmp_path, call, fault)))
    assert {end.split()[2] for end in ends if not end.startswith("done")} == codes
