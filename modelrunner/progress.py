"""The progress of longer work: a pull, an installation, a load."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileProgress:
    """The received part of one file of a pull, in bytes. `id` is its digest, or its name while the digest is
    unknown; `rate` is in bytes per second."""

    id: str
    size: int
    current: int
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkProgress:
    """The progress of a pull, an installation or a load. `message` is for people; `phase` is one word, such as
    "downloading"; `total` and `current` are in bytes, 0 if unknown, `rate` in bytes per second. A `warning` holds
    regardless of later progress."""

    message: str
    phase: str = ""
    total: int = 0
    current: int = 0
    file: FileProgress | None = None
    rate: float = 0.0
    warning: bool = False


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The wait of a request: the `stage` of the load in a word or two, the `position` of its model among those that
    wait, and the seconds until the model is loaded, None if no load of it was measured. `position` is None for a
    request whose model is not resolved yet."""

    stage: str
    position: int | None = None
    expected_seconds: float | None = None


ProgressReport = Callable[[WorkProgress], None]


@dataclass(frozen=True, slots=True)
class RunningPull:
    """A pull under way: the `name` that the model gets, and the `source` text. `started` is in Unix seconds."""

    name: str
    source: str
    started: float
    progress: WorkProgress
