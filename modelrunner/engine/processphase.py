"""The phases of a runner's engine process, and the allowed changes between them."""

from collections.abc import Mapping
from enum import StrEnum


class ProcessPhase(StrEnum):
    """The phase of one process. (`Phase` in scheduler/state.py is that of the whole runner.)"""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"  # the process ends, or has ended


NEXT: Mapping[ProcessPhase, frozenset[ProcessPhase]] = {
    ProcessPhase.STARTING: frozenset({ProcessPhase.READY, ProcessPhase.STOPPING}),
    ProcessPhase.READY: frozenset({ProcessPhase.STOPPING}),
    ProcessPhase.STOPPING: frozenset(),
}
