import logging
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import BaseModel

from modelrunner.scheduler import Ledger
from modelrunner.types import RequiredMemory, RunSpec, Variant
from tests.scheduler.fakes import Engine, FakeBackend, target

SPEC = target("a").spec


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend({"a": Engine(100), "b": Engine(50)})


async def test_a_measurement_takes_the_place_of_the_estimate_and_survives(tmp_path: Path, backend: FakeBackend) -> None:
    file = tmp_path / "state" / "memory.json"
    ledger = Ledger(file)
    assert await ledger.required(backend, SPEC) == RequiredMemory(100)
    assert await ledger.record(backend, SPEC, RequiredMemory(80)) == RequiredMemory(80)
    assert await ledger.required(backend, SPEC) == RequiredMemory(80)
    assert await Ledger(file).required(backend, SPEC) == RequiredMemory(80)
    assert [f.name for f in file.parent.iterdir()] == ["memory.json"]


async def test_a_figure_of_one_kind_of_device_says_nothing_about_another(backend: FakeBackend) -> None:
    ledger = Ledger()
    await ledger.record(backend, SPEC, RequiredMemory(80), "one card")
    assert await ledger.required(backend, SPEC, "one card") == RequiredMemory(80)
    assert await ledger.required(backend, SPEC, "another card") == RequiredMemory(100)


async def test_the_largest_measurement_counts(tmp_path: Path, backend: FakeBackend) -> None:
    ledger = Ledger(tmp_path / "memory.json")
    await ledger.record(backend, SPEC, RequiredMemory(90))
    assert await ledger.record(backend, SPEC, RequiredMemory(70)) == RequiredMemory(90)
    assert await Ledger(tmp_path / "memory.json").required(backend, SPEC) == RequiredMemory(90)


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, context_size=4096),
        replace(SPEC, parallel=4),
        replace(SPEC, grows=True),
        replace(SPEC, model_id="b"),
        replace(SPEC, flags=("--cache-type-k", "q8_0")),
        replace(SPEC, options={"gpu_layers": 3}),
        replace(SPEC, draft=target("b").spec.bundle),
        replace(SPEC, mtp=True),
        replace(SPEC, draft_tokens=8),  # a recurrent state is kept for each
    ],
)
async def test_it_says_nothing_about_another_combination(other: object, backend: FakeBackend) -> None:
    ledger = Ledger()
    await ledger.record(backend, SPEC, RequiredMemory(7))
    assert (await ledger.required(backend, other)).ram in (50, 100)  # type: ignore[arg-type]


async def test_nor_about_another_version_of_the_engine(monkeypatch: pytest.MonkeyPatch, backend: FakeBackend) -> None:
    ledger = Ledger()
    await ledger.record(backend, SPEC, RequiredMemory(7))
    monkeypatch.setattr(backend, "version", lambda: "2.0", raising=False)
    assert await ledger.required(backend, SPEC) == RequiredMemory(100)


async def test_nor_about_other_settings_of_the_backend(tmp_path: Path) -> None:
    """A prompt cache that was switched on takes memory."""

    class Cache(BaseModel):
        prompt_cache: int = 0

    class Caching(FakeBackend):
        settings_model = Cache

        def __init__(self, size: int) -> None:
            super().__init__({"a": Engine(100)})
            self.settings = Cache(prompt_cache=size)

    file = tmp_path / "memory.json"
    await Ledger(file).record(Caching(0), SPEC, RequiredMemory(7))
    assert await Ledger(file).required(Caching(50), SPEC) == RequiredMemory(100)
    assert await Ledger(file).required(Caching(0), SPEC) == RequiredMemory(7)


async def test_devices_that_were_not_measured_keep_their_estimate(backend: FakeBackend) -> None:
    class OnDevice(FakeBackend):
        async def required_memory(self, spec: object) -> RequiredMemory:
            return RequiredMemory(100, (500,))

    ledger, device = Ledger(), OnDevice({})
    await ledger.required(device, SPEC)
    assert await ledger.record(device, SPEC, RequiredMemory(80)) == RequiredMemory(80, (500,))
    assert await ledger.record(device, SPEC, RequiredMemory(80, (600,))) == RequiredMemory(80, (600,))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 1, "figures": {}}', '{"format": 2, "figures": {"x": 3}}']
)
async def test_a_damaged_file_is_said_and_started_anew(
    content: str, tmp_path: Path, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "memory.json"
    file.write_text(content)
    with caplog.at_level(logging.WARNING):
        ledger = Ledger(file)
    assert "set aside as memory.json.corrupt-" in caplog.text
    await ledger.record(backend, SPEC, RequiredMemory(80))
    assert await Ledger(file).required(backend, SPEC) == RequiredMemory(80)


async def test_a_file_that_cannot_be_written_costs_the_memory_of_it_only(
    tmp_path: Path, backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    ledger = Ledger(tmp_path / "state" / "memory.json")
    assert await ledger.record(backend, SPEC, RequiredMemory(80)) == RequiredMemory(80)
    assert "cannot be written" in caplog.text
    assert await ledger.required(backend, SPEC) == RequiredMemory(80)


class Growing(FakeBackend):
    """Its engines grow by 30 after their load."""

    def growth(self, spec: RunSpec) -> RequiredMemory:
        return RequiredMemory(30)


@pytest.fixture
def growing() -> Growing:
    return Growing({"a": Engine(100), "b": Engine(50)})


async def test_a_fresh_load_counts_for_what_it_will_grow_to(growing: Growing) -> None:
    ledger = Ledger()
    assert await ledger.record(growing, SPEC, RequiredMemory(80, shared=60), fresh=True) == RequiredMemory(
        110, shared=60
    )
    assert await ledger.record(growing, SPEC, RequiredMemory(90, shared=60)) == RequiredMemory(110, shared=60)
    assert await ledger.record(growing, SPEC, RequiredMemory(115, shared=60)) == RequiredMemory(115, shared=60)
    assert await ledger.required(growing, SPEC) == RequiredMemory(115, shared=60)


async def test_an_engine_sees_its_devices_in_its_own_order() -> None:
    """Its device 0 shares the main memory, and 1 and 2 are the budget's 2 and 0."""

    class Engines(FakeBackend):
        async def variants(self, spec: RunSpec, budget: RequiredMemory) -> list[Variant]:
            assert budget.vram == (0, 30, 10)
            return [Variant(spec, RequiredMemory(1, (0, 5, 0))), Variant(spec, RequiredMemory(1, (0, 0, 6)))]

    budget, backend = RequiredMemory(100, (10, 20, 30)), Engines({"a": Engine(100)})
    found = await Ledger().variants(backend, SPEC, budget, lambda devices: str(devices), (-1, 2, 0))
    assert [variant.memory.devices for variant in found] == [(2,), (0,)]
