"""The values about an engine's sandbox: the permissions of a run, and the report of what holds."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Permissions:
    """What an engine may do beyond the minimum (docs/sandbox.md). `reads` are files, or folders with everything below,
    that it may read and execute; `writes` are folders or devices that it may change. `port` is the TCP port that it
    listens on, None if it listens on a Unix socket. `network`, `processes` and `affinity` are reasons: with one, the
    engine may open connections, start processes, or bind threads to processors by their IDs; "" forbids it.
    `private` are folders that stay closed, beside the home folder, where one of `reads` or the program's encloses
    them."""

    reads: tuple[Path, ...] = ()
    writes: tuple[Path, ...] = ()
    port: int | None = None
    network: str = ""
    processes: str = ""
    affinity: str = ""
    private: tuple[Path, ...] = ()

    def __or__(self, other: "Permissions") -> "Permissions":
        return Permissions(
            self.reads + other.reads,
            self.writes + other.writes,
            other.port if self.port is None else self.port,
            self.network or other.network,
            self.processes or other.processes,
            self.affinity or other.affinity,
            self.private + other.private,
        )


NO_PERMISSIONS = Permissions()


@dataclass(frozen=True, slots=True)
class Sandbox:
    """What holds for an engine. `layers` are the means that are in force, none where it is not confined; each of `gaps`
    says in a sentence what is not held, and why."""

    layers: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """ "on", "partial" or "off"."""
        return ("partial" if self.gaps else "on") if self.layers else "off"

    def __str__(self) -> str:
        return "; ".join((f"{self.state} ({', '.join(self.layers)})" if self.layers else "off", *self.gaps))


NOT_CONFINED = Sandbox(gaps=("nothing is held: `sandbox` is off in the settings",))
