"""The names that the author of a backend imports. docs/backends.md shows a backend on a page.

A backend is a class derived from `Backend`, named by an entry point of group `modelrunner.backends`, that runs its
engine with `run`.
"""

from modelrunner.backend import (
    Backend,
    BackendContext,
    BackendState,
    BackendStatus,
    DeclaredModel,
    InstallProgress,
    ProgressCallback,
    check_context,
    default_context_size,
)
from modelrunner.boundedjson import read_object
from modelrunner.engineapi import (
    MESSAGES_ENDPOINTS,
    OPENAI_ENDPOINTS,
    ApiShape,
    EndpointApi,
    EngineApi,
    Probe,
    ServiceCall,
)
from modelrunner.errors import (
    BackendExited,
    BackendUnavailable,
    BadRequest,
    ContextTooLong,
    InsufficientDisk,
    InvalidModel,
    ModelRunnerError,
)
from modelrunner.modelformat import FileFormat, FormatReading
from modelrunner.processes.process import run, scrubbed_environment
from modelrunner.processes.query import output_of
from modelrunner.sandbox import Permissions, Sandbox
from modelrunner.types import (
    RAY_GROUP,
    Adapter,
    Bundle,
    Endpoint,
    EngineDevice,
    Launch,
    Mode,
    ModelFormat,
    ModelHeader,
    ProcessObserver,
    ProcessOptions,
    QuantizeSpec,
    RequiredMemory,
    RunSpec,
    Tensor,
    Variant,
)

__all__ = [
    "MESSAGES_ENDPOINTS",
    "OPENAI_ENDPOINTS",
    "RAY_GROUP",
    "Adapter",
    "ApiShape",
    "Backend",
    "BackendContext",
    "BackendExited",
    "BackendState",
    "BackendStatus",
    "BackendUnavailable",
    "BadRequest",
    "Bundle",
    "ContextTooLong",
    "DeclaredModel",
    "Endpoint",
    "EndpointApi",
    "EngineApi",
    "EngineDevice",
    "FileFormat",
    "FormatReading",
    "InstallProgress",
    "InsufficientDisk",
    "InvalidModel",
    "Launch",
    "Mode",
    "ModelFormat",
    "ModelHeader",
    "ModelRunnerError",
    "Permissions",
    "Probe",
    "ProcessObserver",
    "ProcessOptions",
    "ProgressCallback",
    "QuantizeSpec",
    "RequiredMemory",
    "RunSpec",
    "Sandbox",
    "ServiceCall",
    "Tensor",
    "Variant",
    "check_context",
    "default_context_size",
    "output_of",
    "read_object",
    "run",
    "scrubbed_environment",
]
