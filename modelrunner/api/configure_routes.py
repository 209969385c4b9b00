"""/engines/_configure and /engines/reload: the configuration of models and of the daemon."""

from typing import Any

import msgspec
from aiohttp import web

from modelrunner import wire
from modelrunner.api import wireforms
from modelrunner.api.documented import check_local, documented
from modelrunner.api.messages import checked, json_response, read_json
from modelrunner.errors import BadRequest
from modelrunner.models.configurator import Configurator
from modelrunner.models.library import Library
from modelrunner.models.reload import Reloader
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.types import Mode


class ConfigurationRoutes:
    def __init__(
        self, library: Library, configurator: Configurator, reloader: Reloader, registry: BackendRegistry
    ) -> None:
        self._library = library
        self._configurator = configurator
        self._reloader = reloader
        self._registry = registry

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/engines/reload", self.reload),
            web.get("/engines/_configure/schema", self.schema),
            *(
                route
                for path in ("/engines/_configure", "/engines/{backend}/_configure")
                for route in (web.post(path, self.configure), web.get(path, self.show))
            ),
        ]

    @documented(
        wire.Configuration,
        status=202,
        body=wire.ConfigureRequest,
        errors=(409, 412, 421, 422, 502, 504, 507),
        local={"lora": "files of this machine are named"},
    )
    async def configure(self, request: web.Request) -> web.Response:
        """Changes the configuration of a model: every further field of the body is one of its settings."""
        body = await read_json(request, dict[str, Any])
        wanted = checked(body, wire.ConfigureRequest)
        patch = {name: value for name, value in body.items() if name not in wire.ConfigureRequest.__struct_fields__}
        patch = _with_backend(patch, request.match_info.get("backend"))
        if patch.get("lora"):
            check_local(request, "lora")
        mode = None if wanted.mode is None else Mode.parse(wanted.mode)
        restart = wanted.apply == "restart"
        model = self._library.aliases.meant(wanted.model)
        shown = await self._configurator.change(model, patch, mode, restart=restart)
        return json_response(_form(shown, wanted.model, model), status=202)

    @documented(list[wire.Configuration], query={"model": str}, errors=(412, 421, 422))
    async def show(self, request: web.Request) -> web.Response:
        """Shows the configuration of `?model=`, or of all models."""
        backend = request.match_info.get("backend")
        if backend is not None:
            self._registry.get(backend)
        name = request.query.get("model")
        model = None if name is None else self._library.aliases.meant(name)
        configurations = await self._configurator.show(model, backend)
        return json_response([_form(shown, name, model) for shown in configurations])

    @documented(dict[str, Any], query={})
    async def schema(self, request: web.Request) -> web.Response:
        """Shows the JSON schema of the settings of a model, with the tables of the engines that are here."""
        return json_response(await self._configurator.schema())

    @documented(wire.ReloadResponse, body=wire.ReloadRequest, optional=True)
    async def reload(self, request: web.Request) -> web.Response:
        """Reads the configuration file again."""
        wanted = await read_json(request, wire.ReloadRequest) if request.can_read_body else wire.ReloadRequest()
        changes = await self._reloader.reload(dry_run=wanted.dry_run)
        return json_response(wire.ReloadResponse(wanted.dry_run, [wireforms.change(change) for change in changes]))


def _form(shown: wire.Configuration, name: str | None, model: str | None) -> wire.Configuration:
    return shown if name is None or name == model else msgspec.structs.replace(shown, alias=name)


def _with_backend(patch: dict[str, Any], in_path: str | None) -> dict[str, Any]:
    """Adds the backend of the path to the body. Raises `BadRequest` if the body names another one."""
    if in_path is None:
        return patch
    if patch.get("backend", in_path) != in_path:
        raise BadRequest(f"the path says backend {in_path}, the body {patch['backend']}", param="backend")
    return patch | {"backend": in_path}
