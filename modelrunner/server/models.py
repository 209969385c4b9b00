"""/models, and the OpenAI list of models: what is on disk, pulling, tagging, removing."""

import asyncio

from aiohttp import web

from modelrunner import api
from modelrunner.errors import BadRequest, Conflict, Forbidden, ModelNotFound, ModelRunnerError, RouteNotFound
from modelrunner.pull import Progress, Puller
from modelrunner.registry import BackendRegistry
from modelrunner.scheduler import Scheduler
from modelrunner.server.configurations import Configurations
from modelrunner.server.messages import json_response, query_flag, read_json, reference_and_action, reference_in_path
from modelrunner.server.middleware import is_local
from modelrunner.server.streaming import Report, stream_progress
from modelrunner.store import Store

# Outside the class, whose method `list` hides the type.
Removed = list[api.Untagged | api.Deleted]


class ModelRoutes:
    def __init__(
        self,
        store: Store,
        puller: Puller,
        scheduler: Scheduler,
        registry: BackendRegistry,
        configurations: Configurations,
    ) -> None:
        self._store = store
        self._puller = puller
        self._scheduler = scheduler
        self._registry = registry
        self._configurations = configurations

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
        return json_response(self._store.list())

    async def get(self, request: web.Request) -> web.Response:
        return json_response(self._store.get(reference_in_path(request, "/models/")))

    async def create(self, request: web.Request) -> web.StreamResponse:
        wanted = await read_json(request, api.PullRequest)
        if not wanted.from_.strip():
            raise BadRequest("from names no model", param="from")
        if wanted.from_.strip().lower().startswith("file:") and not is_local(request):
            raise Forbidden("a file of this machine is packaged only over the Unix socket", param="from")
        if wanted.trust_remote_code and not is_local(request):
            raise Forbidden("a model's code can be trusted only over the Unix socket", param="trust-remote-code")

        async def pull(report: Report) -> api.Progress:
            try:
                model = await self._puller.pull(
                    wanted.from_,
                    lambda line: report(_line(line)),
                    token=wanted.bearer_token,
                    name=wanted.name,
                    trust=wanted.trust_remote_code,
                    verify=wanted.verify,
                )
            except ModelRunnerError as error:
                self._scheduler.events.emit("pull", model=wanted.name or wanted.from_, reason=f"failed: {error}")
                raise
            self._scheduler.events.emit("pull", model=model.name, reason=f"pulled from {wanted.from_}")
            return api.Progress("success", f"{model.name} is here", model=model.name)

        return await stream_progress(request, pull, mode="pull")

    async def prune(self, request: web.Request) -> web.Response:
        """Removes what unfinished pulls left, but not of those that run."""
        return json_response(api.Pruned(await asyncio.to_thread(self._puller.leftovers.clear, 0)))

    async def delete(self, request: web.Request) -> web.Response:
        reference = reference_in_path(request, "/models/")
        return json_response(await asyncio.shield(self._remove(reference, force=query_flag(request, "force"))))

    async def act(self, request: web.Request) -> web.Response:
        reference, action = reference_and_action(request, "/models/")
        if action != "tag":
            raise RouteNotFound(f"there is no action {action!r} for a model")
        return await self._tag(reference, request.query.get("repo", ""), request.query.get("tag", ""))

    async def list_openai(self, request: web.Request) -> web.Response:
        models = [self._openai(model) for model in self._store.list() if self._served(request, model)]
        return json_response({"object": "list", "data": models})

    async def get_openai(self, request: web.Request) -> web.Response:
        model = self._store.get(reference_in_path(request, "/v1/models/"))
        if not self._served(request, model):
            raise ModelNotFound(f"{request.match_info['backend']} cannot serve {model.name}", param="model")
        return json_response(self._openai(model))

    async def delete_openai(self, request: web.Request) -> web.Response:
        reference = reference_in_path(request, "/v1/models/")
        await asyncio.shield(self._remove(reference, force=query_flag(request, "force")))
        return json_response({"id": reference, "object": "model", "deleted": True})

    async def _tag(self, source: str, repository: str, tag: str) -> web.Response:
        if not repository:
            raise BadRequest("repo names no repository: ?repo=NAME&tag=TAG", param="repo")
        target = f"{repository}:{tag}" if tag else repository
        await asyncio.to_thread(self._store.tag, source, target)
        return json_response({"message": f"{source} is tagged {target}", "target": target}, status=201)

    async def _remove(self, reference: str, *, force: bool) -> Removed:
        """Untags; with the last tag the model goes too, unless it is in use. `force` lets its requests end, as long as
        a drain may take, and cuts those that have not. Raises `Conflict`."""
        model = self._store.get(reference)
        if len(model.tags) <= 1 or _is_id(reference, model):
            if not force and self._scheduler.uses(model.id):
                raise Conflict(f"{reference} is answering a request: wait, or remove it with force", param="model")
            await self._scheduler.unload(model_ids=[model.id])  # drains
            if force:
                await self._scheduler.unload(model_ids=[model.id], force=True)
        removed = await asyncio.to_thread(lambda: self._store.remove(reference, force=force))
        if any(isinstance(item, api.Deleted) for item in removed):
            await self._configurations.forget(model.id)
            self._scheduler.resume(model.id)
            await self._scheduler.unload(model_ids=[model.id], force=force)  # one may have come up in between
            for backend in self._registry:
                await backend.forget(model.id)
        return removed

    def _served(self, request: web.Request, model: api.Model) -> bool:
        name = request.match_info.get("backend")
        return name is None or str(model.config.get("format")) in self._registry.get(name).formats

    def _openai(self, model: api.Model) -> dict[str, object]:
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "modelrunner",
            "architecture": model.config.get("architecture"),
            "context_window": model.config.get("context_size"),
            "backend": self._backend_name(model),
        }

    def _backend_name(self, model: api.Model) -> str | None:
        """The one that a request without a backend goes to, as far as the model's format decides it."""
        configured = self._configurations.get(model.id).configuration.backend
        able = sorted(b.name for b in self._registry if str(model.config.get("format")) in b.formats)
        return configured or next(iter(able), None)


def _line(progress: Progress) -> api.Progress:
    file = progress.file
    return api.Progress(
        "warning" if progress.warning else "progress",
        progress.message,
        progress.total,
        progress.current,
        api.Layer(file.id, file.size, file.current) if file else None,
        phase=progress.phase,
        rate=progress.rate,
    )


def _is_id(reference: str, model: api.Model) -> bool:
    digits = reference.removeprefix("sha256:")
    return len(digits) >= 8 and model.id.removeprefix("sha256:").startswith(digits)
