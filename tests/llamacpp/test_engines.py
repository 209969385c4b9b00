"""Which engine is found, and how the backend reports it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from modelrunner.backend import BackendContext, BackendState
from modelrunner.errors import BackendUnavailable, BadRequest
from modelrunner.sdk.enginecache import MARKER
from modelrunner.types import Mode
from modelrunner_llamacpp import LlamaCppBackend, engines
from modelrunner_llamacpp.engines import EngineKind
from tests.fakes import fake_launch
from tests.llamacpp.models import SMOLLM2, bundle, spec

MakeBackend = Callable[..., LlamaCppBackend]


def script(path: Path, text: str = "echo 'version: b7000 (build 7000)'") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def managed(context: BackendContext, kind: EngineKind, version: str) -> Path:
    """A finished engine in the cache, linked."""
    entry = context.cache / f"entry-{kind}"
    script(entry / "bin" / ("python" if kind is EngineKind.WHEEL else "llama-server"))
    (entry / MARKER).write_text(json.dumps({"kind": kind, "version": version, "devices": False}))
    link = engines.link(context, kind)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(entry)
    return entry


@pytest.fixture
def make_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeBackend:
    monkeypatch.setenv("PATH", str(tmp_path / "path"))

    def make(**settings: object) -> LlamaCppBackend:
        folders = {name: tmp_path / name for name in ("engines", "cache", "logs")}
        return LlamaCppBackend(BackendContext(settings=settings, **folders))

    return make


def test_the_order(make_backend: MakeBackend, tmp_path: Path) -> None:
    backend = make_backend()
    assert str(backend.status()) == "Not Installed: no llama.cpp engine was found"
    managed(backend.context, EngineKind.WHEEL, "2026.1")
    assert str(backend.status()) == "Running: llama.cpp 2026.1 (wheel)"
    script(tmp_path / "path" / "llama-server")
    assert str(backend.status()) == "Running: llama.cpp b7000 (native)"
    managed(backend.context, EngineKind.NATIVE, "0.3")
    assert str(backend.status()) == "Running: llama.cpp 0.3 (native)"
    named = script(tmp_path / "mine", "echo 'version: b1'")
    assert str(make_backend(llama_server=named).status()) == "Running: llama.cpp b1 (native)"
    assert make_backend(llama_server=named).version() == "b1 (native)"


def test_an_engine_that_is_named_and_missing_is_an_error(make_backend: MakeBackend, tmp_path: Path) -> None:
    backend = make_backend(llama_server=tmp_path / "nowhere")
    managed(backend.context, EngineKind.WHEEL, "2026.1")
    assert backend.status().state is BackendState.ERROR
    assert "nowhere" in backend.status().details
    assert backend.version() == ""


def test_half_an_engine_is_none(make_backend: MakeBackend) -> None:
    backend = make_backend()
    entry = managed(backend.context, EngineKind.WHEEL, "2026.1")
    (entry / "bin/python").unlink()
    (entry / "bin/python").symlink_to("/nowhere/python")  # the interpreter was uninstalled
    assert backend.status().state is BackendState.NOT_INSTALLED
    script(entry / "bin/python.new").replace(entry / "bin/python")
    (entry / MARKER).write_text("{")
    assert backend.status().state is BackendState.NOT_INSTALLED


def test_llama_cpp_python_is_asked_for_its_version(make_backend: MakeBackend, tmp_path: Path) -> None:
    python = script(tmp_path / "python", "echo 0.3.36")
    assert str(make_backend(python=python).status()) == "Running: llama.cpp 0.3.36 (llama-cpp-python)"
    empty = script(tmp_path / "empty", "exit 1")
    assert "has no llama-cpp-python" in str(make_backend(python=empty).status())


async def test_without_an_engine_a_run_says_how_to_get_one(make_backend: MakeBackend, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="modelrunner install"):
        await make_backend().run(spec(bundle(SMOLLM2)), fake_launch(tmp_path))


async def test_memory_needs_no_engine(make_backend: MakeBackend) -> None:
    assert (await make_backend().required_memory(spec(bundle(SMOLLM2)))).ram > 98 << 20


def test_flags_are_checked_without_an_engine(make_backend: MakeBackend) -> None:
    backend = make_backend()
    backend.check_flags(("--temp", "0.5"), Mode.COMPLETION)
    with pytest.raises(BadRequest):
        backend.check_flags(("--log-file", "/x"), Mode.COMPLETION)


async def test_unknown_installation_options_are_refused(make_backend: MakeBackend) -> None:
    with pytest.raises(BadRequest, match="bulid"):
        await make_backend().install(lambda _: None, bulid=True)


def test_the_version_of_a_replaced_program_is_asked_again(make_backend: MakeBackend, tmp_path: Path) -> None:
    program = script(tmp_path / "mine", "echo 'version: b1'")
    backend = make_backend(llama_server=program)
    assert backend.version() == "b1 (native)"
    script(program, "echo 'version: b2'")
    os.utime(program, ns=(0, 1))
    assert backend.version() == "b2 (native)"
