"""Models that come and go as files: tar archives (/models/REF/export, /models/load), and what other programs keep on
this machine (/models/import)."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from modelrunner import wire
from modelrunner.api.documented import PROGRESS, check_local, documented
from modelrunner.api.messages import decode_reference, json_response, query_flag, read_json
from modelrunner.api.reach import Reach
from modelrunner.api.streaming import body_pieces, stream_progress
from modelrunner.errors import UnsupportedMediaType
from modelrunner.models.foreign import ForeignStores
from modelrunner.models.library import Library
from modelrunner.models.orders import PullOrder
from modelrunner.progress import ProgressReport

_TYPES = ("application/x-tar", "application/octet-stream")
_LOCAL = {"": "models of other programs are seen and taken"}


class ArchiveRoutes:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._reach = Reach(library)

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/models/{ref:.+}/export", self.export), web.post("/models/load", self.load)]

    @documented({_TYPES[0]: bytes}, query={}, errors=(422,))
    async def export(self, request: web.Request) -> web.StreamResponse:
        """Sends a model as a tar archive. An answer shorter than its Content-Length is incomplete: a file was removed
        or damaged meanwhile."""
        reference = decode_reference(request.rel_url.raw_path.removeprefix("/models/").removesuffix("/export"))
        self._reach.check(request, reference)
        archive = await asyncio.to_thread(self._library.archive, reference)
        response = web.StreamResponse(
            headers={
                "Content-Type": _TYPES[0],
                "Content-Disposition": f'attachment; filename="{archive.model_id[7:19]}.tar"',
                "Content-Length": str(archive.size),
            }
        )
        await response.prepare(request)
        pieces = archive.pieces()
        while piece := await asyncio.to_thread(next, pieces, b""):
            await response.write(piece)
        await response.write_eof()
        return response

    @documented(
        PROGRESS,
        body=dict.fromkeys(_TYPES, bytes),
        query={"name": str, "trust": bool},
        errors=(409, 422, 507),
        local={"trust": "a model's code can be trusted"},
    )
    async def load(self, request: web.Request) -> web.StreamResponse:
        """Takes the models of a tar archive, as `GET /models/REF/export` sends it. `name` is another name for its one
        model; `trust` takes models that carry code."""
        if request.content_type not in _TYPES:  # a web page sends these types only after a preflight
            raise UnsupportedMediaType(f"send the archive with Content-Type: {_TYPES[0]}")
        name, trust = request.query.get("name"), query_flag(request, "trust")
        if trust:
            check_local(request, "trust")
        if name is None:  # the archive names its models itself
            self._reach.check_all(request)
        else:
            self._reach.check_names(request, name)

        async def load(report: ProgressReport) -> wire.Progress:
            size = request.content_length or 0
            loaded = await self._library.load(
                body_pieces(request, "the archive"), report, name=name, trust=trust, size=size
            )
            names = ", ".join(model.name for model in loaded)
            return wire.Progress("success", f"{names} is here", model=loaded[0].name)

        return await stream_progress(request, load, mode="load")


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
        models = await asyncio.to_thread(lambda: self._foreign.find(self._folder()))
        return json_response(
            [wire.Importable(m.name, m.program, m.size, str(m.cost), str(m.file), m.name in here) for m in models]
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
