"""Routes of OpenAI's API that no engine here serves: each is answered with a sentence."""

from aiohttp import web

from modelrunner.api.documented import documented
from modelrunner.errors import NotImplementedHere

_NOT_OFFERED = {
    "moderations": "no engine here moderates: ask a chat model that was made for it, such as Llama Guard",
    "audio/speech": "no engine here speaks",
    "audio/transcriptions": "no engine here transcribes: ask a chat model that takes audio",
    "audio/translations": "no engine here translates audio: ask a chat model that takes audio",
}


class OpenAIRoutes:
    def routes(self) -> list[web.RouteDef]:
        return [web.post(f"{prefix}/v1/{path}", self.refuse) for prefix in ("", "/engines") for path in _NOT_OFFERED]

    @documented(errors=(501,))
    async def refuse(self, request: web.Request) -> web.Response:
        """Is not offered here: the answer is 501 with a sentence."""
        raise NotImplementedHere(_NOT_OFFERED[request.path.partition("/v1/")[2]])
