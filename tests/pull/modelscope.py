"""A small ModelScope hub: the two routes that a download takes, as modelscope_hub's client asks them, with the faults
of the other hub. A file is a redirect to a second server."""

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from tests.pull.hub import Hub, Repository, serving, sha256


class ModelScope(Hub):
    """Its main branch is `master`; other branches are those of a repository. `hides` leaves each sha256 out of the
    list, `answer` stands for it."""

    def __init__(self) -> None:
        super().__init__()
        self.hides = False
        self.answer: bytes | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["ModelScope"]:
        hub, cdn = web.Application(), web.Application()
        base = "/api/v1/models/{repository:[^/]+/[^/]+}/repo"
        hub.router.add_get(f"{base}/files", self._list)
        hub.router.add_get(base, self._redirect)
        cdn.router.add_get("/{digest}", self._content, allow_head=False)
        async with serving(hub) as self.endpoint, serving(cdn) as self._cdn:
            yield self

    def _at(self, request: web.Request) -> Repository:
        self.lookups.append(request.headers)
        found = self.repositories.get(request.match_info["repository"])
        if found is None:
            raise web.HTTPNotFound(text='{"Code":404,"Message":"not found","Success":false}')
        if found.token is not None and request.headers.get("Authorization") != f"Bearer {found.token}":
            raise web.HTTPForbidden
        revision = request.query["Revision"]
        if revision != "master" and revision not in found.branches:
            raise web.HTTPNotFound
        return found.branches.get(revision, found)

    async def _list(self, request: web.Request) -> web.Response:
        files = self._at(request).files
        if self.answer is not None:
            return web.Response(body=self.answer)
        assert request.query["Recursive"] == "True"
        folders = {name.rpartition("/")[0] for name in files} - {""}
        entries: list[dict[str, object]] = [{"Path": name, "Type": "tree", "Size": 0} for name in folders]
        for name, data in files.items():
            digest = {} if self.hides else {"Sha256": sha256(data)}
            entries.append({"Path": name, "Type": "blob", "Size": len(data), "Mode": "33188", **digest})
        return web.json_response({"Code": 200, "Data": {"Files": entries}, "Success": True})

    async def _redirect(self, request: web.Request) -> web.Response:
        data = self._at(request).files[request.query["FilePath"]]
        raise web.HTTPFound(f"{self._cdn}/{sha256(data)}")
