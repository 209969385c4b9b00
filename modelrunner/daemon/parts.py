"""Makes the parts of the daemon, once, from its settings."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelrunner import durable
from modelrunner.aliases import Alias
from modelrunner.backend import Backend, BackendContext
from modelrunner.config.enginetables import AnyEngineTable
from modelrunner.config.locations import ConfigurationError, logins_beside
from modelrunner.config.registrytables import RegistryTable
from modelrunner.config.settings import Settings
from modelrunner.daemon import logs, shapes
from modelrunner.daemon.engines import configured, declared_id
from modelrunner.engineapi import ApiShape, ServiceCall
from modelrunner.errors import InvalidReference, ModelNotFound
from modelrunner.gateway.access import host_names
from modelrunner.gateway.calls import Call
from modelrunner.gateway.interceptors.embedding_batcher import EmbeddingBatcher
from modelrunner.gateway.interceptors.response_cache import ResponseCache
from modelrunner.gateway.interceptors.resumable_streams import ResumableStreams
from modelrunner.gateway.request.pipeline import Pipeline
from modelrunner.gateway.request.work import Interceptor
from modelrunner.gateway.routes import add_calls
from modelrunner.jsonfile import JsonFile
from modelrunner.keys.allowances import Rates
from modelrunner.keys.ring import KeyRing
from modelrunner.models.abilities import Checks, KnownAbilities
from modelrunner.models.aliases import Aliases
from modelrunner.models.backendtables import check_settings
from modelrunner.models.configurations import Configurations
from modelrunner.models.configurator import Configurator, SettingParts, Validator
from modelrunner.models.disk import DiskMeter, LastUsed, Pruner
from modelrunner.models.explain import Explainer
from modelrunner.models.foreign import ForeignStores
from modelrunner.models.health import HealthCheck
from modelrunner.models.installs import Installer, InstallOnDemand, Statuses
from modelrunner.models.library import Library
from modelrunner.models.making import Quantizer, QuantizeTool
from modelrunner.models.publishing import Publisher, RemoteModels
from modelrunner.models.reload import FileSettings, Reloader, Setter, check_tables
from modelrunner.models.rendering import Renderings, TemplateFiles
from modelrunner.models.residency import Preloader, Residency
from modelrunner.models.resolve import Resolver
from modelrunner.models.runspecs import RunSpecs
from modelrunner.models.tuner import Tuner
from modelrunner.models.tunings import Tunings
from modelrunner.models.verification import Verifier
from modelrunner.oci.credentials import Credentials
from modelrunner.oci.push import Pusher
from modelrunner.oci.registries import Registries, RegistryRules
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.pull import Puller, Transfers
from modelrunner.pull.address import AddressSource
from modelrunner.pull.huggingface import HuggingFaceSource
from modelrunner.pull.modelscope import ModelScopeSource
from modelrunner.pull.ociregistry import RegistrySource
from modelrunner.pull.pypi import PypiSource
from modelrunner.pull.source import Source
from modelrunner.pull.uploads import Uploads
from modelrunner.sandbox import Permissions
from modelrunner.scheduler import Ledger, LocalHost, MemoryProbe, Scheduler
from modelrunner.store import Reference, Store, foreignformats
from modelrunner.telemetry.accesslog import AccessLog
from modelrunner.telemetry.exposition import drafts_of


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the daemon; the operations, from `library` on, know no HTTP."""

    store: Store
    registry: BackendRegistry
    configurations: Configurations
    resolver: Resolver
    probe: MemoryProbe
    specs: RunSpecs
    host: LocalHost
    scheduler: Scheduler
    library: Library
    transfers: Transfers
    last_used: LastUsed
    pruner: Pruner
    foreign: ForeignStores
    setting_parts: SettingParts
    configurator: Configurator
    residency: Residency
    remote: RemoteModels
    quantizer: Quantizer
    explainer: Explainer
    disk: DiskMeter
    statuses: Statuses
    installer: Installer
    on_demand: InstallOnDemand
    preloader: Preloader
    health_check: HealthCheck
    verifier: Verifier
    tuner: Tuner
    registries: Registries
    publisher: Publisher
    keys: KeyRing
    engines: dict[str, AnyEngineTable]
    """The engines of the configuration file."""


def build(
    settings: Settings,
    registry: BackendRegistry | None = None,
    keys: KeyRing | None = None,
    port: int | None = None,
) -> Parts:
    """Opens the store and finds the backends; starts nothing. `port` is that of the TCP listener, None without one.
    Raises `ConfigurationError`, `StorageFailed`."""
    data = settings.data_dir
    state = data / "state"
    state.mkdir(mode=0o700, exist_ok=True)
    durable.sweep_temporaries(state)
    registry = registry or BackendRegistry.discover(
        lambda backend: _context(settings, backend),
        configured=[configured(name, table, settings.config) for name, table in settings.engines.items()],
        chosen=JsonFile(state / "choices.json", dict[str, str], cache=True),
    )
    for backend in registry:
        _add_calls(backend)
        for format in backend.file_formats:
            foreignformats.register(format)
    store = Store(data, settings.models_quota, settings.model_dirs)
    engines = dict(settings.engines)
    configurations = Configurations(
        state / "configurations.json",
        tables=settings.model_tables(),
        model_id=lambda reference: _id(store, reference) or declared_id(engines, reference),
    )
    renderings = Renderings(state / "templates.json")
    permissions = Permissions(private=(data,), private_port=port) if settings.sandbox == "on" else None
    probe = MemoryProbe(settings.memory_budget, settings.memory_reserve, list_devices=registry.devices)
    host = LocalHost(
        registry,
        settings.runtime_folder,
        data / "logs",
        probe=probe,
        permissions=permissions,
        stop_grace=settings.stop_grace,
        stall_limit=settings.stall_limit,
        wedge_limit=settings.wedge_limit,
    )
    tunings = Tunings(
        state / "tunings.json",
        lambda: host.kind(tuple(range(len(host.devices())))),
        alone=not settings.cluster.ray_address,
    )
    resolver = Resolver(
        store,
        registry,
        configurations,
        specs := RunSpecs(store, TemplateFiles(state / "templates", renderings), tunings),
        keep_alive=settings.keep_alive,
        max_seconds=settings.max_seconds,
    )
    validator = Validator(registry, resolver)
    check_tables(file_settings(settings), store, configurations.settings, validator)
    keys = KeyRing(state / "keys.json") if keys is None else keys
    scheduler = Scheduler(
        registry,
        [host],
        ledger=Ledger(state / "memory.json"),
        max_queue=settings.max_queue,
        max_wait=settings.max_wait,
        drain_limit=settings.drain_limit,
        unasked=lambda: None if keys else "",
    )
    registries = Registries(_rules(settings.registries))
    credentials = Credentials(logins_beside(settings.config))
    uploads = Uploads(store)
    tool = QuantizeTool(registry, data / "logs", stop_grace=settings.stop_grace, permissions=permissions)
    sources = sources_of(registries, credentials)
    transfers = Transfers(rate=settings.download_rate, busy=scheduler.awaited)
    puller = Puller(store, sources, transfers=transfers, uploads=uploads, check=renderings.require_usable)
    abilities = KnownAbilities(store, resolver, configurations, renderings, state / "abilities.json")
    checks = Checks(state / "checks.json", registry, configurations)

    def forget_backends() -> None:
        resolver.forget()
        abilities.forget()
        checks.forget_engines()

    aliases = Aliases(store, resolver, scheduler, settings.aliases)
    library = Library(store, puller, scheduler, registry, configurations, abilities, checks, renderings, aliases)
    last_used = LastUsed(state / "used.json", store, scheduler)
    setting_parts = SettingParts(store, scheduler, configurations, resolver, validator)
    configurator = Configurator(setting_parts)
    installer = Installer(registry, scheduler, forget_backends)
    on_demand = InstallOnDemand(resolver, installer)
    preloader = Preloader(setting_parts, on_demand, settings.groups)
    shapes.prime()
    return Parts(
        store=store,
        registry=registry,
        configurations=configurations,
        resolver=resolver,
        probe=probe,
        specs=specs,
        host=host,
        scheduler=scheduler,
        library=library,
        transfers=transfers,
        last_used=last_used,
        foreign=ForeignStores(),
        pruner=Pruner(store, library, scheduler, resolver, last_used),
        setting_parts=setting_parts,
        configurator=configurator,
        residency=Residency(store, scheduler, registry, configurator),
        remote=RemoteModels(puller),
        quantizer=Quantizer(store, puller, scheduler, tool),
        explainer=Explainer(store, configurations, resolver, scheduler, puller),
        disk=DiskMeter(store, registry, state, last_used),
        statuses=Statuses(registry),
        installer=installer,
        on_demand=on_demand,
        verifier=Verifier(store, scheduler.events, state / "verified.json", settings.verify_every),
        tuner=Tuner(setting_parts, tunings, drafts_of),
        preloader=preloader,
        health_check=HealthCheck(library, scheduler, preloader, resolver.is_needed),
        registries=registries,
        publisher=Publisher(Pusher(store, registries, credentials), scheduler),
        keys=keys,
        engines=engines,
    )


def _add_calls(backend: Backend | type[Backend]) -> None:
    add_calls({path: _call(path, added) for path, added in backend.calls.items()})


def _call(path: str, added: ServiceCall) -> Call:
    passes = added.shape in (ApiShape.OPAQUE, ApiShape.TRANSCRIPTION)
    return Call(added.mode, path, text=added.text, uploads=passes)


def _rules(tables: Mapping[str, RegistryTable]) -> dict[str, RegistryRules]:
    return {host: RegistryRules(**table.model_dump()) for host, table in tables.items()}


def _id(store: Store, reference: str) -> str | None:
    try:
        return store.whole(reference)[0].id
    except (ModelNotFound, InvalidReference):
        return None


def _context(settings: Settings, backend: type[Backend]) -> BackendContext:
    """Raises `ConfigurationError`."""
    name = backend.name
    table: dict[str, Any] = dict(settings.backends.get(name, {}))
    check_settings(backend, table, settings.place)
    if name == "llama.cpp" and settings.llama_server:  # MODELRUNNER_LLAMA_SERVER is short for this table's key
        table["llama_server"] = settings.llama_server
    data = settings.data_dir
    return BackendContext(data / "engines", settings.cache_dir, data / "logs", table, data / "state" / name)


def file_settings(settings: Settings) -> FileSettings:
    """Returns the settings that a reload compares. Raises `ConfigurationError` for a table whose name is no
    reference."""
    named: list[tuple[str, tuple[str, ...]]] = [(one, ("models", one)) for one in settings.models]
    named += [(one, ("groups", name, "models")) for name, group in settings.groups.items() for one in group.models]
    for reference, key in named:
        try:
            Reference.parse(reference)
        except InvalidReference as error:
            raise ConfigurationError(f"{settings.place(*key)}: {error.message}") from None
    values = {name: getattr(settings, name) for name in Settings.model_fields if name != "models"}
    return FileSettings(values, settings.model_tables(), settings.place)


def set_aliases(pipeline: Pipeline, aliases: Aliases, names: Mapping[str, Alias]) -> None:
    """Sets the aliases. Without aliases, no request looks for one."""
    aliases.set(names)
    pipeline.use_aliases(aliases if names else None)


def set_interceptors(settings: Settings, pipeline: Pipeline) -> ResumableStreams:
    """Gives the pipeline the interceptors that the settings ask for."""
    streams = ResumableStreams(pipeline.exchanges, settings.streams_memory, settings.streams_age)
    interceptors: list[Interceptor] = []
    if settings.response_cache:
        interceptors.append(ResponseCache(pipeline.exchanges, settings.response_cache, settings.response_cache_age))
    if settings.embedding_window:
        interceptors.append(EmbeddingBatcher(pipeline.exchanges, settings.embedding_window, settings.embedding_batch))
    pipeline.use_interceptors(*interceptors, streams=streams if settings.streams_memory else None)
    return streams


def address_rates(values: Mapping[str, Any]) -> Rates:
    """Returns the limits of each client address, from the settings by name."""
    return Rates(*(values[f"address_{name}"] for name in Rates._fields))


def make_reloader(settings: Settings, parts: Parts, pipeline: Pipeline, access_log: AccessLog, port: int) -> Reloader:
    """Makes the reloader, with a setter for each setting that can change while the daemon runs."""
    scheduler, access = parts.scheduler, pipeline.access

    def set_quota(changed: Mapping[str, Any]) -> None:
        parts.store.quota = changed["models_quota"]

    def set_download_rate(changed: Mapping[str, Any]) -> None:
        parts.transfers.rate = changed["download_rate"]

    async def set_engines(changed: Mapping[str, Any]) -> None:
        before, after = dict(parts.engines), changed["engines"]
        for name in [name for name in {**before, **after} if before.get(name) != after.get(name)]:
            kind = configured(name, after[name], settings.config) if name in after else None
            engine = await asyncio.to_thread(kind, _context(settings, kind)) if kind else None
            if kind:
                _add_calls(kind)
            parts.registry.configure(name, engine)
            parts.scheduler.renew(name)
        parts.engines.clear()
        parts.engines.update(after)
        parts.resolver.forget()

    setters: dict[str, Setter] = {
        "engines": set_engines,
        **dict.fromkeys(("hosts", "origins"), lambda s: access.allow(host_names(port, s["hosts"]), s["origins"])),
        **dict.fromkeys(
            ("memory_budget", "memory_reserve"),
            lambda s: parts.probe.set_limits(s["memory_budget"], s["memory_reserve"]),
        ),
        **dict.fromkeys(
            [f"address_{name}" for name in Rates._fields],
            lambda s: pipeline.addresses.set_rates(address_rates(s)),
        ),
        **dict.fromkeys(
            ("max_queue", "max_wait"),
            lambda s: scheduler.set_limits(max_queue=s["max_queue"], max_wait=s["max_wait"]),
        ),
        "aliases": lambda s: set_aliases(pipeline, parts.library.aliases, s["aliases"]),
        "groups": lambda s: parts.preloader.use_groups(s["groups"]),
        "keep_alive": lambda s: parts.resolver.set_keep_alive(s["keep_alive"]),
        "max_seconds": lambda s: parts.resolver.set_max_seconds(s["max_seconds"]),
        "access_log": lambda s: access_log.use(s["access_log"]),
        "log_level": lambda s: logs.set_level(s["log_level"]),
        "models_quota": set_quota,
        "model_dirs": lambda s: asyncio.to_thread(parts.store.set_folders, s["model_dirs"]),
        "download_rate": set_download_rate,
        "registries": lambda s: parts.registries.replace(_rules(s["registries"])),
    }
    return Reloader(file_settings(settings), lambda: file_settings(settings.reread()), setters, parts.setting_parts)


def sources_of(registries: Registries, credentials: Credentials) -> tuple[Source, ...]:
    """Returns every source of the daemon, in the order in which they are asked whether a text is theirs."""
    return (
        PypiSource(),
        HuggingFaceSource(),
        ModelScopeSource(),
        AddressSource(),
        RegistrySource(registries, credentials),
    )
