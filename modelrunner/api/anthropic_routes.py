"""Anthropic's list of models. Messages are inference (gateway/dialects/anthropic.py).

Source of the shapes: https://docs.claude.com/en/api/models-list
"""

from datetime import UTC, datetime

from aiohttp import web

from modelrunner import wire
from modelrunner.api.documented import documented
from modelrunner.api.messages import json_response, reference_in_path
from modelrunner.api.reach import Reach
from modelrunner.models.abilities import Abilities
from modelrunner.models.library import Library
from modelrunner.store import StoredModel

_PATH = "/anthropic/v1/models"


class AnthropicRoutes:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._reach = Reach(library)

    def routes(self) -> list[web.RouteDef]:
        return [web.get(_PATH, self.list_models), web.get(f"{_PATH}/{{ref:.+}}", self.get)]

    @documented(wire.AnthropicModels)
    async def list_models(self, request: web.Request) -> web.Response:
        """Lists the models in Anthropic's form: an entry for each name, all on one page."""
        data = [self._shown(*model) for model in await self._reach.named(request, self._library, "anthropic")]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return json_response(wire.AnthropicModels(data, *ends))

    @documented(wire.AnthropicModel, errors=(422,))
    async def get(self, request: web.Request) -> web.Response:
        """Shows a model in Anthropic's form."""
        alias = reference_in_path(request, f"{_PATH}/")
        reference = self._library.aliases.meant(alias, "anthropic")
        self._reach.check(request, reference)
        model, name, abilities = await self._library.described(reference)
        name = name if alias == reference else alias
        return json_response(self._shown(name, model, abilities))

    @staticmethod
    def _shown(name: str, model: StoredModel, abilities: Abilities) -> wire.AnthropicModel:
        window = abilities.window or model.config.get("context_size")
        return wire.AnthropicModel(name, name, datetime.fromtimestamp(model.created, UTC), window)
