"""What a head and its hosts say to each other: JSON over HTTPS, between two daemons of the same version."""

import msgspec

from modelrunner import errors
from modelrunner.errors import EngineFailed, ModelRunnerError
from modelrunner.sandbox import Sandbox
from modelrunner.scheduler.devices import Device
from modelrunner.types import RequiredMemory, RunSpec

NAME = "modelrunner-host"
"""The name in the certificate of every host."""
SILENCE = 10.0
"""Seconds without a report after which a host counts as gone; it reports each second."""
HEADLESS = 15.0
"""Seconds without a head after which a host ends its runners. A head that does not take what is sent for `SILENCE` is
gone: together less than 30."""


class Fault(msgspec.Struct, frozen=True):
    """An error: the name of its class in `modelrunner.errors`, and its sentence."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> "Fault":
        return cls(type(error).__name__, str(error) or type(error).__name__)

    def error(self) -> ModelRunnerError:
        """Returns the same error; one of another class becomes `EngineFailed`."""
        named = getattr(errors, self.kind, None)
        kind = named if isinstance(named, type) and issubclass(named, ModelRunnerError) else EngineFailed
        error = kind.__new__(kind, self.message)
        ModelRunnerError.__init__(error, self.message)
        return error


class RunnerOrder(msgspec.Struct, frozen=True):
    """The order to run: the parts of a `RunnerId`, the values of the run (`values_of`), and the memory that the plan
    gave it."""

    backend: str
    files: str
    mode: str
    revision: int
    number: int
    values: msgspec.Raw
    memory: RequiredMemory


class RunnerStarted(msgspec.Struct, frozen=True):
    """The answer to an order: the port on the host at which the engine is asked, and the key for it."""

    port: int
    secret: str


class RunnerReport(msgspec.Struct, frozen=True):
    """A runner of the host, as `Runner` describes the attributes. `reads` has the fields that each endpoint reads;
    `failure` is set once it has ended by itself."""

    stage: str
    ready: bool
    names: tuple[str, ...] | None
    reads: dict[str, frozenset[str]]
    sleep_level: int
    pid: int | None
    sandbox: Sandbox
    failure: Fault | None = None


class HostReport(msgspec.Struct, frozen=True):
    """The state of a host. `machine` is the architecture of its processors, `numbers` are those of `Host.numbers` by
    backend, `models` the IDs of its models, `seen` those of the head's that it reads where they are, `runners` by the
    ID that the head gave them."""

    version: str
    machine: str
    budget: RequiredMemory
    devices: tuple[Device, ...]
    numbers: dict[str, tuple[int, ...] | None]
    models: frozenset[str]
    seen: frozenset[str]
    runners: dict[str, RunnerReport]


class HostVersion(msgspec.Struct, frozen=True):
    """What a `HostReport` of any version has."""

    version: str


class HostAddress(msgspec.Struct, frozen=True):
    """Where a host listens: an address and a port, the key for it, and the text of its certificate in PEM."""

    address: str
    port: int
    key: str
    certificate: str


def models_of(spec: RunSpec) -> list[str]:
    """Returns the IDs of the models that the run needs."""
    return [bundle.model_id for bundle in (spec.bundle, spec.draft) if bundle is not None]


class ModelAnnounced(msgspec.Struct, frozen=True):
    """Announces a model whose archive has `size` bytes; 0 asks whether it is there, and keeps no room. The models with
    the IDs in `keep` are not removed for it. It lies in the head's `folder`, which the host may see; "" if it does
    not."""

    size: int
    keep: frozenset[str] = frozenset()
    folder: str = ""


class Received(msgspec.Struct, frozen=True):
    """How many bytes of the archive have come, whether the model is there, and the IDs of all models that are: see
    `HostReport`."""

    bytes: int
    complete: bool
    models: frozenset[str]
    seen: frozenset[str] = frozenset()
