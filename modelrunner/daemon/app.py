"""Starts the daemon, serves, and ends in order."""

import asyncio
import gc
import logging
import os
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from modelrunner import __version__, durable
from modelrunner.api.anthropic_routes import AnthropicRoutes
from modelrunner.api.batch_routes import BatchRoutes
from modelrunner.api.board import Board
from modelrunner.api.configure_routes import ConfigurationRoutes
from modelrunner.api.diagnostic_routes import DiagnosticRoutes
from modelrunner.api.documented import DocumentRoutes
from modelrunner.api.engine_routes import EngineRoutes, ResidencyRoutes
from modelrunner.api.host_routes import HostRoutes
from modelrunner.api.import_routes import ArchiveRoutes, ImportRoutes
from modelrunner.api.key_routes import KeyRoutes
from modelrunner.api.middleware import RequestEnvelope, connections, finish_head
from modelrunner.api.model_routes import ModelRoutes
from modelrunner.api.ollama_routes import OllamaRoutes
from modelrunner.api.openai_routes import OpenAIRoutes
from modelrunner.api.response_routes import ResponseRoutes, StreamRoutes
from modelrunner.api.revocation import Revocation
from modelrunner.api.telemetry_routes import TelemetryRoutes
from modelrunner.api.tool_routes import ToolRoutes
from modelrunner.api.ui_routes import UiRoutes
from modelrunner.batches.batchstore import open_store
from modelrunner.batches.intake import BatchIntake
from modelrunner.batches.worker import BatchWorker
from modelrunner.config.locations import default_runtimes
from modelrunner.config.settings import Settings
from modelrunner.config.settingsfile import SettingsFile
from modelrunner.daemon import instance, shapes
from modelrunner.daemon.certificates import Certificate, self_signed
from modelrunner.daemon.doorway import Doorway, open_port
from modelrunner.daemon.instance import handed_over
from modelrunner.daemon.parts import Parts, address_rates, build, make_reloader, set_aliases, set_interceptors
from modelrunner.daemon.settings_routes import SettingsRoutes
from modelrunner.daemon.system_routes import Addresses, SystemRoutes
from modelrunner.gateway.access import Access, host_names
from modelrunner.gateway.connection.server import InferenceServer
from modelrunner.gateway.request.pipeline import Pipeline
from modelrunner.gateway.response_store import ResponseStore
from modelrunner.http.limits import Limits
from modelrunner.keys.ring import KeyRing
from modelrunner.models.making import Maker
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.processes import confinement, peers
from modelrunner.scheduler import Scheduler
from modelrunner.telemetry import tracing
from modelrunner.telemetry.accesslog import AccessLog
from modelrunner.telemetry.machine import MachineHistory
from modelrunner.telemetry.recordings import Recordings
from modelrunner.telemetry.telemetry import Telemetry
from modelrunner.tools.toolbox import Toolbox

if TYPE_CHECKING:
    from modelrunner.cluster.members import Members

log = logging.getLogger(__name__)

_CLOSING = 2.0  # seconds that answers of the control plane get at the end


def run(settings: Settings) -> None:
    """Runs the daemon as a process of its own, until it is asked to stop. Raises what `serve` raises."""
    import uvloop

    instance.prepare_process()
    with durable.translated("running the daemon", settings.data_dir):
        uvloop.run(serve(settings, last=True))


async def serve(
    settings: Settings,
    *,
    ready: Callable[[], None] | None = None,
    registry: BackendRegistry | None = None,
    last: bool = False,
) -> None:
    """Locks the data directory, serves until a signal or `POST /shutdown`, drains, and leaves nothing behind. `ready`
    is called once both listeners answer; `registry` replaces the installed backends; with `last` the process ends
    afterwards. Raises `AlreadyRunning`, `ConfigurationError`, `StorageFailed`."""
    async with instance.opened(
        settings.data_dir, settings.socket, settings.log_level, settings.runtime_folder
    ) as announce:
        keys = KeyRing(settings.data_dir / "state" / "keys.json")
        with ExitStack() as sockets:
            if tcp := open_port(settings.listen, wanted=settings.is_given("listen"), beyond_loopback=bool(keys)):
                sockets.enter_context(tcp)
                keys.listener = ip_address(tcp.getsockname()[0])
            certificate = await asyncio.to_thread(_certificate, settings) if tcp else None
            ready_made = handed_over()
            path = Path(ready_made.getsockname()) if ready_made else settings.socket_path()
            unix = instance.UnixListener(path, ready_made)
            addresses = Addresses(path, instance.address(tcp, tls=certificate is not None), settings.data_dir)
            doorway = sockets.enter_context(closing(Doorway(unix, addresses, settings.socket_path, announce)))
            parts = await asyncio.to_thread(build, settings, registry, keys, tcp.getsockname()[1] if tcp else None)
            server = Daemon(settings, parts, doorway, tcp, certificate)
            with server.lifecycle.on_signals(last=last):
                await server.start()
                if last:
                    gc.freeze()  # the modules and models stay: a collection need not look through them each time
                    gc.enable()
                try:
                    if ready:
                        ready()
                    await server.wait()
                finally:
                    await server.stop()
        if addresses.socket.parent in default_runtimes(settings.data_dir):
            with suppress(OSError):  # not empty: it has another program's files
                addresses.socket.parent.rmdir()


def _certificate(settings: Settings) -> Certificate | None:
    """Raises `ConfigurationError`."""
    if settings.tls_certificate is not None:
        return Certificate(settings.tls_certificate, settings.tls_key or settings.tls_certificate)
    if settings.tls == "self-signed":
        names = [host for host in settings.hosts if host.isascii() and ":" not in host]
        return self_signed(settings.data_dir / "tls", names)
    return None


def _members(settings: Settings, parts: Parts) -> "Members | None":
    if not settings.cluster.ray_address:
        return None
    from modelrunner.cluster.members import Members  # only here: a machine alone pays nothing for it

    shapes.prime()
    table = settings.cluster
    return Members(parts.scheduler, parts.registry, parts.store, table.ray_address, table.label, shared=table.shared)


class Daemon:
    """The parts and the two listeners, from `start` to `stop`. `tcp` is None where there is only the Unix socket;
    with a `certificate` it speaks TLS."""

    def __init__(
        self,
        settings: Settings,
        parts: Parts,
        doorway: Doorway,
        tcp: socket.socket | None,
        certificate: Certificate | None,
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._doorway = doorway
        self._tcp = tcp
        self._certificate = certificate
        self.lifecycle = instance.Lifecycle()
        port = tcp.getsockname()[1] if tcp else 0
        access = Access(host_names(port, settings.hosts), settings.origins)
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limits = Limits.within(
            descriptors, body=settings.body_limit, total_body=settings.total_body_limit, upload=settings.upload_limit
        )
        parts.keys.watchers.append(access.renew)
        self._responses = ResponseStore(
            settings.data_dir / "state" / "responses.sqlite", limit=settings.responses_limit, age=settings.responses_age
        )
        self._recordings = Recordings(parts.resolver.is_recorded, settings.recording_memory, settings.recording_limit)
        self._traces = tracing.traces(os.environ)
        self._pipeline = Pipeline(
            parts.on_demand,
            parts.scheduler,
            access,
            limits,
            parts.keys,
            responses=self._responses,
            recorder=self._recordings if settings.recording_memory else None,
            tracing=self._traces is not None,
            spool=settings.data_dir,
        )
        self._pipeline.addresses.set_rates(address_rates(dict(settings)))
        set_aliases(self._pipeline, parts.library.aliases, settings.aliases)
        self._toolbox = Toolbox(
            settings.mcp, settings.runtime_folder(), settings.data_dir / "logs", settings.tools_time
        )
        self._streams = set_interceptors(settings, self._pipeline)
        self._batches, self._files = open_store(settings.data_dir / "state", settings.files_limit)
        self._batch_worker = BatchWorker(self._batches, self._pipeline)
        observers = self._pipeline.observers
        self._machine = MachineHistory(parts.scheduler.devices)
        self._telemetry = Telemetry(parts.scheduler, lambda: self._pipeline.running, settings.data_dir / "state")
        if settings.telemetry:
            observers.add(self._telemetry)
        self._access_log = AccessLog(settings.data_dir / "logs" / "access.log", observers)
        self._access_log.use(settings.access_log)
        if self._traces is not None:
            observers.add(self._traces)
            self._telemetry.exposition.traces = self._traces
        self._members = _members(settings, parts)
        self._cluster: asyncio.Task[None] | None = None
        self._reloader = make_reloader(settings, parts, self._pipeline, self._access_log, port)
        self.lifecycle.on_reload = self._reloader.in_background
        self._runner = web.AppRunner(
            self._application(), access_log=None, handler_cancellation=True, shutdown_timeout=_CLOSING
        )
        self._tcp_server: asyncio.Server | None = None
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when both listeners answer."""
        await self._runner.setup()
        assert self._runner.server is not None
        fallback = connections(self._runner.server, self._pipeline.limits)
        loop = asyncio.get_running_loop()
        certificate = self._certificate
        tls = certificate.current if certificate is not None else None
        self._lanes = [
            InferenceServer(self._pipeline, fallback, local=True, is_engine=peers.is_engine),
            InferenceServer(self._pipeline, fallback, local=False, tls=tls),
        ]
        if self._tcp:
            self._tcp_server = await loop.create_server(self._lanes[1], sock=self._tcp, backlog=instance.BACKLOG)
        await self._doorway.open(self._serve_unix)
        where = self._doorway.addresses
        log.info("modelrunner %s serves unix://%s %s", __version__, where.socket, where.listen)
        if certificate is not None:
            log.info("the TLS certificate has the SHA-256 fingerprint %s", certificate.fingerprint)
        parts = self._parts
        self._background = [
            asyncio.create_task(parts.preloader.run(), name="preload"),
            asyncio.create_task(parts.library.learn_abilities(), name="abilities"),
            asyncio.create_task(parts.last_used.run(), name="last used"),
            asyncio.create_task(parts.verifier.run(), name="verify"),
            asyncio.create_task(parts.tuner.run(), name="tuner"),
            asyncio.create_task(parts.scheduler.watch_budget(), name="budget"),
            asyncio.create_task(self._batch_worker.run(), name="batches"),
            asyncio.create_task(self._telemetry.write_usage(), name="usage"),
            asyncio.create_task(self._machine.run(), name="machine"),
            asyncio.create_task(self._doorway.watch(self._serve_unix), name="doorway"),
        ]
        if self._members is not None:
            self._cluster = asyncio.create_task(self._members.run(), name="cluster")
        if certificate is not None:
            self._background.append(asyncio.create_task(certificate.watch(), name="certificate"))
        self._counting = asyncio.create_task(self._telemetry.count_events(), name="events")

    async def wait(self) -> None:
        """Returns when a signal or a request asks the daemon to stop."""
        await self.lifecycle.stop.wait()

    async def stop(self) -> None:
        """Lets answers end, and returns when no process, connection or task is left."""
        log.info("shutting down")
        for task in self._background:
            task.cancel()
        self._streams.close()
        # At once: a request that comes while the tasks end is refused, too.
        draining = _drain(self._parts.scheduler, self.lifecycle, self._settings.drain_limit)
        # What ends meanwhile is counted: the metrics are read until the last answer.
        await asyncio.gather(draining, asyncio.wait([*self._background, self._counting]))
        if self._cluster is not None:  # only now: the answers of its hosts end with it
            self._cluster.cancel()
            await asyncio.wait([self._cluster])
        if self._tcp_server:
            self._tcp_server.close()
        self._doorway.close()
        for lane in self._lanes:
            lane.drain()
        await self._parts.library.close()
        await self._parts.installer.close()
        await self._toolbox.close()
        await self._runner.cleanup()
        await self._telemetry.close()
        self._access_log.close()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)
        await self._responses.close()
        self._parts.registry.close()
        self._parts.store.close()
        log.info("ended")

    def _application(self) -> web.Application:
        """Makes the control plane."""
        parts, pipeline, lifecycle = self._parts, self._pipeline, self.lifecycle
        board = Board(
            parts.scheduler, self._telemetry, parts.library.pulls, lambda: self._telemetry in pipeline.observers
        )
        sandbox = confinement.capability() if self._settings.sandbox == "on" else "off"
        revocation = Revocation(pipeline, parts.keys)
        envelope = RequestEnvelope(lifecycle.stop.is_set, pipeline.addresses, pipeline.observers, revocation)
        app = web.Application(middlewares=[envelope.handle], client_max_size=self._settings.body_limit)
        app.on_response_prepare.append(finish_head)
        families = (
            # Before the routes of models, where all text after `/models/` is a reference.
            DiagnosticRoutes(parts.library, parts.explainer, parts.scheduler.events),
            ImportRoutes(parts.library, parts.foreign, lambda: parts.store.partial),
            ArchiveRoutes(parts.library),
            ModelRoutes(parts.library, parts.remote, parts.quantizer, parts.publisher, parts.pruner),
            EngineRoutes(
                parts.library,
                parts.scheduler,
                parts.residency,
                parts.disk,
                parts.statuses,
                parts.installer,
                parts.configurations,
            ),
            ConfigurationRoutes(parts.library, parts.configurator, self._reloader, parts.registry),
            TelemetryRoutes(self._telemetry, self._recordings, board, self._machine),
            OpenAIRoutes(parts.library),
            AnthropicRoutes(parts.library),
            ResponseRoutes(self._responses),
            StreamRoutes(self._streams),
            ToolRoutes(self._toolbox if self._settings.mcp else None),
            BatchRoutes(self._batches, self._files, BatchIntake(self._batches, self._files, self._batch_worker.look)),
            KeyRoutes(parts.keys),
            OllamaRoutes(parts.library, parts.scheduler, parts.publisher, Maker(parts.library, parts.quantizer)),
            ResidencyRoutes(parts.residency, parts.preloader, parts.tuner),
            HostRoutes(parts.library, parts.resolver, self._members),
            UiRoutes(),
            SettingsRoutes(SettingsFile(self._settings), partial(self._reloader.reload, dry_run=True)),
            SystemRoutes(
                self._doorway.addresses, lifecycle, parts, lambda: len(pipeline.running), sandbox, self._members
            ),
        )
        documented = DocumentRoutes(route for family in families for route in family.routes())
        app.add_routes(documented.routes())
        return app

    async def _serve_unix(self, unix: instance.UnixListener) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        return await loop.create_unix_server(self._lanes[0], sock=unix.socket, backlog=instance.BACKLOG)


async def _drain(scheduler: Scheduler, lifecycle: instance.Lifecycle, limit: float) -> None:
    """Lets answers end for `limit` seconds, or until the second request to stop."""
    closing = asyncio.ensure_future(scheduler.close(limit))
    hurry = asyncio.ensure_future(lifecycle.hurry.wait())
    await asyncio.wait((closing, hurry), return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not closing.done():
        await scheduler.close(0.0)
    await closing
