"""Makes the daemon out of its parts, serves, and ends in order. Nothing else in the server reads the settings."""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from modelrunner import __version__, durable
from modelrunner.backend import Backend, BackendContext
from modelrunner.config import Settings
from modelrunner.errors import InvalidReference
from modelrunner.locations import ConfigurationError, default_runtimes
from modelrunner.processtree import sweep_orphans
from modelrunner.proxy import aiolane, fastlane
from modelrunner.proxy.access import Access, host_names
from modelrunner.proxy.limits import Limits
from modelrunner.proxy.pipeline import Pipeline
from modelrunner.pull import Puller
from modelrunner.registry import BackendRegistry
from modelrunner.scheduler import Ledger, MemoryProbe, Scheduler
from modelrunner.server import daemon, logs, shapes
from modelrunner.server.configurations import Configurations
from modelrunner.server.configure import ConfigurationRoutes, Judge
from modelrunner.server.doorway import Doorway, open_port
from modelrunner.server.engines import EngineRoutes
from modelrunner.server.foresight import Foresight
from modelrunner.server.insight import InsightRoutes
from modelrunner.server.installs import Installer
from modelrunner.server.middleware import connections, envelope, finish_head
from modelrunner.server.models import ModelRoutes
from modelrunner.server.ondemand import InstallOnDemand
from modelrunner.server.options import check_settings
from modelrunner.server.preload import Preloader
from modelrunner.server.reload import Reading, Reloader, Setter, check_tables
from modelrunner.server.residency import ResidencyRoutes
from modelrunner.server.resolve import Resolver
from modelrunner.server.statuses import Statuses
from modelrunner.server.system import Addresses, SystemRoutes
from modelrunner.store import Reference, Store

log = logging.getLogger(__name__)

_IDLE_CONNECTION = 75.0  # seconds
_CLOSING = 2.0  # seconds that answers of the control plane get at the end


def run(settings: Settings) -> None:
    """The daemon as a process of its own, until it is asked to stop. Raises what `serve` raises."""
    import uvloop

    daemon.prepare_process()
    with durable.translated("running the daemon", settings.data_dir):
        uvloop.run(serve(settings, last=True))


async def serve(
    settings: Settings,
    *,
    ready: Callable[[], None] | None = None,
    registry: BackendRegistry | None = None,
    last: bool = False,
) -> None:
    """Holds the data directory, serves until a signal or `POST /shutdown`, drains, and leaves nothing behind. `ready`
    is called once both listeners answer; `registry` replaces the installed backends; with `last` the process ends
    afterwards. Raises `AlreadyRunning`,
    `ConfigurationError`, `StorageFailed`."""
    with (
        daemon.hold(settings.data_dir, settings.socket) as announce,
        logs.logging_to(settings.data_dir / "logs", settings.log_level),
    ):
        await asyncio.to_thread(sweep_orphans)
        runtime = settings.runtime_folder()
        daemon.remove_dead_sockets(runtime)
        daemon.remove_abandoned(runtime)
        logs.prune_engine_logs(settings.data_dir / "logs")
        with ExitStack() as sockets:
            if tcp := open_port(settings.listen, wanted=settings.is_given("listen")):
                sockets.enter_context(tcp)
            path = settings.socket_path()
            unix = daemon.UnixListener(path)
            addresses = Addresses(path, daemon.address(tcp), settings.data_dir)
            doorway = sockets.enter_context(closing(Doorway(unix, addresses, settings.socket_path, announce)))
            lifecycle = daemon.Lifecycle()
            parts = await asyncio.to_thread(build, settings, registry)
            with lifecycle.on_signals(last=last):
                await _listen(settings, parts, addresses, lifecycle, doorway, tcp, ready)
        if addresses.socket.parent in default_runtimes(settings.data_dir):
            with suppress(OSError):  # not empty: another program's
                addresses.socket.parent.rmdir()


@dataclass(frozen=True, slots=True)
class Parts:
    """What the daemon consists of, each made once."""

    store: Store
    registry: BackendRegistry
    configurations: Configurations
    resolver: Resolver
    judge: Judge
    probe: MemoryProbe
    scheduler: Scheduler
    puller: Puller
    installer: Installer
    preloader: Preloader


def build(settings: Settings, registry: BackendRegistry | None = None) -> Parts:
    """Opens the store and finds the backends; nothing runs yet. Raises `ConfigurationError`."""
    data = settings.data_dir
    state = data / "state"
    state.mkdir(mode=0o700, exist_ok=True)
    durable.sweep_temporaries(state)
    store = Store(data)
    registry = registry or BackendRegistry.discover(lambda backend: _context(settings, backend))
    configurations = Configurations(state / "configurations.json")
    probe = MemoryProbe(settings.memory_budget, settings.memory_reserve)
    resolver = Resolver(
        store,
        registry,
        configurations,
        logs=data / "logs",
        keep_alive=settings.keep_alive,
        stop_grace=settings.stop_grace,
        file_models=settings.models,
    )
    scheduler = Scheduler(
        registry,
        runtime_dir=settings.runtime_folder,
        probe=probe,
        ledger=Ledger(state / "memory.json"),
        max_queue=settings.max_queue,
        max_wait=settings.max_wait,
        drain_limit=settings.drain_limit,
        stall_limit=settings.stall_limit,
        wedge_limit=settings.wedge_limit,
    )
    installer = Installer(registry, scheduler, resolver.forget)
    judge = Judge(registry, resolver)
    check_tables(_reading(settings), store, configurations, judge)
    preloader = Preloader(store, resolver, scheduler)
    puller = Puller(store)
    shapes.prime()
    return Parts(store, registry, configurations, resolver, judge, probe, scheduler, puller, installer, preloader)


def application(
    parts: Parts,
    pipeline: Pipeline,
    access: Access,
    addresses: Addresses,
    lifecycle: daemon.Lifecycle,
    reloader: Reloader,
    body_limit: int,
) -> web.Application:
    """The control plane, and the inference routes once more in plain aiohttp."""
    app = web.Application(middlewares=[envelope(access, lifecycle.stop.is_set)], client_max_size=body_limit)
    app.on_response_prepare.append(finish_head)
    store, registry, scheduler, configurations = parts.store, parts.registry, parts.scheduler, parts.configurations
    models = ModelRoutes(store, parts.puller, scheduler, registry, configurations)
    statuses = Statuses(registry)
    engines = EngineRoutes(store, scheduler, registry, statuses, parts.installer)
    configure = ConfigurationRoutes(store, scheduler, registry, configurations, parts.resolver, parts.judge)
    system = SystemRoutes(
        addresses, lifecycle, store, statuses, scheduler, lambda: pipeline.active, parts.resolver.is_needed
    )
    insight = InsightRoutes(store, parts.resolver, scheduler, parts.puller)
    residency = ResidencyRoutes(store, scheduler, parts.preloader, configure.change)
    families = (insight, models, engines, configure, residency, reloader, system)
    app.add_routes([*aiolane.routes(pipeline), *(route for family in families for route in family.routes())])
    return app


async def _listen(
    settings: Settings,
    parts: Parts,
    addresses: Addresses,
    lifecycle: daemon.Lifecycle,
    doorway: Doorway,
    tcp: socket.socket | None,
    ready: Callable[[], None] | None,
) -> None:
    port = tcp.getsockname()[1] if tcp else 0
    access = Access.for_listener(port, settings.hosts, settings.origins)
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = Limits.within(descriptors, body=settings.body_limit, total_body=settings.total_body_limit)
    pipeline = Pipeline(InstallOnDemand(parts.resolver, parts.installer), parts.scheduler, access, limits)
    reloader = _reloader(settings, parts, access, port)
    lifecycle.on_reload = reloader.in_background
    app = application(parts, pipeline, access, addresses, lifecycle, reloader, settings.body_limit)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_CLOSING)
    await runner.setup()
    assert runner.server is not None
    fallback = connections(runner.server, access_log=None, keepalive_timeout=_IDLE_CONNECTION)
    loop = asyncio.get_running_loop()
    lanes = [fastlane.protocol_factory(pipeline, fallback, local=local) for local in (True, False)]

    async def serve_unix(unix: daemon.UnixListener) -> asyncio.Server:
        return await loop.create_unix_server(lanes[0], sock=unix.socket, backlog=daemon.BACKLOG)

    server = await loop.create_server(lanes[1], sock=tcp, backlog=daemon.BACKLOG) if tcp else None
    await doorway.open(serve_unix)
    log.info("modelrunner %s serves unix://%s %s", __version__, addresses.socket, addresses.listen)
    foresight = Foresight(parts.store, parts.resolver, parts.scheduler)
    background = [
        asyncio.create_task(parts.preloader.run(), name="preload"),
        asyncio.create_task(foresight.run(), name="foresight"),
        asyncio.create_task(doorway.watch(serve_unix), name="doorway"),
    ]
    try:
        if ready:
            ready()
        await lifecycle.stop.wait()
    finally:
        log.info("shutting down")
        for task in background:
            task.cancel()
        await asyncio.wait(background)
        await _drain(parts.scheduler, lifecycle, settings.drain_limit)
        if server:
            server.close()
        doorway.close()
        for lane in lanes:
            lane.drain()
        await parts.installer.close()
        await runner.cleanup()
        log.info("ended")


async def _drain(scheduler: Scheduler, lifecycle: daemon.Lifecycle, limit: float) -> None:
    """Lets answers end for `limit` seconds, or until somebody asks a second time."""
    closing = asyncio.ensure_future(scheduler.close(limit))
    hurry = asyncio.ensure_future(lifecycle.hurry.wait())
    await asyncio.wait((closing, hurry), return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not closing.done():
        await scheduler.close(0.0)
    await closing


def _context(settings: Settings, backend: type[Backend]) -> BackendContext:
    """Raises `ConfigurationError`."""
    name = backend.name
    table: dict[str, Any] = dict(settings.backends.get(name, {}))
    check_settings(backend, table, settings.place)
    if name == "llama.cpp" and settings.llama_server:  # MODELRUNNER_LLAMA_SERVER is short for this table's key
        table["llama_server"] = settings.llama_server
    data = settings.data_dir
    return BackendContext(data / "engines", settings.cache_dir, data / "logs", table, data / "state" / name)


def _reading(settings: Settings) -> Reading:
    """Raises `ConfigurationError` for a table whose name is no reference."""
    for reference in settings.models:
        try:
            Reference.parse(reference)
        except InvalidReference as error:
            raise ConfigurationError(f"{settings.place('models', reference)}: {error.message}") from None
    values = {name: getattr(settings, name) for name in Settings.model_fields if name != "models"}
    return Reading(values, settings.models, settings.place)


def _reloader(settings: Settings, parts: Parts, access: Access, port: int) -> Reloader:
    """Says which settings can be changed while the daemon runs, and who is told."""
    scheduler = parts.scheduler
    setters: dict[str, Setter] = {
        **dict.fromkeys(("hosts", "origins"), lambda s: access.allow(host_names(port, s["hosts"]), s["origins"])),
        **dict.fromkeys(
            ("memory_budget", "memory_reserve"),
            lambda s: parts.probe.set_limits(s["memory_budget"], s["memory_reserve"]),
        ),
        **dict.fromkeys(
            ("max_queue", "max_wait"),
            lambda s: scheduler.set_limits(max_queue=s["max_queue"], max_wait=s["max_wait"]),
        ),
        "keep_alive": lambda s: parts.resolver.set_keep_alive(s["keep_alive"]),
        "log_level": lambda s: logs.set_level(s["log_level"]),
    }
    return Reloader(
        _reading(settings),
        lambda: _reading(settings.reread()),
        setters,
        store=parts.store,
        scheduler=scheduler,
        configurations=parts.configurations,
        resolver=parts.resolver,
        judge=parts.judge,
    )
