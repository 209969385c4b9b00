"""/engines/settings: settings of the daemon, read from the configuration file and written into it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from modelrunner import wire
from modelrunner.api.documented import documented
from modelrunner.api.messages import json_response, read_json
from modelrunner.config.settingsfile import SettingsFile


class SettingsRoutes:
    """`check` reads the file as a reload does, without applying it, and raises `BadRequest` for a wrong one."""

    def __init__(self, file: SettingsFile, check: Callable[[], Awaitable[object]]) -> None:
        self._file = file
        self._check = check
        self._lock = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/engines/settings", self.show), web.post("/engines/settings", self.change)]

    @documented(list[wire.Setting], query={})
    async def show(self, request: web.Request) -> web.Response:
        """Shows the settings that this route may change, as the configuration file or the environment has them now."""
        shown = await asyncio.to_thread(self._file.shown)
        return json_response([wire.Setting(name, value, source) for name, (value, source) in shown.items()])

    @documented(list[wire.Setting], body=wire.SettingsRequest, query={}, errors=(507,))
    async def change(self, request: web.Request) -> web.Response:
        """Writes settings into the configuration file. They apply with `POST /engines/reload`, whose `dry_run` tells
        how. A wrong value changes nothing."""
        values = (await read_json(request, wire.SettingsRequest)).values
        await asyncio.shield(asyncio.ensure_future(self._change(values)))  # goes on if the client leaves
        return await self.show(request)

    async def _change(self, values: Mapping[str, str]) -> None:
        async with self._lock:
            before = await asyncio.to_thread(self._file.write, values)
            try:
                await self._check()
            except BaseException:
                await asyncio.to_thread(self._file.put_back, before)
                raise
