"""The routes of stored responses: reading, cancelling and removing them. Inference makes them."""

from typing import Any, Literal

from aiohttp import web

from modelrunner import wire
from modelrunner.api.documented import Count, documented
from modelrunner.api.messages import json_response
from modelrunner.api.middleware import owner_of
from modelrunner.api.paging import page_of
from modelrunner.errors import BadRequest, NotImplementedHere
from modelrunner.gateway.dialects.answershapes import ResponseAnswer
from modelrunner.gateway.response_store import ResponseStore

_MOST_ITEMS = 100
_PAGED = {"limit": Count, "after": str, "order": Literal["asc", "desc"]}


class ResponseRoutes:
    """Only the API key that made a response, and the daemon's owner, can see it."""

    def __init__(self, responses: ResponseStore) -> None:
        self._responses = responses

    def routes(self) -> list[web.RouteDef]:
        return [
            route
            for path in ("/v1/responses/{id}", "/engines/v1/responses/{id}")
            for route in (
                web.get(path, self.get),
                web.delete(path, self.delete),
                web.post(f"{path}/cancel", self.cancel),
                web.get(f"{path}/input_items", self.input_items),
            )
        ]

    @documented(ResponseAnswer, errors=(501,))
    async def get(self, request: web.Request) -> web.Response:
        """Shows a stored response."""
        if request.query.get("stream") == "true":
            raise NotImplementedHere("a stored response is not streamed: leave `stream` out", param="stream")
        return json_response((await self._responses.get(request.match_info["id"], owner_of(request))).response)

    @documented(wire.DeletedObject)
    async def delete(self, request: web.Request) -> web.Response:
        """Removes a stored response, and ends its work in the background."""
        id = request.match_info["id"]
        await self._responses.delete(id, owner_of(request))
        return json_response(wire.DeletedObject(id, "response"))

    @documented(ResponseAnswer)
    async def cancel(self, request: web.Request) -> web.Response:
        """Ends the work of a response in the background."""
        stored = await self._responses.get(request.match_info["id"], owner_of(request))
        if not stored.response["background"]:
            raise BadRequest("only a response in the background can be cancelled", param="response_id")
        return json_response((await self._responses.cancel(stored.id, owner_of(request))).response)

    @documented(wire.ListPage[dict[str, Any]], query={**_PAGED, "include": str, "include[]": str})
    async def input_items(self, request: web.Request) -> web.Response:
        """Lists the items of the response's request, the newest first unless `order` is asc. An item's ID ends with its
        index."""
        stored = await self._responses.get(request.match_info["id"], owner_of(request))
        ids = [f"{stored.id}_{place}" for place in range(len(stored.input))]
        items = [(id, item | {"id": id}) for id, item in zip(ids, stored.input, strict=True)]
        if request.query.get("order") != "asc":
            items.reverse()
        return page_of(request, items, usual=20, most=_MOST_ITEMS)
