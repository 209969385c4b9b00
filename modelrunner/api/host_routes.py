"""/hosts: the other machines of the cluster."""

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from modelrunner import wire
from modelrunner.api.documented import documented
from modelrunner.api.messages import json_response, read_json
from modelrunner.api.reach import Reach
from modelrunner.errors import NotFound
from modelrunner.models.library import Library
from modelrunner.models.resolve import Resolver

if TYPE_CHECKING:
    from modelrunner.cluster.members import Members


class HostRoutes:
    """`members` is None without a cluster."""

    def __init__(self, library: Library, resolver: Resolver, members: "Members | None") -> None:
        self._reach = Reach(library)
        self._resolver = resolver
        self._members = members

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/hosts", self.list),
            web.post("/hosts/preload", self.preload),
            web.post("/hosts/{name}/drain", self.drain),
        ]

    @documented(wire.Hosts, query={})
    async def list(self, request: web.Request) -> web.Response:
        """Lists the hosts of the cluster."""
        if self._members is None:
            return json_response(wire.Hosts([], "there is no [cluster] in config.toml: models run on this machine"))
        return json_response(wire.Hosts(self._members.view(), self._members.problem))

    @documented(wire.HostPreloads, body=wire.HostPreloadRequest, query={}, errors=(422,))
    async def preload(self, request: web.Request) -> web.Response:
        """Brings a model and its engine to hosts, to all if none is named, so that its first request there loads it at
        once. Answers when the last one has them or has failed."""
        wanted = await read_json(request, wire.HostPreloadRequest)
        self._reach.check(request, wanted.model)
        members = self._present()
        mode = await asyncio.to_thread(self._resolver.main_mode, wanted.model)
        await self._resolver.prepare(None, wanted.model, mode)
        target = self._resolver(None, wanted.model, mode)
        return json_response(wire.HostPreloads(target.name, await members.preload(target, wanted.hosts)))

    def _present(self) -> "Members":
        if self._members is None:
            raise NotFound("there is no cluster: see `[cluster]` in docs/cluster.md", param="host")
        return self._members

    @documented(wire.Hosts, body=wire.DrainRequest, query={})
    async def drain(self, request: web.Request) -> web.Response:
        """Ends the host's runners after their last requests, and starts no others there; or uses it again."""
        self._reach.check_all(request)
        await self._present().drain(request.match_info["name"], on=(await read_json(request, wire.DrainRequest)).drain)
        return await self.list(request)
