"""A local daemon that runs inference engines as supervised subprocesses behind one OpenAI-compatible endpoint.

docs/architecture.md says what lies where; `modelrunner.sdk` is what the author of a backend imports, and `Client`,
`AsyncClient` and `local` are for programs that use a daemon.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelrunner.client import AsyncClient, Client, local

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__", "local"]


def __getattr__(name: str) -> Any:
    """Imports the client once it is asked for: the daemon and the command line do without its HTTP library."""
    if name in ("AsyncClient", "Client", "local"):
        from modelrunner import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
