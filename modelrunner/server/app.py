"""Starts the daemon, serves, and ends in order."""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing

from aiohttp import web

from modelrunner import __version__
from modelrunner.config import Settings
from modelrunner.locations import private_directory
from modelrunner.models.foresight import Foresight
from modelrunner.processtree import sweep_orphans
from modelrunner.proxy import fastlane
from modelrunner.proxy.access import Access
from modelrunner.proxy.limits import Limits
from modelrunner.proxy.pipeline import Pipeline
from modelrunner.registry import BackendRegistry
from modelrunner.scheduler import Scheduler
from modelrunner.server import daemon, logs
from modelrunner.server.configure import ConfigurationRoutes
from modelrunner.server.engines import EngineRoutes
from modelrunner.server.insight import InsightRoutes
from modelrunner.server.middleware import connections, envelope, finish_head
from modelrunner.server.models import ModelRoutes
from modelrunner.server.parts import Parts, build, make_reloader
from modelrunner.server.residency import ResidencyRoutes
from modelrunner.server.system import Addresses, SystemRoutes

log = logging.getLogger(__name__)

_CLOSING = 2.0  # seconds that answers of the control plane get at the end


def run(settings: Settings) -> None:
    """The daemon as a process of its own, until it is asked to stop. Raises what `serve` raises."""
    import uvloop

    daemon.prepare_process()
    uvloop.run(serve(settings))


async def serve(
    settings: Settings, *, ready: Callable[[], None] | None = None, registry: BackendRegistry | None = None
) -> None:
    """Holds the data directory, serves until a signal or `POST /shutdown`, drains, and leaves nothing behind. `ready`
    is called once both listeners answer; `registry` replaces the installed backends. Raises `AlreadyRunning`,
    `ConfigurationError`, `StorageFailed`."""
    path = settings.socket
    with daemon.hold(settings.data_dir, path), logs.logging_to(settings.data_dir / "logs", settings.log_level):
        await asyncio.to_thread(sweep_orphans)
        daemon.remove_dead_sockets(private_directory(settings.runtime_dir))
        logs.prune_engine_logs(settings.data_dir / "logs")
        with ExitStack() as sockets:
            if tcp := daemon.bind_tcp(settings.listen):
                sockets.enter_context(tcp)
            unix = sockets.enter_context(closing(daemon.UnixListener(path)))
            parts = await asyncio.to_thread(build, settings, registry)
            server = Daemon(settings, parts, unix, tcp)
            with server.lifecycle.on_signals():
                await server.start()
                try:
                    if ready:
                        ready()
                    await server.wait()
                finally:
                    await server.stop()


class Daemon:
    """The parts and the two listeners, from `start` to `stop`. `tcp` is None where there is only the Unix socket."""

    def __init__(self, settings: Settings, parts: Parts, unix: daemon.UnixListener, tcp: socket.socket | None) -> None:
        self._settings = settings
        self._parts = parts
        self._unix = unix
        self._tcp = tcp
        self.lifecycle = daemon.Lifecycle()
        port = tcp.getsockname()[1] if tcp else 0
        access = Access.for_listener(port, settings.hosts, settings.origins)
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limits = Limits.within(descriptors, body=settings.body_limit, total_body=settings.total_body_limit)
        self._pipeline = Pipeline(parts.resolver, parts.scheduler, access, limits)
        self._pipeline.log_requests(settings.log_level == "debug")
        self._reloader = make_reloader(settings, parts, self._pipeline, port)
        self.lifecycle.on_reload = self._reloader.in_background
        self._runner = web.AppRunner(
            self._application(), access_log=None, handler_cancellation=True, shutdown_timeout=_CLOSING
        )
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when both listeners answer."""
        await self._runner.setup()
        assert self._runner.server is not None
        fallback = connections(self._runner.server, self._pipeline.limits)
        loop, backlog = asyncio.get_running_loop(), daemon.BACKLOG
        self._lanes = [fastlane.FastLane(self._pipeline, fallback, local=local) for local in (True, False)]
        self._servers = [await loop.create_unix_server(self._lanes[0], sock=self._unix.socket, backlog=backlog)]
        if self._tcp:
            self._servers.append(await loop.create_server(self._lanes[1], sock=self._tcp, backlog=backlog))
        self._unix.publish()
        where = self._addresses()
        log.info("modelrunner %s serves unix://%s %s", __version__, where.socket, where.listen)
        parts = self._parts
        foresight = Foresight(parts.store, parts.resolver, parts.scheduler)
        self._background = [
            asyncio.create_task(parts.preloader.run(), name="preload"),
            asyncio.create_task(foresight.run(), name="foresight"),
        ]

    async def wait(self) -> None:
        """Until somebody asks the daemon to stop."""
        await self.lifecycle.stop.wait()

    async def stop(self) -> None:
        """Lets answers end, and returns when no process, connection or task is left."""
        log.info("shutting down")
        for task in self._background:
            task.cancel()
        await asyncio.wait(self._background)
        await _drain(self._parts.scheduler, self.lifecycle, self._settings.drain_limit)
        for server in self._servers:
            server.close()
        for lane in self._lanes:
            lane.drain()
        await self._parts.installer.close()
        await self._runner.cleanup()
        log.info("ended")

    def _application(self) -> web.Application:
        """The control plane."""
        parts, pipeline, lifecycle = self._parts, self._pipeline, self.lifecycle
        app = web.Application(middlewares=[envelope(lifecycle.stop.is_set)], client_max_size=self._settings.body_limit)
        app.on_response_prepare.append(finish_head)
        families = (
            # Before the routes of models, which take what follows `/models/` for a reference.
            InsightRoutes(parts.library, parts.advisor, parts.scheduler.events),
            ModelRoutes(parts.library),
            EngineRoutes(parts.scheduler, parts.presence, parts.disk, parts.statuses, parts.installer),
            ConfigurationRoutes(parts.configurator, self._reloader, parts.registry),
            ResidencyRoutes(parts.presence, parts.preloader),
            SystemRoutes(self._addresses(), lifecycle, parts, lambda: pipeline.active),
        )
        app.add_routes([route for family in families for route in family.routes()])
        return app

    def _addresses(self) -> Addresses:
        return Addresses(self._settings.socket, daemon.address(self._tcp), self._settings.data_dir)


async def _drain(scheduler: Scheduler, lifecycle: daemon.Lifecycle, limit: float) -> None:
    """Lets answers end for `limit` seconds, or until somebody asks to stop a second time."""
    closing = asyncio.ensure_future(scheduler.close(limit))
    hurry = asyncio.ensure_future(lifecycle.hurry.wait())
    await asyncio.wait((closing, hurry), return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not closing.done():
        await scheduler.close(0.0)
    await closing
