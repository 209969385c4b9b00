"""What a list of thousands of models shows before everything about them is known."""

import asyncio
import contextlib
from pathlib import Path
from typing import cast

from modelrunner.errors import BackendUnavailable
from modelrunner.models.abilities import Abilities, KnownAbilities
from modelrunner.models.configurations import Configurations
from modelrunner.models.rendering import Renderings
from modelrunner.models.resolve import Resolver
from modelrunner.store import Store
from tests.opened import opened_in
from tests.store.samples import add_model
from tests.waiting import HUNG


class NoBackend:
    """A resolver without backends."""

    def backend_of(self, *_: object) -> None:
        raise BackendUnavailable("there is none")


def known_in(folder: Path, store: Store) -> KnownAbilities:
    configurations = Configurations(folder / "configurations.json", tables={}, model_id=lambda _: None)
    resolver, renderings = cast("Resolver", NoBackend()), Renderings(folder / "templates.json")
    return KnownAbilities(store, resolver, configurations, renderings, folder / "abilities.json", most=1)


async def test_a_long_list_shows_what_was_known_last(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    models = [add_model(store, f"m{seed}", seed) for seed in range(3)]
    known = known_in(tmp_path, store)
    assert known.of(models) == [(model, Abilities()) for model in models]
    learning = asyncio.create_task(known.learn())
    shown = [(model, Abilities(capabilities=("completion",))) for model in models]
    async with asyncio.timeout(HUNG):
        while known.of(models) != shown:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    known.forget()
    assert known.of(models) == shown
    learning.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await learning
    with opened_in(store.data) as opened:
        assert known_in(tmp_path, store).of(models) == shown
    assert opened == []


async def test_a_short_list_waits_for_what_is_right(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    model = add_model(store, "m")
    assert known_in(tmp_path, store).of([model]) == [(model, Abilities(capabilities=("completion",)))]
