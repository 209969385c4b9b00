"""What the scheduler knows of a machine on which it can run models."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from modelrunner.engine.runner import Runner
from modelrunner.scheduler.devices import Device
from modelrunner.scheduler.state import RunnerId
from modelrunner.types import RequiredMemory, RunSpec


class Held(NamedTuple):
    """A runner of a host, and the bytes that count for it now."""

    runner: Runner
    memory: RequiredMemory


class Host(Protocol):
    """A machine with a memory of its own. The scheduler asks `budget` before each plan, `start` when a plan says so,
    `fetch` before the new runner runs, `kind` when memory is estimated or was measured. All of it is called from the
    event loop's thread, and what is not `async` returns at once."""

    name: str
    """Unique; "" for the machine of the daemon."""
    labels: Collection[str]
    """What it is labelled with, each as NAME=VALUE."""

    def budget(self, runners: Iterable[Held]) -> RequiredMemory | None:
        """Returns the bytes that all our runners there together may hold, of main memory and of each device; `runners`
        are those that it has now. It must not raise. None while the host does not answer: the plan does without it, and
        the `run` of each of its runners ends with `EngineFailed`, which names the host. The figure may be some seconds
        old."""

    def kind(self, devices: tuple[int, ...]) -> str:
        """Returns the kind of hardware of these devices, none for the processors alone. The memory that a run was
        measured to need on one kind counts on every host, and for all devices, of that kind."""

    def devices(self) -> tuple[Device, ...]:
        """Returns its devices with their last figures, in the order of the budget's."""

    def numbers(self, backend: str) -> tuple[int, ...] | None:
        """Returns the number in the budget of each device that the backend's engine has there, in the engine's order;
        None if they are those of the budget. A device that shares the main memory has the number -1."""

    def has(self, model_id: str) -> bool:
        """Returns True if the files of the model are there. A place where they are is preferred."""

    def joins(self, model_id: str, devices: Collection[int]) -> bool:
        """Returns True if a run of the model over several hosts may have these devices of it."""

    def lacks(self, backend: str) -> bool:
        """Returns True if the backend's engine is not there and cannot be had: no run of it is placed there."""

    def start(self, runner: RunnerId, spec: RunSpec, others: Sequence["Host"] = ()) -> Runner:
        """Makes the runner, which runs nothing yet: `Runner.run` also brings files there that are missing. If it runs
        over several hosts, the `others` are in the order of its memory; its `run` ends with `HostLost` when one of them
        does not answer. The host
        decides on the endpoint, the log and the permissions of its process. Raises `BackendNotFound`,
        `BackendUnavailable`, `ConfigurationError` where its folder cannot be made, `OSError` where no port can be
        had."""

    def log(self, runner: Runner, lines: int | None, ending: asyncio.Event | None) -> AsyncIterator[bytes]:
        """Yields the log of the runner's engine: its last `lines` lines, all of them for None. With `ending` it goes on
        as the log grows, until `ending` is set. A log that is not there is empty. The call itself raises
        `ModelRunnerError` if the host does not answer; the log of one that stops answering ends."""

    async def close(self) -> None:
        """Is called at the daemon's end, when no runner is left."""
