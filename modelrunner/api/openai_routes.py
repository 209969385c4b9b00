"""OpenAI's list of models, and the routes of its API that no engine serves: they answer with the reason."""

import asyncio

from aiohttp import web

from modelrunner import wire
from modelrunner.api.documented import documented
from modelrunner.api.messages import json_response, query_flag, reference_in_path
from modelrunner.api.reach import Reach
from modelrunner.errors import ModelNotFound, NotImplementedHere
from modelrunner.http.requests import NO_SESSIONS
from modelrunner.models.abilities import Abilities
from modelrunner.models.library import Library
from modelrunner.store import StoredModel

_NOT_OFFERED = {
    "moderations": "no engine here moderates: ask a chat model that was made for it, such as Llama Guard",
    **dict.fromkeys(
        ("images/generations", "images/edits", "images/variations"),
        "no engine here draws: `modelrunner install diffusers` installs one that does",
    ),
    "responses/compact": "no engine here compacts a conversation: send the items that matter",
    "responses/input_tokens": "no engine here counts what a response would read: `usage` of its answer says so, and "
    "POST /anthropic/v1/messages/count_tokens counts the tokens of messages",
}


class OpenAIRoutes:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._reach = Reach(library)

    def routes(self) -> list[web.RouteDef]:
        models = [
            route
            for prefix in ("", "/engines", "/engines/{backend}")
            for route in (
                web.get(prefix + "/v1/models", self.list_models),
                web.get(prefix + "/v1/models/{ref:.+}", self.get),
                web.delete(prefix + "/v1/models/{ref:.+}", self.delete),
            )
        ]
        voices = [web.get(f"{prefix}/v1/audio/voices", self.voices) for prefix in ("", "/engines")]
        refused = [f"{prefix}/v1/{path}" for prefix in ("", "/engines") for path in _NOT_OFFERED]
        realtime = [web.get(f"{prefix}/v1/realtime", self.refuse_realtime) for prefix in ("", "/engines")]
        return [*models, *voices, *(web.post(path, self.refuse) for path in refused), *realtime]

    @documented(wire.OpenAIModels)
    async def list_models(self, request: web.Request) -> web.Response:
        """Lists the models, with an entry for each name and alias."""
        served = (model for model in self._library if self._is_served(request, model))
        models = await self._reach.named(request, served, "openai")
        return json_response(wire.OpenAIModels([_openai_model(*model) for model in models]))

    @documented(wire.OpenAIModel, errors=(422,))
    async def get(self, request: web.Request) -> web.Response:
        """Shows a model in OpenAI's form."""
        alias = reference_in_path(request, "/v1/models/")
        reference = self._library.aliases.meant(alias)
        self._reach.check(request, reference)
        model, name, abilities = await self._library.described(reference, request.match_info.get("backend"))
        name = name if alias == reference else alias
        if not self._is_served(request, model):
            raise ModelNotFound(f"{request.match_info['backend']} cannot serve {name}", param="model")
        return json_response(_openai_model(name, model, abilities))

    @documented(wire.SpeechVoices)
    async def voices(self, request: web.Request) -> web.Response:
        """Lists the voices of the models that speak, as far as they are known."""
        models = [
            model
            for model, abilities in await self._reach.listed(request, self._library)
            if "speech" in abilities.capabilities
        ]
        voices = await asyncio.to_thread(lambda: [(model, self._library.voices(model)) for model in models])
        return json_response(
            wire.SpeechVoices([wire.SpeechVoice(name, name, model.name) for model, names in voices for name in names])
        )

    @documented(wire.DeletedObject, query={"force": bool}, errors=(409,))
    async def delete(self, request: web.Request) -> web.Response:
        """Removes a name of a model, and the model with its last name."""
        reference = reference_in_path(request, "/v1/models/")
        self._reach.check_removal(request, reference)
        await self._library.remove(reference, force=query_flag(request, "force"))
        return json_response(wire.DeletedObject(reference, "model"))

    @documented(errors=(501,))
    async def refuse(self, request: web.Request) -> web.Response:
        """Answers 501 with the reason: no engine serves this route."""
        raise NotImplementedHere(_NOT_OFFERED[request.path.partition("/v1/")[2]])

    @documented(errors=(501,))
    async def refuse_realtime(self, request: web.Request) -> web.Response:
        """Answers 501: an answer in pieces comes over HTTP."""
        raise NotImplementedHere(NO_SESSIONS)

    def _is_served(self, request: web.Request, model: StoredModel) -> bool:
        """Returns True unless the path names a backend that cannot serve the model."""
        backend = request.match_info.get("backend")
        return backend is None or self._library.serves(backend, model)


def _openai_model(name: str, stored: StoredModel, abilities: Abilities) -> wire.OpenAIModel:
    return wire.OpenAIModel(
        id=name,
        created=stored.created,
        architecture=stored.config.get("architecture"),
        context_window=abilities.window or stored.config.get("context_size"),
        capabilities=list(abilities.capabilities),
        backend=abilities.backend,
        check=abilities.check,
    )
