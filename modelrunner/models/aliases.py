"""Aliases: other names for models, for programs that use fixed names."""

import asyncio
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from modelrunner.aliases import Alias, AliasPolicy
from modelrunner.errors import ModelRunnerError
from modelrunner.models.resolve import Resolver
from modelrunner.scheduler import Phase, Scheduler
from modelrunner.store import Store, StoredModel
from modelrunner.types import Mode

LATEST = ":latest"
"""The tag of a name without one, which Ollama's clients add."""


class Aliases:
    """The aliases of the configuration. An exact name comes before a pattern; of patterns, the first match counts."""

    def __init__(self, store: Store, resolver: Resolver, scheduler: Scheduler, aliases: Mapping[str, Alias]) -> None:
        self._store = store
        self._resolver = resolver
        self._scheduler = scheduler
        self.set(aliases)

    def set(self, aliases: Mapping[str, Alias]) -> None:
        """Replaces all aliases. In a pattern `*` stands for any text, and every other sign for itself."""
        self._exact = {name: alias for name, alias in aliases.items() if "*" not in name}
        self._patterns = [(re.sub(r"[?[]", r"[\g<0>]", name), alias) for name, alias in aliases.items() if "*" in name]

    def find(self, family: str, name: str) -> Alias | None:
        """Returns the alias that a request of the family means, None for a model's own name."""
        exact = self._exact.get(name) or self._exact.get(name.removesuffix(LATEST))
        if exact is not None and exact.holds_for(family):
            return exact
        fitting = (one for pattern, one in self._patterns if one.holds_for(family) and fnmatchcase(name, pattern))
        return next(fitting, None)

    def listed(self, models: Iterable[tuple[StoredModel, object]], family: str = "openai") -> dict[str, list[str]]:
        """Returns the aliases of the family that none of the `models` has as a name, by the ID of the model that
        answers; without patterns, which stand for names without end."""
        names: dict[str, list[str]] = {}
        if self._exact:
            taken = {name for model, _ in models for name in model.tags}
            for name in [name for name, alias in self._exact.items() if alias.holds_for(family) and name not in taken]:
                if (model_id := self._id(self.meant(name, family))) is not None:
                    names.setdefault(model_id, []).append(name)
        return names

    def meant(self, name: str, family: str = "openai") -> str:
        """Returns the first model that is here of an alias, or the first of all; any other name as it is."""
        alias = self.find(family, name)
        if alias is None:
            return name
        return next((model for model in alias.models if self._id(model) is not None), alias.models[0])

    async def choose(self, alias: Alias, backend: str | None, mode: Mode) -> str:
        """Returns one of the alias's models, by its policy; the first one if none of them is here."""
        here = [name for name in alias.models if self._id(name) is not None]
        if len(here) < 2 or alias.policy is AliasPolicy.FIRST:
            return next(iter(here), alias.models[0])
        up = (Phase.READY, Phase.SLEEPING)
        views = [view for view in self._scheduler.runners() if view.mode is mode and view.state in up]
        loaded = {model_id for view in views for model_id in view.models}
        for name in here:
            if self._id(name) in loaded:
                return name
            if alias.policy is AliasPolicy.FITS and await self._fits(name, backend, mode):
                return name
        return here[0]

    def _id(self, name: str) -> str | None:
        try:
            return self._store.get(name).id
        except ModelRunnerError:
            return None

    async def _fits(self, name: str, backend: str | None, mode: Mode) -> bool:
        try:
            await asyncio.to_thread(self._store.bundle, name)
            await self._resolver.prepare(backend, name, mode)
            forecast = await self._scheduler.diagnostics.fit(self._resolver(backend, name, mode))
        except ModelRunnerError:
            return False
        return forecast.fits == "now"
