"""The plug-in API of modelrunner: what a third-party backend imports, and nothing else.

A backend is a class derived from `Backend`, named by an entry point of group `modelrunner.backends`, that runs its
engine with `modelrunner.process.run`. docs/backends.md shows one on a page.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelrunner.backend import (
        Backend,
        BackendContext,
        BackendState,
        BackendStatus,
        InstallProgress,
        ProgressCallback,
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
    from modelrunner.types import (
        Bundle,
        Endpoint,
        Mode,
        ModelFormat,
        ModelHeader,
        ProcessObserver,
        ProcessOptions,
        RequiredMemory,
        RunSpec,
        Tensor,
        Variant,
    )

__version__ = "0.1.0"

_HOMES = {
    "modelrunner.backend": "Backend BackendContext BackendState BackendStatus InstallProgress ProgressCallback",
    "modelrunner.errors": "BackendExited BackendUnavailable BadRequest ContextTooLong InsufficientDisk InvalidModel "
    "ModelRunnerError",
    "modelrunner.types": "Bundle Endpoint Mode ModelFormat ModelHeader ProcessObserver ProcessOptions "
    "RequiredMemory RunSpec Tensor Variant",
}
__all__ = [
    "Backend",
    "BackendContext",
    "BackendExited",
    "BackendState",
    "BackendStatus",
    "BackendUnavailable",
    "BadRequest",
    "Bundle",
    "ContextTooLong",
    "Endpoint",
    "InstallProgress",
    "InsufficientDisk",
    "InvalidModel",
    "Mode",
    "ModelFormat",
    "ModelHeader",
    "ModelRunnerError",
    "ProcessObserver",
    "ProcessOptions",
    "ProgressCallback",
    "RequiredMemory",
    "RunSpec",
    "Tensor",
    "Variant",
]


def __getattr__(name: str) -> object:
    """Loaded on first use: the command line imports this package in every start and needs none of them."""
    from importlib import import_module

    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'modelrunner' has no attribute {name!r}")
