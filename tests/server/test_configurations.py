"""What `_configure` keeps."""

from pathlib import Path
from typing import Any

import pytest

from modelrunner.api import ConfigureRequest
from modelrunner.errors import BadRequest
from modelrunner.server.configurations import Configurations, ModelConfiguration

MODEL = "sha256:" + "a" * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "configurations.json"


async def configure(configurations: Configurations, **fields: Any) -> int:
    entry = await configurations.configure(MODEL, ConfigureRequest(model="m", **fields))
    return entry.revision


async def test_what_is_left_out_stays_and_null_takes_back(path: Path) -> None:
    kept = Configurations(path)
    await configure(kept, context_size=2048, parallel=2)
    await configure(kept, parallel=None, runtime_flags=["--top-k", "20"])
    expected = ModelConfiguration(context_size=2048, runtime_flags=("--top-k", "20"))
    assert kept.get(MODEL).configuration == expected
    assert Configurations(path).get(MODEL).configuration == expected


async def test_only_what_an_engine_is_started_with_changes_the_revision(path: Path) -> None:
    kept = Configurations(path)
    first = await configure(kept, context_size=2048)
    assert await configure(kept, keep_alive="10m") == first
    assert await configure(kept, keep_alive=60, context_size=2048) == first
    assert kept.get(MODEL).configuration.keep_alive == "1m"
    second = await configure(kept, context_size=4096)
    assert second > first
    assert await configure(kept, context_size=2048) > second  # back to old values, but not to the old process


async def test_a_revision_is_never_used_twice_not_even_after_a_restart(path: Path) -> None:
    kept = Configurations(path)
    first = await configure(kept, context_size=2048)
    await kept.forget(MODEL)
    assert kept.get(MODEL).revision == 0
    assert await configure(Configurations(path), context_size=1024) > first


async def test_every_change_is_seen_by_those_who_remember(path: Path) -> None:
    kept = Configurations(path)
    await configure(kept, keep_alive="1m")
    seen = kept.generation
    await configure(kept, keep_alive="1m")
    assert kept.generation == seen  # nothing changed
    await configure(kept, keep_alive="2m")
    assert kept.generation > seen


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("context_size", 0, "context-size"),
        ("parallel", 0, "parallel"),
        ("parallel", 257, "parallel"),
        ("keep_alive", "soon", None),
        ("keep_alive", float("nan"), "keep_alive"),
    ],
)
async def test_values_out_of_range_change_nothing(path: Path, field: str, value: Any, param: str | None) -> None:
    kept = Configurations(path)
    with pytest.raises(BadRequest) as caught:
        await configure(kept, **{field: value})
    assert caught.value.param == param
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"models": 3}', b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_set_aside_not_lost(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    assert Configurations(path).all() == {}
    (aside,) = path.parent.iterdir()
    assert aside.read_bytes() == content


def test_what_is_set_wins_over_the_file() -> None:
    posted = ModelConfiguration(context_size=1024)
    file = ModelConfiguration(context_size=2048, keep_alive="1m")
    assert posted.over(file) == ModelConfiguration(context_size=1024, keep_alive="1m")
