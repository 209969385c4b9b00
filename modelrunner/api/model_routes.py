"""/models: listing, pulling, verifying, tagging and removing models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from modelrunner import wire
from modelrunner.api import modelforms
from modelrunner.api.documented import PROGRESS, check_local, documented
from modelrunner.api.messages import (
    decode_reference,
    json_response,
    query_count,
    query_flag,
    read_json,
    reference_in_path,
)
from modelrunner.api.middleware import check_scope
from modelrunner.api.reach import FILE_IS_PACKAGED, Reach
from modelrunner.api.streaming import stream_progress
from modelrunner.defaults import NO_DEFAULTS
from modelrunner.errors import BadRequest, RouteNotFound
from modelrunner.keys.ring import Scope
from modelrunner.models.abilities import Abilities
from modelrunner.models.disk import Pruner, PruneRule
from modelrunner.models.library import Library
from modelrunner.models.making import Quantizer
from modelrunner.models.orders import PullOrder, Recipe, parse_extras
from modelrunner.models.publishing import Publisher, RemoteModel, RemoteModels
from modelrunner.progress import ProgressReport
from modelrunner.store import RemoveResult, StoredModel
from modelrunner.store.details import ModelDetails
from modelrunner.types import DECLARED, ModelFormat, in_order
from modelrunner.units import parse_age, parse_bytes

# Words in place of a model that are routes for another method, or routes of docker/model-runner. A model of such a name
# is reached by its longer name.
_LONGEST_QUERY = 200
_MOST_OFFERS = 100
_WORDS = frozenset({"create", "load", "prune", "purge", "search"})


class ModelRoutes:
    def __init__(
        self, library: Library, remote: RemoteModels, quantizer: Quantizer, publisher: Publisher, pruner: Pruner
    ) -> None:
        self._library = library
        self._reach = Reach(library)
        self._remote = remote
        self._quantizer = quantizer
        self._publisher = publisher
        self._pruner = pruner

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/updates", self.updates),
            web.get("/models/search", self.search),
            web.get("/pulls", self.pulls),
            web.delete("/pulls/{ref:.+}", self.cancel_pull),
            web.get("/models", self.list_models),
            web.post("/models/create", self.create),
            web.post("/models/prune", self.prune),
            web.get("/models/{ref:.+}/show", self.show),
            web.post("/models/{ref:.+}/repackage", self.repackage),
            web.post("/models/{ref:.+}/quantize", self.quantize),
            web.get("/models/{ref:.+}", self.get),
            web.delete("/models/{ref:.+}", self.delete),
            web.post("/models/{ref:.+}/tag", self.tag),
            web.post("/models/{ref:.+}/verify", self.verify),
            web.post("/models/{ref:.+}/move", self.move),
            web.post("/models/{ref:.+}/check", self.check),
            web.post("/models/{ref:.+}/push", self.push),
        ]

    @documented(list[wire.Model])
    async def list_models(self, request: web.Request) -> web.Response:
        """Lists the models."""
        models = await self._reach.listed(request, await self._library.all_models())
        aliases = self._library.aliases.listed(models)
        return json_response([_model(model, able, aliases.get(model.id, ())) for model, able in models])

    @documented(wire.Model, query={"remote": bool}, errors=(422, 501, 502))
    async def get(self, request: web.Request) -> web.Response:
        """Shows a model; with `remote` the model at its source, without a pull."""
        reference = self._library.aliases.meant(_reference(request))
        self._reach.check(request, reference)
        if query_flag(request, "remote"):
            check_scope(request, Scope.MODELS)
            return json_response(_remote_model(await self._remote.get(reference)))
        model, _, abilities = await self._library.described(reference)
        shown = _model(model, abilities)
        origins = [] if model.format == DECLARED else self._library.origins(model)
        return json_response(msgspec.structs.replace(shown, origins=origins))

    @documented(
        PROGRESS,
        body=wire.PullRequest,
        also={202: wire.PullBegun},
        errors=(409, 422, 501, 502, 504, 507),
        local={"from": FILE_IS_PACKAGED, "trust-remote-code": "a model's code can be trusted"},
    )
    async def create(self, request: web.Request) -> web.StreamResponse:
        """Pulls a model, packages a file of this machine, or makes a model of another one."""
        wanted = await read_json(request, wire.PullRequest)
        order = PullOrder(
            wanted.from_,
            wanted.name,
            wanted.bearer_token,
            trust=wanted.trust_remote_code,
            verify=wanted.verify,
            extras=parse_extras(wanted.mmproj, wanted.chat_template, wanted.lora),
            verify_key=wanted.verify_key,
            folder=Path(wanted.folder) if wanted.folder else None,
            recipe=Recipe(
                wanted.system,
                wanted.template,
                wanted.parameters,
                tuple((message.role, message.content) for message in wanted.messages),
                tuple(wanted.license),
                wanted.context_size,
            ),
        )
        if order.trust:
            check_local(request, "trust-remote-code")
        self._reach.check_order(request, order, "from")
        if wanted.background:
            await self._library.begin(order)
            return json_response(wire.PullBegun(wanted.name or wanted.from_), status=202)

        async def pull(report: ProgressReport) -> wire.Progress:
            name = (await self._library.pull(order, report)).name
            return wire.Progress("success", f"{name} is here", model=name)

        return await stream_progress(request, pull, mode="pull")

    @documented(list[wire.Update], query={"model": str}, errors=(422,))
    async def updates(self, request: web.Request) -> web.Response:
        """Asks whether the sources of a model, or of all pulled models, have a newer version."""
        models = self._reach.shown(request, self._library)
        if (reference := request.query.get("model")) is not None:
            self._reach.check(request, reference)
            models = [self._library.get(reference)]
        return json_response(await self._library.updates(models))

    @documented(list[wire.Offer], query={"q": str, "format": str, "limit": int}, errors=(502,))
    async def search(self, request: web.Request) -> web.Response:
        """Finds models that hubs offer."""
        query, format = request.query.get("q", "").strip(), request.query.get("format", ModelFormat.GGUF)
        if not query or len(query) > _LONGEST_QUERY:
            raise BadRequest(f"q has the words of the search, at most {_LONGEST_QUERY} characters", param="q")
        if format not in list(ModelFormat):
            raise BadRequest(f"format is one of {', '.join(ModelFormat)}", param="format")
        limit = min(query_count(request, "limit") or 20, _MOST_OFFERS)
        return json_response(await self._library.search(query, ModelFormat(format), limit))

    @documented(list[wire.PullStatus], query={})
    async def pulls(self, request: web.Request) -> web.Response:
        """Lists the pulls under way."""
        pulls = [running for running in self._library.pulls() if self._reach.allows(request, running.name)]
        return json_response([modelforms.pull(running) for running in pulls])

    @documented(wire.Cancelled, query={})
    async def cancel_pull(self, request: web.Request) -> web.Response:
        """Cancels a pull. The received bytes are kept for the next pull."""
        reference = reference_in_path(request, "/pulls/")
        self._reach.check(request, reference)
        pulls = [running.name for running in self._library.pulls() if reference in (running.name, running.source)]
        self._reach.check_names(request, *pulls)
        return json_response(wire.Cancelled(await self._library.cancel_pull(reference)))

    @documented(wire.PruneResponse, query={"unused": str, "to": str, "dry_run": bool}, errors=(409,))
    async def prune(self, request: web.Request) -> web.Response:
        """Removes leftovers or, with `unused` or `to`, the models that were not used for the longest time."""
        self._reach.check_all(request)
        unused, size = request.query.get("unused"), request.query.get("to")
        rule = PruneRule(parse_age(unused) if unused else None, parse_bytes(size) if size else None)
        dry_run = query_flag(request, "dry_run")
        items = await self._pruner.prune(rule, dry_run=dry_run)
        return json_response(wire.PruneResponse(sum(item.size for item in items), items, dry_run))

    @documented(list[wire.Removal], query={"force": bool}, errors=(409,))
    async def delete(self, request: web.Request) -> web.Response:
        """Removes a name of a model, and the model with its last name."""
        reference = _reference(request)
        self._reach.check_removal(request, reference)
        removed = await self._library.remove(reference, force=query_flag(request, "force"))
        return json_response(_removed(removed))

    @documented(
        PROGRESS,
        query={},
        body=wire.PushRequest,
        optional=True,
        errors=(409, 422, 501, 502, 504, 507),
        local={"sign": "a key of this machine signs"},
    )
    async def push(self, request: web.Request) -> web.StreamResponse:
        """Pushes a model to a registry."""
        reference = self._before(request, "/push")
        wanted = await read_json(request, wire.PushRequest) if request.can_read_body else wire.PushRequest()
        if wanted.sign is not None:
            check_local(request, "sign")
        key = Path(wanted.sign) if wanted.sign is not None else None

        async def push(report: ProgressReport) -> wire.Progress:
            pushed = await self._publisher.push(reference, wanted.to, report, token=wanted.bearer_token, key=key)
            return wire.Progress("success", f"pushed {pushed}", model=pushed)

        return await stream_progress(request, push, mode="push")

    @documented(PROGRESS, query={}, errors=(422,))
    async def verify(self, request: web.Request) -> web.StreamResponse:
        """Verifies every byte of a model."""
        reference = self._before(request, "/verify")

        async def verify(report: ProgressReport) -> wire.Progress:
            name = await self._library.verify(reference, report)
            return wire.Progress("success", f"{name} is intact", model=name)

        return await stream_progress(request, verify, mode="verify")

    @documented(PROGRESS, body=wire.MoveRequest, query={}, errors=(409, 422, 503, 507))
    async def move(self, request: web.Request) -> web.StreamResponse:
        """Moves a model to another folder of models."""
        reference = self._before(request, "/move")
        folder = Path((await read_json(request, wire.MoveRequest)).folder)

        async def move(report: ProgressReport) -> wire.Progress:
            name = await self._library.move(reference, folder, report)
            return wire.Progress("success", f"{name} lies in {folder}", model=name)

        return await stream_progress(request, move, mode="move")

    @documented(wire.ModelCheck, body=wire.CheckOutcome, query={}, errors=(422,))
    async def check(self, request: web.Request) -> web.Response:
        """Keeps what a check of a model found; lists show it until the model's files, settings or engine change."""
        reference = self._before(request, "/check", alias=True)
        outcome = await read_json(request, wire.CheckOutcome)
        return json_response(await self._library.keep_check(reference, outcome))

    @documented(wire.ModelShown, query={"remote": bool}, errors=(422, 501, 502))
    async def show(self, request: web.Request) -> web.Response:
        """Shows a model's template, licences and defaults for requests; with `remote` those at its source."""
        reference = self._before(request, "/show", alias=True)
        if query_flag(request, "remote"):
            check_scope(request, Scope.MODELS)
            return json_response(_remote_details(await self._remote.get(reference)))
        model, name, _ = await self._library.described(reference)
        details = await self._library.details(model)
        problem = await self._library.template_problem(model.id) if details.template else ""
        return json_response(_details(name, model, details, problem))

    @documented(
        wire.Repackaged,
        body=wire.RepackageRequest,
        query={},
        status=201,
        errors=(422, 502, 504, 507),
        local={"ref": FILE_IS_PACKAGED},
    )
    async def repackage(self, request: web.Request) -> web.Response:
        """Makes a model of another one, with another context size."""
        reference = self._before(request, "/repackage")
        wanted = await read_json(request, wire.RepackageRequest)
        order = PullOrder(reference, wanted.target, recipe=Recipe(context_size=wanted.context_size))
        self._reach.check_order(request, order, "ref")
        await self._library.make(order, lambda step: None)
        repackaged = wire.Repackaged(f"{reference} is repackaged as {wanted.target}", reference, wanted.target)
        return json_response(repackaged, status=201)

    @documented(PROGRESS, body=wire.QuantizeRequest, query={}, errors=(412, 422, 501, 502, 507))
    async def quantize(self, request: web.Request) -> web.StreamResponse:
        """Makes a model of another one in another quantization, by a tool of its engine."""
        reference = self._before(request, "/quantize")
        wanted = await read_json(request, wire.QuantizeRequest)
        self._reach.check_names(request, wanted.target)

        async def quantize(report: ProgressReport) -> wire.Progress:
            name = await self._quantizer.quantize(
                reference, wanted.target, wanted.type, report, requantize=wanted.requantize
            )
            return wire.Progress("success", f"{name} is here", model=name)

        return await stream_progress(request, quantize, mode="quantize")

    @documented(wire.Tagged, status=201, query={"repo": str, "tag": str}, errors=(409, 422))
    async def tag(self, request: web.Request) -> web.Response:
        """Gives a model another name."""
        reference = self._before(request, "/tag")
        repository, tag = request.query.get("repo", ""), request.query.get("tag", "")
        if not repository:
            raise BadRequest("repo names no repository: ?repo=NAME&tag=TAG", param="repo")
        target = f"{repository}:{tag}" if tag else repository
        self._reach.check_names(request, target)
        await self._library.tag(reference, target)
        return json_response(wire.Tagged(f"{reference} is tagged {target}", target), status=201)

    def _before(self, request: web.Request, action: str, *, alias: bool = False) -> str:
        """Returns the model in the path before `action`; its name may have plain slashes, and be an `alias`. Raises
        `InvalidReference`, and `Forbidden` for a model that the key may not use."""
        reference = decode_reference(request.rel_url.raw_path.partition("/models/")[2].removesuffix(action))
        reference = self._library.aliases.meant(reference) if alias else reference
        self._reach.check(request, reference)
        return reference


def _reference(request: web.Request) -> str:
    """Returns the model in the path. Raises `RouteNotFound` for one of `_WORDS`, `InvalidReference`."""
    reference = reference_in_path(request, "/models/")
    if reference in _WORDS:
        raise RouteNotFound(
            f"there is no {request.method} /models/{reference}; a model of that name is at /models/{reference}:latest"
        )
    return reference


def _model(stored: StoredModel, abilities: Abilities, aliases: Sequence[str] = ()) -> wire.Model:
    return wire.Model(
        stored.id,
        stored.tags,
        stored.created,
        msgspec.Raw(stored.config_data),  # not decoded: there may be thousands of models
        stored.damage,
        list(abilities.capabilities),
        abilities.window,
        list(abilities.adapters),
        aliases=list(aliases),
        check=abilities.check,
    )


def _details(name: str, stored: StoredModel, parts: ModelDetails, template_problem: str) -> wire.ModelShown:
    shown = _shown(name, stored.id, stored.tags, msgspec.Raw(stored.config_data), parts)
    return msgspec.structs.replace(shown, template_problem=template_problem)


def _remote_model(remote: RemoteModel) -> wire.Model:
    """Returns a model at its source, with the ID "" if the source gives none."""
    order = list(in_order(remote.capabilities))
    return wire.Model(_id(remote), [remote.name], 0, remote.config, "", order, remote.config.get("context_size"))


def _remote_details(remote: RemoteModel) -> wire.ModelShown:
    shown = _shown(remote.name, _id(remote), [remote.name], remote.config, remote.details)
    return msgspec.structs.replace(shown, version=remote.version, files=dict(remote.files))


def _id(remote: RemoteModel) -> str:
    return remote.version if remote.version.startswith("sha256:") else ""


def _shown(name: str, id: str, tags: list[str], config: Any, parts: ModelDetails) -> wire.ModelShown:
    carried = parts.defaults or NO_DEFAULTS
    return wire.ModelShown(
        id,
        tags,
        config,
        parts.template,
        parts.template_digest,
        list(parts.licences),
        carried.system,
        [wire.CarriedMessage(message.role, message.content) for message in carried.messages],
        {**carried.parameters, **carried.template_arguments},
        carried.context_size,
        modelforms.modelfile(name, carried),
    )


def _removed(done: RemoveResult) -> list[wire.Removal]:
    untagged = [wire.Removal(untagged=name) for name in done.names]
    return [*untagged, wire.Removal(deleted=done.deleted)] if done.deleted else untagged
