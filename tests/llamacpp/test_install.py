"""Installing the wheel by real pip, from an index made for the test; and what is said where nothing can be had."""

import hashlib
import json
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from pydantic import ValidationError

from modelrunner.backend import BackendContext, BackendState, InstallProgress
from modelrunner.errors import BackendUnavailable
from modelrunner_llamacpp import LlamaCppBackend, build
from modelrunner_llamacpp.engines import SOURCE, SOURCE_VERSION, WHEEL, WHEEL_VERSION

MakeBackend = Callable[..., LlamaCppBackend]


@pytest.fixture
def make_backend(tmp_path: Path) -> MakeBackend:
    def make(data: str = "data", **settings: object) -> LlamaCppBackend:
        folder = tmp_path / data
        return LlamaCppBackend(BackendContext(folder / "engines", tmp_path / "cache", folder / "logs", settings))

    return make


@pytest.fixture
def index(tmp_path: Path) -> str:
    """An index with one wheel that imports."""
    return make_index(tmp_path / "index", "def get_device_info(): return []")


def make_index(root: Path, code: str, version: str = WHEEL_VERSION) -> str:
    folder = root / WHEEL
    folder.mkdir(parents=True)
    name, info = f"{WHEEL}-{version}-py3-none-any.whl", f"{WHEEL}-{version}.dist-info"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr(f"{WHEEL}.py", code)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {WHEEL}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{name}">{name}</a>')
    return root.as_uri()


@pytest.fixture
def isolated_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other index or folder than the test's."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")


async def test_installed_used_again_and_removed(make_backend: MakeBackend, index: str, isolated_pip: None) -> None:
    backend, said, states = make_backend(wheel_index=index), list[InstallProgress](), list[str]()

    def tell(step: InstallProgress) -> None:
        said.append(step)
        states.append(str(backend.status()))

    await backend.install(tell)
    assert states[0] == f"Installing: installing {WHEEL} {WHEEL_VERSION}"
    assert str(backend.status()) == f"Running: llama.cpp {WHEEL_VERSION} (wheel)"
    assert f"installing {WHEEL} {WHEEL_VERSION}" in [step.message for step in said]
    assert await backend.disk_usage() > 0
    said.clear()
    again = make_backend("other", wheel_index=index)
    await again.install(said.append)
    assert said == []
    assert again.status() == backend.status()
    await again.uninstall()
    assert again.status().state is not BackendState.RUNNING
    assert backend.status().state is BackendState.RUNNING
    await backend.uninstall()
    assert await backend.disk_usage() == 0


async def test_uninstall_removes_what_killed_installations_left(make_backend: MakeBackend, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "llama.cpp-wheel-0.1-abc.tmp-1" / "new").mkdir(parents=True)
    (cache / "llama.cpp-wheel-0.1-abc.lock").touch()
    await make_backend().uninstall()
    assert not list(cache.glob("*/"))


async def test_another_digest_is_refused(make_backend: MakeBackend, index: str, isolated_pip: None) -> None:
    digest = hashlib.sha256(b"another file").hexdigest()
    backend = make_backend(wheel_index=index, wheel_sha256=[digest])
    with pytest.raises(BackendUnavailable, match="HASH"):
        await backend.install(lambda _: None)
    assert backend.status().state is BackendState.NOT_INSTALLED
    assert "HASH" in backend.status().details


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("libgomp.so.1: cannot open shared object file", r"lacks: install libgomp1 \(Debian, Ubuntu\) or libgomp"),
        ("libcudart.so.12: cannot open shared object file", r"libcudart\.so\.12, .* install the package that has it"),
        ("it is broken", "exited with 1: ImportError: it is broken"),
    ],
)
async def test_a_wheel_that_does_not_load_is_not_installed(
    make_backend: MakeBackend, tmp_path: Path, isolated_pip: None, fault: str, told: str
) -> None:
    index = make_index(tmp_path / "broken", f"raise ImportError({fault!r})")
    backend = make_backend(wheel_index=index)
    with pytest.raises(BackendUnavailable, match=told):
        await backend.install(lambda _: None)
    assert backend.status().state is BackendState.NOT_INSTALLED


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


@pytest.fixture
def empty_index(tmp_path: Path) -> str:
    (tmp_path / "empty").mkdir()
    return (tmp_path / "empty").as_uri()


async def test_no_wheel_and_no_compiler(
    make_backend: MakeBackend, empty_index: str, isolated_pip: None, no_compiler: None
) -> None:
    backend = make_backend(wheel_index=empty_index)
    with pytest.raises(BackendUnavailable, match=r"no prebuilt .* no C\+\+ compiler .* install one .*--build"):
        await backend.install(lambda _: None)
    assert "No matching distribution" in (backend.context.logs / "install-llama.cpp.log").read_text()


async def test_no_wheel_but_a_compiler_builds(
    make_backend: MakeBackend, empty_index: str, isolated_pip: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index that has no wheel has no source either, and there the build ends."""
    monkeypatch.setenv("PIP_INDEX_URL", empty_index)
    said = list[InstallProgress]()
    with pytest.raises(BackendUnavailable, match=rf"(?s)pip.*{SOURCE}|{SOURCE}"):
        await make_backend(wheel_index=empty_index).install(said.append)
    assert any("building it" in step.message for step in said)


async def test_a_build_without_a_compiler(make_backend: MakeBackend, no_compiler: None) -> None:
    with pytest.raises(BackendUnavailable, match=r"needs a C\+\+ compiler.*build-essential"):
        await make_backend().install(lambda _: None, build=True)


async def test_a_cached_build_that_lacks_a_program_is_not_taken(
    make_backend: MakeBackend, empty_index: str, tmp_path: Path, isolated_pip: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no source in this test, so that a build ends where it begins."""
    monkeypatch.setenv("PIP_INDEX_URL", empty_index)
    card = build.find_card()
    for targets, makes in ((build.TARGETS[:-1], True), (build.TARGETS, False)):
        programs = tmp_path / "cache" / build.entry_name(card, targets) / "bin"
        programs.mkdir(parents=True)
        (programs.parent / "users").mkdir()
        for name in targets:
            (programs / name).touch(mode=0o700)
        marker = {"kind": "native", "version": SOURCE_VERSION, "devices": False}
        (programs.parent / "engine.json").write_text(json.dumps(marker))
        with pytest.raises(BackendUnavailable, match=SOURCE) if makes else nullcontext():
            await make_backend().install(lambda _: None, build=True)


async def test_another_version_takes_its_digest(
    make_backend: MakeBackend, tmp_path: Path, isolated_pip: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a model that the pinned engine does not know."""
    newer = "2099.1.1"
    monkeypatch.setenv("PIP_INDEX_URL", make_index(tmp_path / "newer", "", newer))
    file = tmp_path / "newer" / WHEEL / f"{WHEEL}-{newer}-py3-none-any.whl"
    with pytest.raises(ValidationError, match="version needs wheel_sha256"):
        make_backend(version=newer)
    wrong = make_backend(version=newer, wheel_sha256=["0" * 64])
    with pytest.raises(BackendUnavailable, match="HASH"):
        await wrong.install(lambda _: None)
    backend = make_backend(version=newer, wheel_sha256=[hashlib.sha256(file.read_bytes()).hexdigest()])
    await backend.update(lambda _: None)
    assert str(backend.status()) == f"Running: llama.cpp {newer} (wheel)"
