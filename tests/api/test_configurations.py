"""What `_configure` keeps."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from modelrunner.config.modelconfig import ModelConfiguration, Speculative
from modelrunner.errors import BadRequest, Conflict
from modelrunner.models.configurations import Configurations, PostedConfiguration
from modelrunner.types import Mode
from tests.api import posting

MODEL = "sha256:" + "a" * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "configurations.json"


async def configure(configurations: Configurations, **fields: Any) -> int:
    words = {name if name == "keep_alive" else name.replace("_", "-"): value for name, value in fields.items()}
    return (await posting.configure(configurations, MODEL, words)).revision


async def test_what_is_left_out_stays_and_null_takes_back(path: Path) -> None:
    kept = Configurations(path)
    await configure(kept, context_size=2048, parallel=2)
    await configure(kept, parallel=None, runtime_flags=["--top-k", "20"])
    expected = ModelConfiguration(context_size=2048, runtime_flags=("--top-k", "20"))
    assert kept.settings.posted_for(MODEL).configuration == expected
    assert Configurations(path).settings.posted_for(MODEL).configuration == expected


async def test_only_what_an_engine_is_started_with_changes_the_revision(path: Path) -> None:
    kept = Configurations(path)
    first = await configure(kept, context_size=2048)
    assert await configure(kept, keep_alive="10m") == first
    assert await configure(kept, keep_alive=60, context_size=2048) == first
    assert kept.settings.posted_for(MODEL).configuration.keep_alive == "1m"
    second = await configure(kept, context_size=4096)
    assert second > first
    assert await configure(kept, context_size=2048) > second  # back to old values, but not to the old process


async def test_a_revision_is_never_used_twice_not_even_after_a_restart(path: Path) -> None:
    kept = Configurations(path)
    first = await configure(kept, context_size=2048)
    await kept.forget(MODEL)
    assert kept.settings.posted_for(MODEL).revision == 0
    assert await configure(Configurations(path), context_size=1024) > first


async def test_every_change_is_seen_by_those_who_remember(path: Path) -> None:
    kept = Configurations(path)
    await configure(kept, keep_alive="1m")
    told = []
    kept.watchers.append(lambda: told.append(kept.settings))
    await configure(kept, keep_alive="1m")
    assert not told, "nothing changed"
    await configure(kept, keep_alive="2m")
    assert told == [kept.settings]


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("context_size", 0, "context-size"),
        ("parallel", 0, "parallel"),
        ("parallel", 257, "parallel"),
        ("keep_alive", "soon", "keep_alive"),
        ("context_size", True, "context-size"),
        ("gpu_layers", -1, "gpu-layers"),
        ("runtime_flags", "--top-k 3", "runtime-flags"),
        ("raw_runtime_flags", "'", "raw-runtime-flags"),
        ("speculative", {"num_tokens": 3}, "speculative.draft_model"),
        ("speculative", {"draft_model": "d", "ngram": True}, "speculative.draft_model"),
        ("speculative", {"ngram": True, "mtp": True}, "speculative.draft_model"),
        ("speculative", {"draft_model": "d", "num_tokens": 0}, "speculative.num_tokens"),
        ("speculative", {"draft_model": "d", "min_acceptance_rate": 1.1}, "speculative.min_acceptance_rate"),
        ("contxt_size", 3, "contxt-size"),
        ("keep_alive", float("nan"), "keep_alive"),
    ],
)
async def test_values_out_of_range_change_nothing(path: Path, field: str, value: Any, param: str | None) -> None:
    kept = Configurations(path)
    with pytest.raises(BadRequest) as caught:
        await configure(kept, **{field: value})
    assert caught.value.param == param
    assert not path.exists()


_ODD_MODE = b'{"last_revision": 1, "models": {"sha256:a/dance": {"revision": 1, "configuration": {}}}}'


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"models": 3}', b"\xff\xfe", _ODD_MODE])
def test_a_file_that_cannot_be_read_is_set_aside_not_lost(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert list(Configurations(path).settings) == []
    (aside,) = path.parent.iterdir()
    assert aside.read_bytes() == content


def test_what_is_set_wins_over_the_file() -> None:
    posted = ModelConfiguration(context_size=1024)
    file = ModelConfiguration(context_size=2048, keep_alive="1m")
    assert posted.over(file) == ModelConfiguration(context_size=1024, keep_alive="1m")


def test_a_way_of_drafting_that_is_set_wins_over_another_one_in_the_file() -> None:
    file = ModelConfiguration(speculative=Speculative(ngram=True, num_tokens=4))
    posted = ModelConfiguration(speculative=Speculative(mtp=True))
    assert posted.over(file).speculative == Speculative(mtp=True, num_tokens=4)


async def test_a_mode_has_settings_of_its_own_over_the_general_ones(path: Path) -> None:
    kept = Configurations(path)
    await configure(kept, context_size=2048, parallel=2)
    own = await posting.configure(kept, MODEL, {"context-size": 512}, Mode.EMBEDDING)
    for reader in (kept, Configurations(path)):
        found = reader.settings.effective(MODEL, Mode.EMBEDDING)
        assert (found.configuration.context_size, found.configuration.parallel) == (512, 2)
        assert found.revision == own.revision
        assert reader.settings.effective(MODEL, Mode.COMPLETION).configuration.context_size == 2048
    later = await configure(kept, parallel=3)
    assert kept.settings.effective(MODEL, Mode.EMBEDDING).revision == later
    await kept.forget(MODEL)
    assert list(Configurations(path).settings) == []


async def test_tables_that_are_read_while_a_change_is_written_stay(path: Path) -> None:
    kept = Configurations(path, model_id=lambda reference: MODEL)
    writing = asyncio.create_task(configure(kept, parallel=2))
    await asyncio.sleep(0)  # the change waits for the disk
    kept.set_tables({"smol": ModelConfiguration(context_size=512)})
    await writing
    assert kept.settings.of(MODEL) == ModelConfiguration(context_size=512, parallel=2)


async def test_two_who_change_one_thing_do_not_undo_each_other(path: Path) -> None:
    kept = Configurations(path)
    before = kept.settings.posted_for(MODEL)
    mine = PostedConfiguration(kept.take_revision(), ModelConfiguration(parallel=2))
    await configure(kept, context_size=1024)
    with pytest.raises(Conflict):
        await kept.keep(MODEL, None, before, mine)
    assert kept.settings.posted_for(MODEL).configuration == ModelConfiguration(context_size=1024)
