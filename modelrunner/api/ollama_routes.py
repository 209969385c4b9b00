"""Ollama's routes about models: listing, pulling, pushing, copying, making and removing them."""

from aiohttp import web

from modelrunner.api import ollama_forms
from modelrunner.api.documented import documented
from modelrunner.api.messages import json_response, read_json
from modelrunner.api.ollama_forms import (
    OllamaCopyRequest,
    OllamaCreateRequest,
    OllamaList,
    OllamaModelRequest,
    OllamaProgress,
    OllamaRunners,
    OllamaShown,
    OllamaVersion,
)
from modelrunner.api.reach import FILE_IS_PACKAGED, Reach
from modelrunner.api.streaming import Work, body_pieces, stream_progress
from modelrunner.errors import BadRequest, NotFound
from modelrunner.models.library import Library
from modelrunner.models.making import Maker
from modelrunner.models.orders import PullOrder
from modelrunner.models.publishing import Publisher
from modelrunner.progress import ProgressReport
from modelrunner.scheduler import Scheduler
from modelrunner.wire import Progress

_PROGRESS = {"application/x-ndjson": dict, "application/json": dict}


class OllamaRoutes:
    def __init__(self, library: Library, scheduler: Scheduler, publisher: Publisher, maker: Maker) -> None:
        self._library = library
        self._reach = Reach(library)
        self._maker = maker
        self._publisher = publisher
        self._scheduler = scheduler

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/version", self.version),
            web.get("/api/tags", self.tags),
            web.get("/api/ps", self.ps),
            web.post("/api/show", self.show),
            web.post("/api/pull", self.pull),
            web.post("/api/push", self.push),
            web.post("/api/copy", self.copy),
            web.delete("/api/delete", self.delete),
            web.post("/api/create", self.create),
            web.head("/api/blobs/{digest}", self.has_blob),
            web.post("/api/blobs/{digest}", self.put_blob),
        ]

    @documented(OllamaVersion)
    async def version(self, request: web.Request) -> web.Response:
        """Tells the version of Ollama whose API this is."""
        return json_response(OllamaVersion(ollama_forms.API_VERSION))

    @documented(OllamaList)
    async def tags(self, request: web.Request) -> web.Response:
        """Lists the models."""
        models = await self._reach.named(request, self._library, "ollama")
        return json_response(OllamaList([ollama_forms.listed(*model) for model in models]))

    @documented(OllamaRunners)
    async def ps(self, request: web.Request) -> web.Response:
        """Lists the loaded models."""
        models = {model.id: model for model in self._library}
        visible = {model.id for model in self._reach.shown(request, models.values())}
        running = [
            ollama_forms.running(view, model_id, name, models.get(model_id))
            for view in self._scheduler.runners()
            if view.state in ("ready", "sleeping", "draining")
            for model_id, name in view.models.items()
            if model_id in visible or self._reach.allows(request, name)
        ]
        return json_response(OllamaRunners(running))

    @documented(OllamaShown, body=OllamaModelRequest, errors=(422,))
    async def show(self, request: web.Request) -> web.Response:
        """Shows a model."""
        reference = self._library.aliases.meant((await read_json(request, OllamaModelRequest)).reference, "ollama")
        self._reach.check(request, reference)
        model, name, abilities = await self._library.described(reference)
        details = await self._library.details(model)
        return json_response(ollama_forms.shown(name, model, abilities, details))

    @documented(
        _PROGRESS,
        body=OllamaModelRequest,
        errors=(409, 422, 501, 502, 504, 507),
        local={"model": FILE_IS_PACKAGED},
    )
    async def pull(self, request: web.Request) -> web.StreamResponse:
        """Pulls a model."""
        wanted = await read_json(request, OllamaModelRequest)
        order = PullOrder(wanted.reference)
        _refuse_insecure(wanted)
        self._reach.check_order(request, order, "model")

        async def pull(report: ProgressReport) -> Progress:
            name = (await self._library.pull(order, report)).name
            return Progress("success", f"{name} is here", model=name)

        return await _streamed(request, wanted, pull, mode="pull")

    @documented(_PROGRESS, body=OllamaModelRequest, errors=(409, 422, 501, 502, 504, 507))
    async def push(self, request: web.Request) -> web.StreamResponse:
        """Pushes a model to a registry."""
        wanted = await read_json(request, OllamaModelRequest)
        _refuse_insecure(wanted)
        reference = wanted.reference
        self._reach.check(request, reference)

        async def push(report: ProgressReport) -> Progress:
            pushed = await self._publisher.push(reference, None, report)
            return Progress("success", f"pushed {pushed}", model=pushed)

        return await _streamed(request, wanted, push, mode="push")

    @documented(body=OllamaCopyRequest, errors=(409, 422))
    async def copy(self, request: web.Request) -> web.Response:
        """Gives a model another name."""
        wanted = await read_json(request, OllamaCopyRequest)
        self._reach.check(request, wanted.source)
        self._reach.check_names(request, wanted.destination)
        await self._library.tag(wanted.source, wanted.destination)
        return web.Response()

    @documented(body=OllamaModelRequest, errors=(409,))
    async def delete(self, request: web.Request) -> web.Response:
        """Removes a name of a model, and the model with its last name."""
        reference = (await read_json(request, OllamaModelRequest)).reference
        self._reach.check_removal(request, reference)
        await self._library.remove(reference)
        return web.Response()

    @documented(_PROGRESS, body=OllamaCreateRequest, errors=(409, 422, 501, 502, 504, 507))
    async def create(self, request: web.Request) -> web.StreamResponse:
        """Makes a model from another one, or from files that were sent before."""
        wanted = await read_json(request, OllamaCreateRequest)
        order = wanted.order()
        self._reach.check_order(request, self._maker.pull_order(order))
        await self._reach.check_files(request, {**(wanted.files or {}), **(wanted.adapters or {})})

        async def make(report: ProgressReport) -> Progress:
            name = await self._maker.make(order, report)
            return Progress("success", f"{name} is here", model=name)

        return await _streamed(request, wanted, make, mode="create")

    @documented()
    async def has_blob(self, request: web.Request) -> web.Response:
        """Tells whether a file is here."""
        if not await self._reach.has_file(request, request.match_info["digest"]):
            raise NotFound("there is no file with this digest")
        return web.Response()

    @documented(status=201, body={"application/octet-stream": bytes}, also={200: None}, errors=(413, 507))
    async def put_blob(self, request: web.Request) -> web.Response:
        """Takes a file for a model that is made later; its content must have the digest."""
        digest = request.match_info["digest"]
        if await self._reach.has_file(request, digest):
            return web.Response()
        await self._library.upload(digest, body_pieces(request, "the file"), request.content_length or 0)
        return web.Response(status=201)


async def _streamed(request: web.Request, wanted: OllamaModelRequest, work: Work, *, mode: str) -> web.StreamResponse:
    """Answers with the progress of the work, or only with its end if the client wants no stream."""
    if wanted.stream is False:
        await work(lambda step: None)
        return json_response({"status": "success"})
    return await stream_progress(request, work, mode=mode, lines=OllamaProgress)


def _refuse_insecure(wanted: OllamaModelRequest) -> None:
    if wanted.insecure:
        raise BadRequest(
            "only the configuration turns TLS off: leave `insecure` out, and write plain_http = true into the table of"
            " the registry",
            param="insecure",
        )
