"""From a request's words to what the scheduler is asked for, and in which order that is refused."""

from pathlib import Path
from typing import Any

import pytest

from modelrunner.backend import BackendState, BackendStatus
from modelrunner.config.modelconfig import ModelConfiguration
from modelrunner.errors import (
    BackendNotFound,
    BackendUnavailable,
    BadRequest,
    InvalidReference,
    Misdirected,
    ModelNotFound,
    Unavailable,
    UnsupportedModel,
)
from modelrunner.models.configurations import Configurations
from modelrunner.models.rendering import Renderings, TemplateFiles
from modelrunner.models.resolve import Resolver
from modelrunner.models.runspecs import RunSpecs
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.store import Store
from modelrunner.types import Bundle, KeepAlive, Mode, ModelFormat
from tests.api.posting import configure
from tests.fakes import FakeBackend
from tests.store.samples import add_model


class OtherFormat(FakeBackend):
    name = "other"
    formats = frozenset({ModelFormat.SAFETENSORS})


class OnlyCompletion(FakeBackend):
    name = "plain"
    modes = frozenset({Mode.COMPLETION})

    def priority(self, bundle: object) -> float:
        return -1.0


class Roomy(FakeBackend):
    name = "roomy"

    def default_context_size(self, bundle: Bundle) -> int:
        return 16_384

    def default_parallel(self, bundle: Bundle, mode: Mode) -> int:
        return 4


class World:
    def __init__(self, folder: Path, **tables: ModelConfiguration) -> None:
        self.store = Store(folder / "data")
        self.model = add_model(self.store, "smol")
        self.fake, self.other, self.plain = FakeBackend(folder), OtherFormat(folder), OnlyCompletion(folder)
        known = {b.name: b for b in (self.fake, self.other, self.plain, Roomy(folder))}
        registry = BackendRegistry(known, {"broken": "it is"})
        self.configurations = Configurations(
            folder / "configurations.json", tables=tables, model_id={"smol": self.model.id}.get
        )
        templates = TemplateFiles(folder / "templates", Renderings(folder / "templates.json"))
        self.specs = RunSpecs(self.store, templates)
        self.resolve = Resolver(self.store, registry, self.configurations, self.specs, keep_alive=KeepAlive(300.0))

    async def configure(self, patch: dict[str, Any], mode: Mode | None = None) -> None:
        await configure(self.configurations, self.model.id, patch, mode)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_defaults_are_the_backends(world: World) -> None:
    target = world.resolve(None, "smol", Mode.COMPLETION)
    assert str(target.key).startswith(f"fake/{world.store.files_id('smol')[:19]}/completion#")
    assert (target.spec.context_size, target.spec.parallel, target.spec.flags) == (2048, 1, ())
    assert target.keep_alive == KeepAlive(300.0)


async def test_a_window_that_nobody_chose_may_shrink_and_sequences_that_nobody_chose_may_grow(world: World) -> None:
    spec = world.resolve("roomy", "smol", Mode.COMPLETION).spec
    assert (spec.context_size, spec.min_context_size, spec.parallel, spec.grows) == (16_384, 2048, 4, True)
    await world.configure({"context-size": 1024, "parallel": 3})
    spec = world.resolve("roomy", "smol", Mode.COMPLETION).spec
    assert (spec.context_size, spec.min_context_size, spec.parallel, spec.grows) == (1024, None, 3, False)


def test_every_name_of_a_model_means_one_runner(world: World) -> None:
    keys = {world.resolve(None, text, Mode.COMPLETION).key for text in ("smol", "ai/smol:latest", world.model.id)}
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("backend", "model", "mode", "error"),
    [
        ("nope", "nope", Mode.COMPLETION, BackendNotFound),
        ("fake", "nope", Mode.COMPLETION, ModelNotFound),
        (None, "../../etc/passwd", Mode.COMPLETION, InvalidReference),
        ("broken", "smol", Mode.COMPLETION, BackendUnavailable),
        ("other", "smol", Mode.COMPLETION, Misdirected),
        ("plain", "smol", Mode.EMBEDDING, BadRequest),
        ("fake", "smol", Mode.RERANKING, BadRequest),
    ],
)
def test_what_cannot_be_is_refused(
    world: World, backend: str | None, model: str, mode: Mode, error: type[Exception]
) -> None:
    with pytest.raises(error):
        world.resolve(backend, model, mode)


def test_unknown_comes_before_missing_and_missing_before_misdirected(world: World) -> None:
    world.other.state = BackendStatus(BackendState.NOT_INSTALLED)
    with pytest.raises(ModelNotFound):
        world.resolve("other", "nope", Mode.COMPLETION)
    with pytest.raises(BackendUnavailable, match="modelrunner install other"):
        world.resolve("other", "smol", Mode.RERANKING)
    world.other.state = BackendStatus(BackendState.RUNNING)
    with pytest.raises(Misdirected, match="/engines/fake/v1/"):
        world.resolve("other", "smol", Mode.RERANKING)


def test_a_backend_that_is_being_installed_is_worth_waiting_for(world: World) -> None:
    world.fake.state = BackendStatus(BackendState.INSTALLING)
    with pytest.raises(Unavailable) as caught:
        world.resolve("fake", "smol", Mode.COMPLETION)
    assert caught.value.retry_after
    world.fake.state = BackendStatus(BackendState.RUNNING)
    assert world.resolve("fake", "smol", Mode.COMPLETION)


def test_a_format_that_nothing_runs(tmp_path: Path) -> None:
    world = World(tmp_path)
    registry = BackendRegistry({"other": world.other})
    resolve = Resolver(world.store, registry, world.configurations, world.specs, keep_alive=KeepAlive(0))
    with pytest.raises(UnsupportedModel):
        resolve(None, "smol", Mode.COMPLETION)


def test_any_text_model_gives_embeddings_but_an_encoder_does_not_chat(world: World) -> None:
    assert world.resolve(None, "smol", Mode.EMBEDDING).key.mode is Mode.EMBEDDING
    add_model(world.store, "encoder", 1, architecture="bert")
    assert world.resolve(None, "encoder", Mode.EMBEDDING)
    with pytest.raises(BadRequest, match="it offers embedding"):
        world.resolve(None, "encoder", Mode.COMPLETION)


async def test_a_posted_configuration_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = ModelConfiguration(context_size=1024, parallel=3, keep_alive="-1", runtime_flags=("--tokens", "20"))
    world = World(tmp_path, smol=file, absent=ModelConfiguration(context_size=1))
    target = world.resolve(None, "smol", Mode.COMPLETION)
    assert (target.spec.context_size, target.spec.parallel) == (1024, 3)
    assert target.spec.flags == ("--tokens", "20")
    assert str(target.keep_alive) == "-1"
    await world.configure({"context-size": 512, "keep_alive": "0"})
    target = world.resolve(None, "smol", Mode.COMPLETION)
    assert (target.spec.context_size, target.spec.parallel) == (512, 3)
    assert target.keep_alive == KeepAlive(0.0)


async def test_a_changed_configuration_is_another_runner_a_changed_keep_alive_is_not(world: World) -> None:
    before = world.resolve(None, "smol", Mode.COMPLETION)
    await world.configure({"keep_alive": "1h", "pin": True, "preload": True})
    assert world.resolve(None, "smol", Mode.COMPLETION).key == before.key
    await world.configure({"context-size": 512})
    assert world.resolve(None, "smol", Mode.COMPLETION).key != before.key


def test_what_was_resolved_is_remembered_until_the_store_changes(world: World) -> None:
    target = world.resolve(None, "smol", Mode.COMPLETION)
    assert world.resolve(None, "smol", Mode.COMPLETION) is target
    world.store.remove("smol")
    with pytest.raises(ModelNotFound):
        world.resolve(None, "smol", Mode.COMPLETION)


async def test_preparing_leaves_nothing_to_do(world: World) -> None:
    await world.resolve.prepare(None, "smol", Mode.COMPLETION)
    assert world.resolve(None, "smol", Mode.COMPLETION)
    with pytest.raises(ModelNotFound):
        await world.resolve.prepare(None, "nope", Mode.COMPLETION)


@pytest.mark.parametrize("prepare", [False, True])
async def test_a_change_during_the_resolving_is_not_missed(world: World, prepare: bool) -> None:
    status, old = world.fake.state, world.store.get("smol")

    def moved() -> BackendStatus:
        if world.store.get("smol").id == old.id:
            world.store.tag(add_model(world.store, "new", seed=2).id, "smol")
        return status

    world.fake.status = moved  # type: ignore[method-assign]
    if prepare:
        await world.resolve.prepare("fake", "smol", Mode.COMPLETION)
    else:
        world.resolve("fake", "smol", Mode.COMPLETION)
    assert world.resolve("fake", "smol", Mode.COMPLETION).model_id == world.store.get("smol").id != old.id
