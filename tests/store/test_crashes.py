"""Every acknowledged change is wholly there, every other one wholly there or wholly absent, whichever system call the
daemon is killed at or fails at."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from modelrunner.store import Store
from modelrunner.store.layout import archive_of
from modelrunner.store.sweeping import LeftoverKind
from tests.store.folders import add_folder, model_files
from tests.store.samples import add_model, write_gguf
from tests.strace import exists, needs_strace, numbers, some_or_all, strike

pytestmark = needs_strace
# System calls of a kind, and a few more than the scenario makes of them.
KINDS = {
    "write": 54,
    "fsync": 50,
    "rename": 40,
    "link": 36,
    "unlink": 40,
}


def sweep(tmp_path, call: str, fault: str, step: int = 1):
    """The folders of all children; child N was struck at its Nth call."""
    children = KINDS[call]
    template = tmp_path / "template"
    store = Store(template)
    add_model(store, "kept", seed=0)
    folder = {name: data for name, data in model_files().items() if name != "tokenizer.json"}
    add_folder(store, "doomed", folder | {"1_Pooling/config.json": b"{}"})
    archive = archived(tmp_path / "elsewhere")
    folders = [tmp_path / "runs" / str(n) for n in numbers(children, step)]
    for folder in folders:
        shutil.copytree(template, folder / "data", symlinks=True)
        write_gguf(folder / "theirs.gguf", seed=3)
        write_gguf(folder / "data/partial/new.gguf", seed=2)
        (folder / "archive.tar").write_bytes(archive)
    strike(tmp_path / "trace", call, children, fault, "tests.store.scenario", call, str(children), tmp_path / "runs")
    return folders


def archived(folder: Path) -> bytes:
    store = Store(folder)
    add_model(store, "loaded", seed=4)
    return b"".join(archive_of(store, "loaded").pieces())


def check(folder: Path) -> str:
    """The report of one child, after its store was opened again and compared with it."""
    report = (folder / "report").read_text()
    store = Store(folder / "data")
    present = {name: exists(store, name) for name in ("kept", "second", "new", "doomed", "imported", "loaded")}
    assert present["kept"], report
    if "done create" in report:
        assert present["new"], report
    if "done tag" in report and "begin untag" not in report:
        assert present["second"], report
    if "done untag" in report or "begin tag" not in report:
        assert not present["second"], report
    if "done remove" in report:
        assert not present["doomed"], report
    if "begin remove" not in report:
        assert present["doomed"], report
    if "done import" in report:
        assert present["imported"], report
    if "begin import" not in report:
        assert not present["imported"], report
    if "done load" in report:
        assert present["loaded"], report
    if "begin load" not in report:
        assert not present["loaded"], report
    theirs = folder / "theirs.gguf"
    assert theirs.read_bytes() == write_gguf(folder / "again.gguf", seed=3).read_bytes()
    assert theirs.stat().st_mode == (folder / "again.gguf").stat().st_mode
    for name in (name for name, there in present.items() if there):
        assert store.verify(name) == ()
        assert store.bundle(name).model_file.exists()
    if "begin prune" not in report and "begin create" in report:  # what was fetched is never fetched again
        assert present["new"] != (folder / "data/partial/new.gguf").exists(), report
    assert {each.kind for each in store.leftovers()} <= {LeftoverKind.DOWNLOAD}, report
    leftovers = [path.name for path in (folder / "data").rglob("*.tmp")]
    assert leftovers == []
    add_model(store, "new", seed=2)  # the next try succeeds
    assert store.bundle("new").model_file.exists()
    return report


@some_or_all
@pytest.mark.parametrize("call", KINDS)
def test_killed_at_any_call(tmp_path, call, step):
    reports = [check(folder) for folder in sweep(tmp_path, call, "signal=KILL", step)]
    assert "begin create" not in reports[0] or "done remove" not in reports[0]
    assert "done prune" in reports[-1]
    assert len(set(reports)) > 2  # the blows fell at different places


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("call", "fault", "code"),
    [
        ("write", "error=ENOSPC", "insufficient_disk"),
        ("fsync", "error=EIO", "storage_failed"),
        ("rename", "error=ENOSPC", "insufficient_disk"),
        ("link", "error=ENOSPC", "insufficient_disk"),
        ("unlink", "error=EIO", "storage_failed"),
    ],
)
def test_failing_at_any_call(tmp_path, call, fault, code):
    reports = [check(folder) for folder in sweep(tmp_path, call, fault)]
    codes = set(re.findall(r"refused (?!untag)\w+ (\w+)", "".join(reports)))  # no name to take away if tag failed
    assert codes == {code}


def test_everything_is_synced_before_it_is_named_and_named_before_it_is_acknowledged(tmp_path):
    store = Store(tmp_path / "runs/1/data")
    write_gguf(tmp_path / "runs/1/theirs.gguf", seed=3)
    write_gguf(tmp_path / "runs/1/data/partial/new.gguf", seed=2)
    (tmp_path / "runs/1/archive.tar").write_bytes(archived(tmp_path / "elsewhere"))
    add_model(store, "kept", seed=0)
    add_model(store, "doomed", seed=1)
    command = ["strace", "-f", "-qq", "-y", "-o", tmp_path / "trace", "-e", "trace=fsync,link,rename,write"]
    subprocess.run(
        [*command, sys.executable, "-m", "tests.store.scenario", "fsync", "1", tmp_path / "runs"], check=True
    )
    synced: set[str] = set()
    renamed: list[str] = []
    unsynced_folders: set[str] = set()
    for line in (tmp_path / "trace").read_text().splitlines():
        if found := re.search(r"fsync\(\d+<(.*?)>\) += 0", line):
            synced.add(found[1])
            unsynced_folders.discard(found[1])
        elif found := re.search(r'link\("(.*?)", "(.*?)"\) += 0', line):
            synced.update({found[2]} if found[1] in synced else ())
        elif found := re.search(r'rename\("(.*?)", "(.*?)"\) += 0', line):
            if not re.search(r"/bundles/|/index\.json$|\.copy$|/reserve$", found[2]):  # can be made again
                assert found[1] in synced or found[1].endswith(".names"), line
                unsynced_folders.add(found[2].rpartition("/")[0])
                renamed.append(found[2])
            if found[2].endswith(".names"):
                assert unsynced_folders == {found[2].rpartition("/")[0]}, line
        elif '"done' in line:
            assert unsynced_folders == set(), line
    kinds = [re.findall(r"/blobs|/manifests/|\.pending$|\.names$", path)[-1] for path in renamed]
    create, tag, untag, remove = (
        [".pending", *["/blobs"] * 2, "/manifests/", ".names"],
        [".names"],
        [".names"],
        [".pending"],
    )
    assert kinds == [*create, *tag, *untag, *remove, *create, *create]  # at last import and load
