"""Decides whether a model can be run with its configuration: before a change is stored, and before a file is
applied."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from modelrunner.backend import Backend, ChecksRuns, TakesFlags, check_context
from modelrunner.config.modelconfig import ModelConfiguration, schema, table_name, unknown
from modelrunner.errors import BadRequest, Misdirected
from modelrunner.models.backendtables import backend_options, check_backends
from modelrunner.models.configurations import ModelSettings
from modelrunner.models.resolve import Resolver
from modelrunner.plugins.isolation import interface_of
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.scheduler import Target
from modelrunner.types import DECLARED, Bundle, Mode, RunSpec


class Validator:
    """Its methods may read files: call them in a thread."""

    def __init__(self, registry: BackendRegistry, resolver: Resolver) -> None:
        self._registry = registry
        self._resolver = resolver

    def check_backends(self, tables: Mapping[str, Any], place: Callable[..., str]) -> None:
        """Checks the `[backends."NAME"]` tables; `place` says where in the file a key stands. Raises
        `ConfigurationError`."""
        check_backends(tables, self._registry, place)

    def check_engines(self, names: Iterable[str]) -> None:
        """Raises `ConfigurationError` for an engine of the configuration file with the name of a backend."""
        for name in names:
            self._registry.check_free(name)

    def tables(self) -> set[str]:
        """Returns the names of the backends' own tables."""
        return {table_name(backend.name) for backend in self._registry}

    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema of a model's settings, with the backends' own tables."""
        tables = {table_name(backend.name): backend.options_model.model_json_schema() for backend in self._registry}
        return schema([backend.name for backend in self._registry], tables)

    def check_options(self, settings: ModelConfiguration) -> None:
        """Checks the tables that only backends understand. Raises `BadRequest`."""
        tables = self.tables()
        for name in settings.options.keys() - tables:
            raise unknown(name, tables)
        for backend in self._registry:
            backend_options(backend, settings)

    def target(self, bundle: Bundle, mode: Mode, settings: ModelSettings) -> Target:
        """Returns the target that a request would get with `settings`, which need not hold yet. Raises `BadRequest`,
        `Misdirected`, `NotImplementedHere`, `ModelNotFound` for a draft model that is not here, and what
        `Resolver.backend_of` raises."""
        backend = self._resolver.configured_backend(bundle, mode, settings)
        target = self._resolver.target(backend, bundle, mode, settings)
        _check(self._resolver, backend, target.spec)
        return target


def _check(resolver: Resolver, backend: Backend, spec: RunSpec) -> None:
    bundle = spec.bundle
    if bundle.format not in (DECLARED, *backend.formats):
        raise Misdirected(f"{backend.name} cannot serve {bundle.format} models", param="backend")
    resolver.check_mode(backend, bundle, bundle.name, spec.mode)
    if flags := interface_of(backend, TakesFlags):
        flags.check_flags(spec.flags, spec.mode)
    elif spec.flags:
        raise BadRequest(f"{backend.name} takes no runtime flags", param="runtime-flags")
    if checks := interface_of(backend, ChecksRuns):
        checks.check(spec)
        return
    check_context(spec)
    if spec.draft is not None or spec.ngram:
        raise BadRequest(f"{backend.name} has no speculative decoding", param="speculative")
