"""The values about an engine's sandbox: the permissions of a run, and the report of the restrictions in force."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Permissions:
    """An engine's permissions beyond the minimum (docs/sandbox.md). `reads` are files, or folders with everything
    below, that it may read and execute; `writes` are folders or devices that it may change. `port` is the TCP port that
    it listens on, None if it listens on a Unix socket. `network`, `processes`, `affinity` and `scheduling` are reasons:
    with one, the engine may open connections, start processes, bind threads to processors by their IDs, or give threads
    the normal scheduling class by their IDs; "" forbids it.
    `asks_for_key` says that the engine on the port answers only requests with its endpoint's key.
    `private` are folders that stay closed, beside the home folder, where one of `reads` or the program's encloses
    them; `private_port` is a TCP port that stays closed also with `network`."""

    reads: tuple[Path, ...] = ()
    writes: tuple[Path, ...] = ()
    port: int | None = None
    network: str = ""
    processes: str = ""
    affinity: str = ""
    scheduling: str = ""
    private: tuple[Path, ...] = ()
    private_port: int | None = None
    asks_for_key: bool = False

    def __or__(self, other: "Permissions") -> "Permissions":
        return Permissions(
            self.reads + other.reads,
            self.writes + other.writes,
            other.port if self.port is None else self.port,
            self.network or other.network,
            self.processes or other.processes,
            self.affinity or other.affinity,
            self.scheduling or other.scheduling,
            self.private + other.private,
            other.private_port if self.private_port is None else self.private_port,
            self.asks_for_key or other.asks_for_key,
        )


NO_PERMISSIONS = Permissions()


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The restrictions in force for an engine. `layers` are the means, none if it is not confined; each of `gaps`
    describes in a sentence a missing restriction, and the reason."""

    layers: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """Returns "on", "partial" or "off"."""
        return ("partial" if self.gaps else "on") if self.layers else "off"

    def __str__(self) -> str:
        return "; ".join((f"{self.state} ({', '.join(self.layers)})" if self.layers else "off", *self.gaps))


NOT_CONFINED = Sandbox(gaps=("no restriction is in force: `sandbox` is off in the settings",))
