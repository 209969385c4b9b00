"""The routes about the daemon itself: health, version, logs, shutdown."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from modelrunner import __version__, wire
from modelrunner.api import wireforms
from modelrunner.api.documented import Count, documented
from modelrunner.api.messages import json_response, query_count, query_flag
from modelrunner.daemon.instance import Lifecycle
from modelrunner.daemon.logs import daemon_log, engine_log
from modelrunner.daemon.parts import Parts
from modelrunner.processes.log import read_log
from modelrunner.scheduler import HealthState

if TYPE_CHECKING:
    from modelrunner.cluster.members import Members


@dataclass(slots=True)
class Addresses:
    """The daemon's addresses. `listen` is "" without a TCP listener. The socket may move while the daemon runs;
    `trouble` is the reason if it cannot be reached there, or if the data directory was moved, "" otherwise."""

    socket: Path
    listen: str
    data: Path
    trouble: str = ""


class SystemRoutes:
    def __init__(
        self,
        addresses: Addresses,
        lifecycle: Lifecycle,
        parts: Parts,
        active_requests: Callable[[], int],
        sandbox: str,
        members: "Members | None" = None,
    ) -> None:
        self._addresses = addresses
        self._lifecycle = lifecycle
        self._library = parts.library
        self._statuses = parts.statuses
        self._scheduler = parts.scheduler
        self._health_check = parts.health_check
        self._active_requests = active_requests
        self._sandbox = sandbox
        self._members = members
        self._logs = addresses.data / "logs"

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/version", self.version),
            web.get("/logs", self.logs),
            web.post("/shutdown", self.shutdown),
        ]

    @documented(wire.Health)
    async def health(self, request: web.Request) -> web.Response:
        """Answers while the daemon is alive."""
        return json_response(self._form(self._health_check.health(ending=self._lifecycle.stop.is_set())))

    @documented(wire.Health, also={503: wire.Health})
    async def ready(self, request: web.Request) -> web.Response:
        """Tells whether the daemon should get requests. Answers 503 with the reason while it should not. A
        model that keeps failing, and that is neither pinned nor preloaded, is named with 200, and so is a damaged one:
        the others are served."""
        verdict = await self._health_check.verdict(
            ending=self._lifecycle.stop.is_set(), trouble=self._addresses.trouble
        )
        return json_response(self._form(verdict.health, verdict.reason), status=200 if verdict.is_ready else 503)

    @documented(wire.Status)
    async def version(self, request: web.Request) -> web.Response:
        """Tells the version, the addresses and the engines."""
        where = self._addresses
        absent = {str(folder.path): folder.message for folder in await self._library.looks.absent()}
        return json_response(
            wire.Status(
                pid=os.getpid(),
                version=__version__,
                socket=str(where.socket),
                listen=where.listen,
                data_dir=str(where.data),
                backends={name: str(status) for name, status in (await self._statuses()).items()},
                memory=wireforms.main_memory(self._scheduler.memory()),
                devices=wireforms.devices(self._scheduler.devices(), self._scheduler.memory()),
                sandbox=self._sandbox,
                sandboxes={runner.id: str(runner.sandbox) for runner in self._scheduler.runners() if runner.sandbox},
                cluster=self._members.problem if self._members else "",
                hosts={host.name: host.state for host in self._members.view()} if self._members else {},
                model_dirs=dict.fromkeys(map(str, self._library.folders), "") | absent,
            )
        )

    @documented({"text/plain": str}, query={"runner": str, "model": str, "follow": bool, "lines": Count}, errors=(422,))
    async def logs(self, request: web.Request) -> web.StreamResponse:
        """Sends an engine's log with `?runner=ID` or `?model=REF`, else the daemon's. `?lines=N` sends its last N lines
        only, `?follow` continues as the log grows."""
        follow = query_flag(request, "follow") and request.method != "HEAD"
        log = await self._log_of(request, query_count(request, "lines"), self._lifecycle.stop if follow else None)
        response = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
        await response.prepare(request)
        async for chunk in log:
            await response.write(chunk)
        await response.write_eof()
        return response

    @documented(wire.Message, status=202)
    async def shutdown(self, request: web.Request) -> web.Response:
        """Ends the daemon, after the answers under way."""
        self._lifecycle.request_stop()
        return json_response(wire.Message("shutting down"), status=202)

    def _form(self, health: HealthState, reason: str = "") -> wire.Health:
        uptime = round(time.monotonic() - self._lifecycle.started, 3)
        return wire.Health(health.value, uptime, self._active_requests(), __version__, reason)

    async def _log_of(
        self, request: web.Request, lines: int | None, ending: asyncio.Event | None
    ) -> AsyncIterator[bytes]:
        if runner_id := request.query.get("runner"):
            return self._scheduler.log(runner_id, lines, ending)
        log = daemon_log(self._logs)
        if reference := request.query.get("model"):
            model_id = (await self._library.described(reference))[0].id
            for runner in self._scheduler.runners():
                if model_id in runner.models:
                    return self._scheduler.log(runner.id, lines, ending)
            log = engine_log(self._logs, model_id)
        return read_log(log, ending, lines=lines)
