"""The interface of a backend, and the values that it reports."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

from modelrunner.engineapi import EngineApi, ServiceCall
from modelrunner.errors import BadRequest, ModelRunnerError
from modelrunner.modelformat import FileFormat
from modelrunner.types import (
    DECLARED,
    Bundle,
    Endpoint,
    EngineDevice,
    Launch,
    Mode,
    ModelFormat,
    ModelHeader,
    QuantizeSpec,
    RequiredMemory,
    RunSpec,
    Variant,
)


class BackendState(StrEnum):
    RUNNING = "running"  # installed and usable; no engine process need exist
    INSTALLING = "installing"
    NOT_INSTALLED = "not-installed"
    ERROR = "error"


_LABELS = {
    BackendState.RUNNING: "Running",
    BackendState.INSTALLING: "Installing",
    BackendState.NOT_INSTALLED: "Not Installed",
    BackendState.ERROR: "Error",
}


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """The state of an engine here. `str()` gives docker/model-runner's text (pkg/inference/backend.go): "Running:
    llama.cpp b11549", "Installing", "Not Installed: binary not found"; `fault` follows after a semicolon."""

    state: BackendState
    details: str = ""
    #: A sentence about what a running engine leaves unused, and the command that mends it.
    fault: str = ""

    def __str__(self) -> str:
        text = f"{_LABELS[self.state]}: {self.details}" if self.details else _LABELS[self.state]
        return f"{text}; {self.fault}" if self.fault else text


@dataclass(frozen=True, slots=True)
class InstallProgress:
    """A step of an installation. `current` and `total` are bytes, or steps where `total` is small; 0 if unknown."""

    message: str
    current: int = 0
    total: int = 0


ProgressCallback = Callable[[InstallProgress], None]


@dataclass(frozen=True, slots=True)
class BackendContext:
    """The folders a backend may write in, and its table from the configuration (`[backends.NAME]`).

    `engines` (in the data directory) holds one link per installed engine; `cache` holds the builds that the links point
    to, keyed by version and options and shared by data directories; `logs` takes installation logs. `state` (in the
    data directory too, made by the backend, mode 0700) is for files that outlive a run; None if the backend may keep
    none.
    """

    engines: Path
    cache: Path
    logs: Path
    settings: Mapping[str, Any]
    state: Path | None = None


@dataclass(frozen=True, slots=True)
class DeclaredModel:
    """A model that is not in the daemon's store."""

    name: str
    """As clients write it, and as the engine knows it."""
    capabilities: frozenset[str]
    """Some of `CAPABILITIES`, or those that modes of the backend need; empty if unknown."""
    size: int = 0
    """Bytes; 0 if unknown."""
    context_length: int | None = None
    """The tokens that the model was trained for, None if unknown."""

    def bundle(self, backend: str) -> Bundle:
        """Returns the model as a bundle without files."""
        return Bundle(
            model_id="declared:" + sha256(f"{backend}/{self.name}".encode()).hexdigest(),
            references=(self.name,),
            format=DECLARED,
            directory=Path("/"),
            files={},
            header=ModelHeader({}, ()),
            size=self.size,
            context_length=self.context_length,
            capabilities=self.capabilities,
        )


class NoSettings(BaseModel):
    """The settings of a backend that has none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Backend(ABC):
    """An adapter to one inference engine. It never sees an HTTP request; it makes command lines, and runs them with
    `modelrunner.processes.process.run`. What only some backends can do is in the optional interfaces below."""

    name: ClassVar[str]
    formats: ClassVar[frozenset[ModelFormat]]
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.COMPLETION})
    file_formats: ClassVar[tuple[FileFormat, ...]] = ()
    """The formats that the backend brings, besides modelrunner's."""
    calls: ClassVar[Mapping[str, ServiceCall]] = MappingProxyType({})
    """The calls that the backend adds to the daemon's HTTP interface, by their paths (`/v1/audio/speech`), which also
    have the prefix of an engine or a runner. A path of modelrunner's own keeps its meaning."""
    shared_modes: ClassVar[Mapping[Mode, tuple[Mode, str]]] = MappingProxyType({})
    """Modes whose requests a process of another mode serves: that mode, and the capability that a model must have for
    it, "" for any model. One without capabilities may have it: its engine decides."""
    uses_external_model_management: ClassVar[bool] = False
    """True if the engine has its models itself, and the daemon's store has none of them: see `DeclaresModels`."""
    uses_tcp: ClassVar[bool] = False
    installs_on_demand: ClassVar[bool] = False
    """True if the first request that needs its engine installs it: tens of megabytes, not gigabytes."""
    takes_adapters: ClassVar[bool] = False
    """True if its engine applies the LoRA adapters of a bundle (`Bundle.adapters`). If not, the daemon refuses a model
    with adapters."""
    settings_model: ClassVar[type[BaseModel]] = NoSettings
    options_model: ClassVar[type[BaseModel]] = NoSettings
    """The settings of a model for this backend alone; `RunSpec.options` holds the validated value."""

    def __init__(self, context: BackendContext) -> None:
        self.context = context
        self.settings = self.settings_model.model_validate(dict(context.settings))

    @abstractmethod
    async def install(self, progress: ProgressCallback, **options: Any) -> None:
        """Makes the engine usable. It may be called again, and nothing half-installed is ever used. `options` are the
        backend's own (llama.cpp: `build=True`); an unknown one raises `BadRequest`. Raises `BackendUnavailable` with a
        message that says what to do."""

    @abstractmethod
    async def uninstall(self) -> None:
        """Removes what `install` made. The caller stops the runners first."""

    @abstractmethod
    async def run(self, spec: RunSpec, launch: Launch) -> NoReturn:
        """Serves the OpenAI API for exactly one model on the endpoint of `launch`, and never restarts the engine. The
        process options of `launch` go to `modelrunner.processes.process.run` as they are. It ends only by raising:
        `CancelledError` when stopped, `BackendExited` when the engine dies. By then every process that it started is
        gone. Raises `BackendUnavailable` if the engine is not installed."""

    @abstractmethod
    def status(self) -> BackendStatus:
        """Returns the state of the engine."""

    @abstractmethod
    async def disk_usage(self) -> int:
        """Returns the bytes of the installed engine, where a file with several names counts once."""

    @abstractmethod
    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        """Estimates the memory at a full context from the model's own header; never starts the engine."""

    def api(self, spec: RunSpec) -> EngineApi:
        """Returns the HTTP interface that the engine of this run has. The daemon asks once before it chooses the run,
        and once when the run begins. The default is OpenAI's."""
        return EngineApi.openai(spec.mode, spec.bundle.name)


def default_context_size(bundle: Bundle) -> int:
    """Returns the tokens of one sequence where neither a model's settings nor its backend say more: the model's own
    context, at most 8,192."""
    return min(bundle.context_length or 4096, 8192)


def check_context(spec: RunSpec) -> None:
    """Raises `BadRequest` for a context that is longer than the trained one."""
    longest = spec.bundle.context_length
    if longest is not None and spec.context_size > longest:
        raise BadRequest(
            f"context-size {spec.context_size} is beyond the {longest} tokens that the model was trained for",
            param="context-size",
        )


# The optional interfaces. A backend has one if it has all of its methods; it need not name the class. The daemon does
# something simple in place of one that is missing.


@runtime_checkable
class Ranks(Protocol):
    """A backend that is not as good as any other for each model and machine. Without it the rank is 0."""

    def priority(self, bundle: Bundle) -> float:
        """Returns the rank for this model on this machine. The daemon chooses the highest. Raises `BackendUnavailable`
        if the backend cannot run on this machine."""


@runtime_checkable
class DeclaresModels(Protocol):
    """Of a backend that `uses_external_model_management`. A model of the store with the same name comes first. Such a
    model cannot be pulled, removed or checked, and has the settings of any other."""

    def models(self) -> Sequence[DeclaredModel]:
        """Returns the models that the engine can run. The daemon asks when a request names a model that is not in the
        store, and for lists."""


@runtime_checkable
class RunsElsewhere(Protocol):
    """Of a backend whose engine is a server that runs already, on another machine or here. Nothing is started for it
    (`Backend.run` is never called), and its models need no memory. It also `DeclaresModels`, each with its own name and
    a slash before the name; other names that begin so are asked of the server too."""

    def endpoint(self) -> Endpoint:
        """Returns the address of the server, and how it is asked there. Raises `BackendUnavailable`."""


@runtime_checkable
class Versioned(Protocol):
    """An engine with versions: the daemon measures a model again when the version changes."""

    def version(self) -> str:
        """Returns the version of the engine that `run` would start, "" if there is none."""


@runtime_checkable
class Updates(Protocol):
    """An update that is not the same as an installation."""

    async def update(self, progress: ProgressCallback, **options: Any) -> None:
        """Installs the version that this release of the backend is pinned to. Parameters and errors are those of
        `Backend.install`."""


@runtime_checkable
class TakesFlags(Protocol):
    """An engine with runtime flags. Without it no flag is allowed. `modelrunner.sdk.flags.AllowList` helps."""

    def check_flags(self, flags: tuple[str, ...], mode: Mode) -> None:
        """Raises `BadRequest` unless every flag is on the typed allow-list."""

    def fold_flags(self, flags: tuple[str, ...]) -> tuple[Mapping[str, int | None], tuple[str, ...]]:
        """Takes out the flags that stand for a field of a model's configuration, and returns the values of
        `context_size`, `parallel` and `gpu_layers` that they set (None: the default). So each setting has one place.
        Raises `BadRequest` as `check_flags` does."""


@runtime_checkable
class ChecksRuns(Protocol):
    """Rules of its own for a run. Without it the daemon calls `check_context`, and refuses speculative decoding."""

    def check(self, spec: RunSpec) -> None:
        """Raises `BadRequest` for a run that cannot work according to the model's header. The daemon calls it in a
        thread when a model is configured."""


@runtime_checkable
class HasDefaults(Protocol):
    """Figures for a model that configures none. Without it they are `default_context_size` and 1."""

    def default_context_size(self, bundle: Bundle) -> int:
        """Returns the number of tokens of one sequence."""

    def default_parallel(self, bundle: Bundle, mode: Mode) -> int:
        """Returns how many sequences the engine works on at once."""


@runtime_checkable
class Tunes(Protocol):
    """Has flags that may make a run faster on some machines, and change neither its answers nor its window."""

    def tunings(self, spec: RunSpec) -> Sequence[tuple[str, ...]]:
        """Returns runtime flags that are worth measuring for the run, each of them by itself; none that `spec.flags`
        sets already."""


@runtime_checkable
class Grows(Protocol):
    """An engine that does not hold all of `required_memory` after its load."""

    def growth(self, spec: RunSpec) -> RequiredMemory:
        """Returns the part of `required_memory` that the engine uses only as its context fills."""


@runtime_checkable
class ListsDevices(Protocol):
    """An engine that says what it computes on. Without it the engine has the devices that drivers know, in the order of
    their PCI addresses."""

    def devices(self) -> Sequence[EngineDevice] | None:
        """Returns the devices of the engine that `run` would start, in the order of their numbers; none for an engine
        that computes on the processor, or for none at all; None for those that drivers know, until one is there. The
        daemon asks in a thread, every few seconds: what costs a process is asked once per engine, in a process that may
        hang without harm. Raises `BackendUnavailable` or `OSError` if the engine does not say."""


@runtime_checkable
class HasVariants(Protocol):
    """An engine that can run a model in several ways. Without it there is one, of `required_memory`. Its devices are
    numbered as in `ListsDevices`."""

    async def variants(self, spec: RunSpec, budget: RequiredMemory) -> Sequence[Variant]:
        """Returns the ways to run the model within this budget, at least one. Those of rank 0 are the configured run,
        one for each set of devices that can take it. Where the model's settings allow it, higher ranks need less and
        less memory (fewer layers on a device, less context). The places follow from the memory; flags or the
        `environment` of the variant's specification put the run there. It never starts the engine. Raises `BadRequest`
        if the settings name a device that is not there."""


@runtime_checkable
class Diagnoses(Protocol):
    """Knows the words of its engine. `modelrunner.sdk.diagnosis.Diagnosis` makes all three from a list."""

    def progress(self, line: str) -> str | None:
        """Returns the stage of starting ("loading weights") that a log line announces, or None."""

    def explain(self, tail: str, quotes: bool) -> str | None:
        """Explains the engine's last words in a sentence, or returns None for an unknown cause. Without `quotes` the
        sentence must have nothing of `tail` in it: the engine has had requests, and what clients sent may stand there.
        """

    def ran_out_of_memory(self, tail: str) -> bool:
        """Returns True if the engine's last words say that memory ran out. The daemon then tries the run again with
        more memory, and in a smaller variant."""


@runtime_checkable
class Configured(Protocol):
    """May be described by the configuration file."""

    def written_at(self) -> str:
        """Returns the place, such as "config.toml, line 3", which the error of a run that fails names; "" for none."""


@runtime_checkable
class ExplainsErrors(Protocol):
    """Knows the errors that its engine answers. Without it a status below 500 passes as the client's mistake, and any
    other becomes 502."""

    def request_error(self, status: int, message: str, fields: Mapping[str, Any]) -> ModelRunnerError | None:
        """Returns the client's error for an engine's error answer with this status, 400 to 599 (`ContextTooLong` for a
        prompt that does not fit); None: the daemon decides. `fields` are the answer's error object, `message` is its
        text."""


@runtime_checkable
class SavesState(Protocol):
    """Saves something of a run for the next one, in `BackendContext.state`."""

    async def after_ready(self, spec: RunSpec, endpoint: Endpoint, owner: str | None) -> None:
        """Prepares a ready engine for its first request. It may restore what `before_stop` saved for the same `owner`.
        The model is loaded for the requests of the owner: an API key by its ID, or "" for the owner of the daemon,
        which is everybody where there are no keys. The owner is None if there are several, or none. A failure is
        logged, and the runner serves anyway. It has as long as a stop."""

    async def before_stop(self, spec: RunSpec, endpoint: Endpoint, owner: str | None) -> None:
        """Prepares an engine for its end, while it still answers requests. The engine has seen the requests of `owner`
        alone, who is named as in `after_ready`. If it is None, the content of the engine belongs to nobody and must not
        be saved."""

    async def forget(self, model_id: str) -> None:
        """Deletes what was saved of a model. The daemon calls it after the model was removed."""


@runtime_checkable
class Sleeps(Protocol):
    """An engine that can release memory without being stopped."""

    def sleep_level(self, spec: RunSpec) -> int:
        """Returns the level at which an idle engine of this run can sleep. 0: it releases nothing (it cannot sleep
        here, or sleep is not configured). 1: it releases its devices' memory, and moves the weights to main memory. 2:
        it drops the weights, too."""

    async def sleep(self, spec: RunSpec, endpoint: Endpoint) -> None:
        """Puts a ready engine without requests to sleep. The daemon calls it only if `sleep_level` is not 0."""

    async def wake(self, spec: RunSpec, endpoint: Endpoint) -> None:
        """Makes a sleeping engine ready again."""


@runtime_checkable
class Quantizes(Protocol):
    """An engine with a tool that makes smaller models."""

    async def quantize(self, spec: QuantizeSpec, progress: ProgressCallback) -> None:
        """Quantizes a model. If it is cancelled, it returns when the tool has ended. Raises `BadRequest` for an unknown
        type, `BackendUnavailable` if no engine here has the tool, `BackendExited` if the tool fails."""


OPTIONAL: tuple[type, ...] = (
    *(
        Ranks,
        DeclaresModels,
        RunsElsewhere,
        Versioned,
        Updates,
        TakesFlags,
        ChecksRuns,
        HasDefaults,
        Tunes,
        Grows,
        ListsDevices,
        HasVariants,
        Diagnoses,
    ),
    *(Configured, ExplainsErrors, SavesState, Sleeps, Quantizes),
)
