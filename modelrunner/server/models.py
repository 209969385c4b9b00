"""/models, and the OpenAI list of models: what is on disk, pulling, tagging, removing."""

from collections.abc import Sequence

from aiohttp import web

from modelrunner import api
from modelrunner.errors import BadRequest, Forbidden, ModelNotFound, NotImplementedHere, RouteNotFound
from modelrunner.models.library import Library, PullOrder
from modelrunner.server import wireforms
from modelrunner.server.messages import (
    check_query,
    json_response,
    query_flag,
    read_json,
    reference_and_action,
    reference_in_path,
)
from modelrunner.server.middleware import is_local
from modelrunner.server.streaming import stream_progress
from modelrunner.store import StoredModel
from modelrunner.types import ProgressReport


class ModelRoutes:
    def __init__(self, library: Library) -> None:
        self._library = library

    def routes(self) -> list[web.RouteDef]:
        openai = [
            route
            for prefix in ("", "/engines", "/engines/{backend}")
            for route in (
                web.get(prefix + "/v1/models", self.list_openai),
                web.get(prefix + "/v1/models/{ref:.+}", self.get_openai),
                web.delete(prefix + "/v1/models/{ref:.+}", self.delete_openai),
            )
        ]
        return [
            web.get("/models", self.list),
            web.post("/models/create", self.create),
            web.post("/models/prune", self.prune),
            web.get("/models/{ref:.+}", self.get),
            web.delete("/models/{ref:.+}", self.delete),
            web.post("/models/{ref:.+}", self.act),
            *openai,
        ]

    async def list(self, request: web.Request) -> web.Response:
        return json_response([wireforms.model(model) for model in (*self._library, *self._library.damaged())])

    async def get(self, request: web.Request) -> web.Response:
        check_query(request, "remote")
        if query_flag(request, "remote"):
            raise NotImplementedHere("a model can be shown here once it was pulled: leave `remote` out", param="remote")
        return json_response(wireforms.model(self._library.get(reference_in_path(request, "/models/"))))

    async def create(self, request: web.Request) -> web.StreamResponse:
        wanted = await read_json(request, api.PullRequest)
        order = PullOrder(
            wanted.from_, wanted.name, wanted.bearer_token, trust=wanted.trust_remote_code, verify=wanted.verify
        )
        if order.is_local and not is_local(request):
            raise Forbidden("a file of this machine is packaged only over the Unix socket", param="from")
        if order.trust and not is_local(request):
            raise Forbidden("a model's code can be trusted only over the Unix socket", param="trust-remote-code")

        async def pull(report: ProgressReport) -> api.Progress:
            name = (await self._library.pull(order, report)).name
            return api.Progress("success", f"{name} is here", model=name)

        return await stream_progress(request, pull, mode="pull")

    async def prune(self, request: web.Request) -> web.Response:
        check_query(request)
        return json_response(api.Pruned(sum(leftover.size for leftover in await self._library.prune())))

    async def delete(self, request: web.Request) -> web.Response:
        check_query(request, "force")
        reference = reference_in_path(request, "/models/")
        removed = await self._library.remove(reference, force=query_flag(request, "force"))
        return json_response(wireforms.removed(removed))

    async def act(self, request: web.Request) -> web.Response:
        reference, action = reference_and_action(request, "/models/")
        if action != "tag":
            raise RouteNotFound(f"there is no action {action!r} for a model")
        check_query(request, "repo", "tag")
        repository, tag = request.query.get("repo", ""), request.query.get("tag", "")
        if not repository:
            raise BadRequest("repo names no repository: ?repo=NAME&tag=TAG", param="repo")
        target = f"{repository}:{tag}" if tag else repository
        await self._library.tag(reference, target)
        return json_response({"message": f"{reference} is tagged {target}", "target": target}, status=201)

    async def list_openai(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": await self._openai(request, list(self._library))})

    async def get_openai(self, request: web.Request) -> web.Response:
        model = self._library.get(reference_in_path(request, "/v1/models/"))
        found = await self._openai(request, [model])
        if not found:
            raise ModelNotFound(f"{request.match_info['backend']} cannot serve {model.name}", param="model")
        return json_response(found[0])

    async def delete_openai(self, request: web.Request) -> web.Response:
        check_query(request, "force")
        reference = reference_in_path(request, "/v1/models/")
        await self._library.remove(reference, force=query_flag(request, "force"))
        return json_response({"id": reference, "object": "model", "deleted": True})

    async def _openai(self, request: web.Request, models: Sequence[StoredModel]) -> Sequence[dict[str, object]]:
        """Those of the models that the backend of the path can serve, if it names one."""
        if backend := request.match_info.get("backend"):
            models = [model for model in models if self._library.serves(backend, model)]
        return [
            {
                "id": model.name,
                "object": "model",
                "created": model.created,
                "owned_by": "modelrunner",
                "architecture": model.config.get("architecture"),
                "context_window": window or model.config.get("context_size"),
                "backend": backend,
            }
            for model, backend, window in zip(
                models, await self._library.backends(models), await self._library.windows(models), strict=True
            )
        ]
