"""The routes about the daemon itself: health, version, logs, shutdown."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web

from modelrunner import __version__, wire
from modelrunner.api import wireforms
from modelrunner.api.documented import Count, documented
from modelrunner.api.messages import json_response, query_count, query_flag
from modelrunner.concurrency.threads import stuck
from modelrunner.daemon.instance import Lifecycle
from modelrunner.daemon.logs import daemon_log, read_log
from modelrunner.daemon.parts import Parts
from modelrunner.errors import ModelNotFound, RunnerNotFound
from modelrunner.scheduler import SchedulerHealth


@dataclass(slots=True)
class Addresses:
    """The daemon's addresses. `listen` is "" without a TCP listener. The socket may move while the daemon runs;
    `trouble` is the reason if it cannot be reached there, "" otherwise."""

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
    ) -> None:
        self._addresses = addresses
        self._lifecycle = lifecycle
        self._library = parts.library
        self._statuses = parts.statuses
        self._scheduler = parts.scheduler
        self._preloader = parts.preloader
        self._is_needed = parts.resolver.is_needed
        self._active_requests = active_requests
        self._sandbox = sandbox
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
        return json_response(self._health())

    @documented(wire.Health, also={503: wire.Health})
    async def ready(self, request: web.Request) -> web.Response:
        """Tells whether the daemon should get requests. Answers 503 with the reason while it should not. A
        model that keeps failing, and that is neither pinned nor preloaded, is named with 200, and so is a damaged one:
        the others are served."""
        health, diagnostics = self._health(), self._scheduler.diagnostics
        ending = health.status == "shutting_down"
        trouble = "the daemon is shutting down" if ending else self._addresses.trouble or stuck()
        trouble = trouble or await diagnostics.trouble()
        failing = diagnostics.failing({model.id: model.name for model in self._library})
        unready = bool(trouble) or any(map(self._is_needed, failing))
        damaged = [f"{model.name} is damaged: {model.damage}" for model in self._library if model.damage]
        damaged += [folder.message for folder in await self._library.looks.absent()]
        damaged.append(self._library.looks.trouble)
        reason = "; ".join(filter(None, [trouble, *failing.values(), *damaged]))
        status = "error" if unready and not ending else health.status
        told = msgspec.structs.replace(health, status=status, reason=reason)
        return json_response(told, status=503 if unready else 200)

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
                sandbox=self._sandbox,
                sandboxes={runner.id: str(runner.sandbox) for runner in self._scheduler.runners() if runner.sandbox},
                model_dirs=dict.fromkeys(map(str, self._library.folders), "") | absent,
            )
        )

    @documented({"text/plain": str}, query={"runner": str, "model": str, "follow": bool, "lines": Count}, errors=(422,))
    async def logs(self, request: web.Request) -> web.StreamResponse:
        """Sends an engine's log with `?runner=ID` or `?model=REF`, else the daemon's. `?lines=N` sends its last N lines
        only, `?follow` continues as the log grows."""
        path, lines = self._log_of(request), query_count(request, "lines")
        ending = self._lifecycle.stop if query_flag(request, "follow") else None
        response = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
        await response.prepare(request)
        async for chunk in read_log(path, ending, lines=lines):
            await response.write(chunk)
        await response.write_eof()
        return response

    @documented(wire.Message, status=202)
    async def shutdown(self, request: web.Request) -> web.Response:
        """Ends the daemon, after the answers under way."""
        self._lifecycle.request_stop()
        return json_response(wire.Message("shutting down"), status=202)

    def _health(self) -> wire.Health:
        status = self._scheduler.health()
        if self._lifecycle.stop.is_set():
            status = SchedulerHealth.SHUTTING_DOWN
        starting = self._preloader.starting and status in (SchedulerHealth.READY, SchedulerHealth.BUSY)
        uptime = round(time.monotonic() - self._lifecycle.started, 3)
        return wire.Health("starting" if starting else status.value, uptime, self._active_requests(), __version__)

    def _log_of(self, request: web.Request) -> Path:
        if runner_id := request.query.get("runner"):
            for runner in self._scheduler.runners():
                if runner.id == runner_id:
                    return self._newest(runner.log_path.name)
            raise RunnerNotFound(f"there is no runner {runner_id}: `modelrunner ps` shows them", param="runner")
        if reference := request.query.get("model"):
            return self._newest(f"engine-*-{_digits(self._library.get(reference).id)}-*.log")
        return daemon_log(self._logs)

    def _newest(self, pattern: str) -> Path:
        """Returns the newest log of these names: each revision of a model's configuration writes its own."""
        found = max(self._logs.glob(pattern), key=lambda path: path.stat().st_mtime, default=None)
        if found is None:
            raise ModelNotFound("no engine has run with this model, so there is no log", param="model")
        return found


def _digits(model_id: str) -> str:
    return model_id.removeprefix("sha256:")[:16]
