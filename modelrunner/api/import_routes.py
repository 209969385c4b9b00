"""/models/import: models that other programs keep on this machine."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from modelrunner import wire
from modelrunner.api.documented import PROGRESS, documented
from modelrunner.api.messages import json_response, read_json
from modelrunner.api.reach import Reach
from modelrunner.api.streaming import stream_progress
from modelrunner.models.foreign import ForeignStores
from modelrunner.models.library import Library
from modelrunner.models.orders import PullOrder
from modelrunner.progress import ProgressReport

_LOCAL = {"": "models of other programs are seen and taken"}


class ImportRoutes:
    """Serves only the Unix socket, whose clients may read these files themselves. `folder` returns a folder of the
    store."""

    def __init__(self, library: Library, foreign: ForeignStores, folder: Callable[[], Path]) -> None:
        self._library = library
        self._reach = Reach(library)
        self._foreign = foreign
        self._folder = folder

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/models/import", self.list), web.post("/models/import", self.take)]

    @documented(list[wire.Importable], query={}, local=_LOCAL)
    async def list(self, request: web.Request) -> web.Response:
        """Lists the models that other programs keep on this machine."""
        here = {name for model in self._library for name in model.tags}
        found = await asyncio.to_thread(lambda: self._foreign.find(self._folder()))
        return json_response(
            [wire.Importable(m.name, m.program, m.size, str(m.cost), str(m.file), m.name in here) for m in found]
        )

    @documented(PROGRESS, body=wire.ImportRequest, errors=(409, 422, 507), local=_LOCAL)
    async def take(self, request: web.Request) -> web.StreamResponse:
        """Imports a model of another program."""
        wanted = await read_json(request, wire.ImportRequest)
        model = await asyncio.to_thread(lambda: self._foreign.get(wanted.model, self._folder()))
        recipe = await asyncio.to_thread(model.recipe)
        order = PullOrder(model.source, wanted.name or model.name, recipe=recipe)
        self._reach.check_order(request, order)

        async def take(report: ProgressReport) -> wire.Progress:
            name = (await self._library.pull(order, report)).name
            return wire.Progress("success", f"{name} is here, by {model.cost} from {model.program}", model=name)

        return await stream_progress(request, take, mode="import")
