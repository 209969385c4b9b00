"""How backends are found and chosen."""

import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NoReturn

import pytest

import modelrunner.plugins.registry
from modelrunner import sdk
from modelrunner.backend import Backend, BackendContext, BackendState, BackendStatus, DeclaredModel
from modelrunner.config.locations import ConfigurationError
from modelrunner.engineapi import ServiceCall
from modelrunner.errors import BackendNotFound, BackendUnavailable, TimedOut, UnsupportedModel
from modelrunner.jsonfile import JsonFile
from modelrunner.plugins.registry import ENTRY_POINT_GROUP, BackendRegistry
from modelrunner.types import Bundle, Mode, ModelFormat, ModelHeader
from tests.waiting import HUNG


class Plain(Backend):
    """The smallest backend; `rank` None means unfit here."""

    name = "plain"
    formats = frozenset({ModelFormat.GGUF})
    rank: float | None = 1.0

    def priority(self, bundle: Bundle) -> float:
        if self.rank is None:
            raise BackendUnavailable("no such processor here")
        return self.rank

    async def install(self, progress: Any, **options: Any) -> None: ...
    async def uninstall(self) -> None: ...
    async def run(self, spec: Any, endpoint: Any) -> NoReturn:
        raise AssertionError("never run")

    def status(self) -> BackendStatus:
        return BackendStatus(BackendState.RUNNING, "plain 1")

    async def disk_usage(self) -> int:
        return 0

    async def required_memory(self, spec: Any) -> Any:
        raise AssertionError("never asked")


class Better(Plain):
    name = "better"
    rank: float | None = 2.0


class Drowsy(Plain):
    """It falls asleep, and nothing can wake it."""

    name = "drowsy"

    async def sleep(self, spec: Any, endpoint: Any) -> None: ...


class Absent(Plain):
    name = "absent"

    def status(self) -> BackendStatus:
        return BackendStatus(BackendState.NOT_INSTALLED, "binary not found")


def context(backend: type[Backend] = Plain) -> BackendContext:
    return BackendContext(Path("/e"), Path("/c"), Path("/l"), {})


def bundle(model_format: ModelFormat) -> Bundle:
    return Bundle("sha256:0", (), model_format, Path("/b"), {}, ModelHeader({}, ()), 0, None, frozenset())


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, modelrunner.plugins.registry.ENTRY_POINT_GROUP)


def test_the_backend_of_the_highest_priority_is_chosen() -> None:
    plain, better = Plain(context()), Better(context())
    registry = BackendRegistry({"plain": plain, "better": better})
    assert registry.choose(bundle(ModelFormat.GGUF)) is better
    better.rank = None
    assert registry.choose(bundle(ModelFormat.GGUF)) is plain
    plain.rank = None
    with pytest.raises(BackendUnavailable, match="no such processor"):
        registry.choose(bundle(ModelFormat.GGUF))
    with pytest.raises(UnsupportedModel, match="safetensors"):
        registry.choose(bundle(ModelFormat.SAFETENSORS))


def test_one_more_backend_changes_no_existing_model(tmp_path: Path) -> None:
    """Whatever its name and its priority, also after a restart; where its own is gone a model gets another."""
    old, new = bundle(ModelFormat.GGUF), replace(bundle(ModelFormat.GGUF), model_id="sha256:1")

    def registry(*backends: Backend) -> BackendRegistry:
        file = JsonFile(tmp_path / "chosen.json", dict[str, str])
        return BackendRegistry({backend.name: backend for backend in backends}, own=frozenset({"plain"}), chosen=file)

    plain, better = Plain(context()), Better(context())
    assert registry(plain).choose(old) is plain
    both = registry(better, plain)
    assert (both.choose(old), both.choose(new)) == (plain, better)
    assert registry(better).choose(old) is better


def test_a_newcomer_is_not_asked_about_a_model_that_has_its_backend(tmp_path: Path) -> None:
    """It may keep its caller waiting."""

    class Newcomer(Better):
        def priority(self, bundle: Bundle) -> float:
            raise AssertionError("asked")

    model, plain = bundle(ModelFormat.GGUF), Plain(context())
    file = JsonFile(tmp_path / "chosen.json", dict[str, str])
    BackendRegistry({"plain": plain}, chosen=file).choose(model)
    assert BackendRegistry({"better": Newcomer(context()), "plain": plain}, chosen=file).choose(model) is plain


def test_ties_go_to_what_is_installed_then_to_ours_then_by_name() -> None:
    plain, better, absent = Plain(context()), Better(context()), Absent(context())
    absent.rank, better.rank = 3.0, plain.rank
    backends: dict[str, Backend] = {"absent": absent, "better": better, "plain": plain}
    assert BackendRegistry(backends).choose(bundle(ModelFormat.GGUF)) is better
    assert BackendRegistry(backends, own=frozenset({"plain"})).choose(bundle(ModelFormat.GGUF)) is plain
    assert BackendRegistry({"absent": absent}).choose(bundle(ModelFormat.GGUF)) is absent


def test_a_broken_plug_in_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        entry("plain", f"{__name__}:Plain"),
        entry("gone", "no_such_module:X"),
        entry("misnamed", f"{__name__}:Better"),
        entry("drowsy", f"{__name__}:Drowsy"),
    ]
    monkeypatch.setattr(modelrunner.plugins.registry, "entry_points", lambda group: entries)
    registry = BackendRegistry.discover(context)
    assert str(registry.statuses()["plain"]) == "Running: plain 1"
    assert registry.statuses()["gone"].state is BackendState.ERROR
    assert "better" in registry.statuses()["misnamed"].details
    assert "no sleep_level" in registry.statuses()["drowsy"].details, "a part of an optional interface is a mistake"
    with pytest.raises(BackendUnavailable, match="no_such_module"):
        registry.get("gone")
    with pytest.raises(BackendNotFound, match="plain"):
        registry.get("nothing")
    registry.close()


def test_a_backend_that_blocks_keeps_one_thread() -> None:
    """Each request with an unknown name asks what the engines declare: no pool of threads is to fill with them."""
    begun, go_on = threading.Event(), threading.Event()
    model = DeclaredModel("theirs", frozenset())

    class Declaring(Plain):
        uses_external_model_management = True
        asked = 0

        def models(self) -> list[DeclaredModel]:
            self.asked += 1
            if self.asked > 1:
                begun.set()
                go_on.wait(HUNG)
            return [model]

    backend = Declaring(context())
    registry = BackendRegistry({"plain": backend})
    assert registry.declared() == [(backend, model)]
    with ThreadPoolExecutor() as threads:
        blocked = threads.submit(registry.declared)
        try:
            assert begun.wait(HUNG)
            assert registry.declared() == [(backend, model)]
            assert not blocked.done()
        finally:
            go_on.set()
    assert backend.asked == 2


@pytest.mark.parametrize("path", ["/ui/speech", "/health", "/keys", "/v1/files", "/v1/models/x/y", "/v1/a/../../keys"])
def test_a_plug_in_takes_no_path_of_the_daemon(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Neither one that needs no key, nor one of the control plane."""
    monkeypatch.setattr(Plain, "calls", {path: ServiceCall(Mode("speech"))}, raising=False)
    found = [entry("plain", f"{__name__}:Plain")]
    monkeypatch.setattr(modelrunner.plugins.registry, "entry_points", lambda group: found)
    registry = BackendRegistry.discover(context)
    assert path in registry.statuses()["plain"].details
    registry.close()


def test_what_a_plug_in_was_wrongly_given_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(backend: type[Backend]) -> BackendContext:
        raise ConfigurationError(f"{backend.name} takes no such thing")

    monkeypatch.setattr(
        modelrunner.plugins.registry, "entry_points", lambda group: [entry("plain", f"{__name__}:Plain")]
    )
    with pytest.raises(ConfigurationError, match="plain takes no such thing"):
        BackendRegistry.discover(refuse)


def test_the_plug_in_api_is_whole() -> None:
    for name in sdk.__all__:
        assert getattr(sdk, name) is not None


def test_a_choice_while_a_backend_could_not_be_asked_is_not_kept(tmp_path: Path) -> None:
    """It was late once: the model goes back to it, also after a restart."""

    class Late(Better):
        late = True

        def priority(self, bundle: Bundle) -> float:
            if self.late:
                raise TimedOut("it did not answer in time")
            return super().priority(bundle)

    late, plain, model = Late(context()), Plain(context()), bundle(ModelFormat.GGUF)
    file = JsonFile(tmp_path / "chosen.json", dict[str, str])
    registry = BackendRegistry({"better": late, "plain": plain}, chosen=file)
    assert registry.choose(model) is plain
    late.late = False
    assert registry.choose(model) is late


@pytest.mark.parametrize("name", ["diffusers", "llama.cpp", "piper", "vllm", "whisper"])
def test_the_package_of_each_own_backend_has_its_name(name: str) -> None:
    [found] = entry_points(group=ENTRY_POINT_GROUP, name=name)
    assert importlib.import_module(found.module).Name == name
