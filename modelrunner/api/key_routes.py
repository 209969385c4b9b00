"""API keys: creating, listing, rotating and revoking them."""

import asyncio
import time

from aiohttp import web

from modelrunner import wire
from modelrunner.api.documented import documented
from modelrunner.api.messages import json_response, query_flag, read_json
from modelrunner.api.wireforms import moment
from modelrunner.keys.ring import ApiKey, KeyRing
from modelrunner.units import parse_age


class KeyRoutes:
    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/keys", self.list),
            web.post("/keys", self.create),
            web.delete("/keys/{name}", self.revoke),
            web.post("/keys/{name}/rotate", self.rotate),
        ]

    @documented(list[wire.KeyStatus])
    async def list(self, request: web.Request) -> web.Response:
        """Lists the API keys, without their text."""
        return json_response([_key_status(key) for key in self._keys])

    @documented(wire.KeyCreated, status=201, body=wire.KeyRequest, errors=(409,))
    async def create(self, request: web.Request) -> web.Response:
        """Makes an API key. Only this answer has the key's text."""
        wanted = await read_json(request, wire.KeyRequest)
        key, text = await asyncio.to_thread(
            self._keys.create,
            wanted.name,
            scopes=wanted.scopes,
            models=wanted.models,
            requests_per_minute=wanted.requests_per_minute,
            tokens_per_minute=wanted.tokens_per_minute,
            concurrency=wanted.concurrency,
            max_tokens=wanted.max_tokens,
            max_seconds=wanted.max_seconds,
            batch=wanted.priority == "batch",
            age=parse_age(wanted.expires) if wanted.expires else None,
        )
        return json_response(wire.KeyCreated(_key_status(key), text), status=201)

    @documented(wire.KeyCreated)
    async def rotate(self, request: web.Request) -> web.Response:
        """Gives an API key a new text. Only this answer has it."""
        key, text = await asyncio.to_thread(self._keys.rotate, request.match_info["name"])
        return json_response(wire.KeyCreated(_key_status(key), text))

    @documented(wire.KeyRevoked, query={"open": bool}, errors=(409,))
    async def revoke(self, request: web.Request) -> web.Response:
        """Revokes an API key. The last key stays unless `open` allows TCP without keys for everybody."""
        name = request.match_info["name"]
        await asyncio.to_thread(self._keys.revoke, name, open=query_flag(request, "open"))
        return json_response(wire.KeyRevoked(name))


def _key_status(key: ApiKey) -> wire.KeyStatus:
    return wire.KeyStatus(
        key.name,
        [str(scope) for scope in key.scopes],
        list(key.models),
        key.requests_per_minute,
        key.tokens_per_minute,
        key.concurrency,
        key.max_tokens,
        key.max_seconds,
        "batch" if key.batch else "normal",
        moment(key.created),
        moment(key.expires) if key.expires is not None else None,
        key.expires is not None and key.expires <= time.time(),
    )
