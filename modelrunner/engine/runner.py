"""What the rest of the daemon knows of a running engine, wherever it runs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol

from modelrunner.engine.abandoned import Abandoned
from modelrunner.engine.connections import UpstreamPool
from modelrunner.engineapi import EngineApi
from modelrunner.errors import EngineProtocolError, Misdirected, ModelRunnerError
from modelrunner.sandbox import Sandbox
from modelrunner.types import RequiredMemory, RunnerKey, RunSpec, Served

# Seconds that a failed engine gets to end by itself, so that its last words are seen: a process that crashes needs
# milliseconds, one that writes a core dump longer. A broken connection waits a quarter of it
# (gateway/exchange.py): there the client waits, and the usual end is at once.
LAST_CHANCE = 1.0


class EngineProcess(NamedTuple):
    """The process of an engine, to show it. Nothing is decided by it."""

    pid: int
    """On the host of the runner."""
    sandbox: Sandbox


class Runner(Protocol):
    """One run of one backend with one model, from its start until nothing of it is left. A host makes it
    (`Host.start`); the scheduler runs it once, reads its attributes after each `changed`, and adds to `owners`. All of
    it is used from the event loop's thread. Times are seconds of the host's `clock`.

    A runner that is not on this machine tells the same: `run` returns or raises when its host says so, or when its host
    does not answer any more."""

    id: str
    """Of the runner alone, for URLs and messages."""
    key: RunnerKey
    """What it was started for."""
    spec: RunSpec
    """What it runs."""
    served: Served
    """How the records of its requests name it."""
    names: tuple[str, ...] | None
    """The model's names for the engine, its own first; None if the engine takes any."""
    api: EngineApi
    """The interface of the engine, with the fields that it reads once it is ready."""
    upstream: UpstreamPool
    """The connections to the engine, or to what stands before it on its host."""
    abandoned: Abandoned
    """The requests that clients have left while the engine works on."""
    stage: str
    """The work of a start, in a few words; "" once it is ready."""
    ready_at: float | None
    """When it became ready; None before."""
    failure: ModelRunnerError | None
    """The error of an engine that has ended by itself, in a sentence with its last words."""
    owners: set[str]
    """The owner of each request that the engine may have seen (`SavesState.after_ready`)."""
    sleep_level: int
    """See `Sleeps.sleep_level`; 0 for an engine that cannot sleep, and before it is ready."""
    process: EngineProcess | None
    """None before there is a process, and after it."""

    async def run(self, changed: Callable[[], None], loaded_for: Callable[[], str | None] = lambda: "") -> NoReturn:
        """Starts the engine and keeps it until it ends or the caller is cancelled. It calls `changed` after every
        change of an attribute. `loaded_for` returns the owner for `SavesState.after_ready`.

        Raises `CancelledError` when stopped, `TimedOut` when it made no progress while starting, `BackendUnavailable`
        when it could not be executed, and `EngineFailed` when the engine ends by itself, hangs, or was on a host that
        is gone. By then nothing of the run is left on a host that answers."""

    def mark_stopping(self) -> None:
        """Records the decision to stop the engine. The caller cancels the task of `run` next."""

    def expect(self, memory: RequiredMemory) -> None:
        """Sets the memory that was planned for the engine: it is ended if it takes far more."""

    async def memory(self) -> RequiredMemory | None:
        """Measures the bytes that the engine holds, which takes milliseconds to seconds; None without a process, and
        where it cannot be measured. `vram` is empty if no driver tells. Never raises but `Unavailable`, if no thread
        can be had."""

    async def sleep(self) -> None:
        """Puts a ready engine without requests to sleep. Raises `ModelRunnerError` if that fails or takes longer than
        the grace of a stop; the engine is unusable then."""

    async def wake(self) -> None:
        """Wakes the engine. Raises as `sleep` does, after the longest time of a load without progress."""

    async def request_error(self, status: int, message: str, fields: Mapping[str, Any]) -> ModelRunnerError | None:
        """See `ExplainsErrors`."""

    async def fault_of_answer(self, error: EngineProtocolError) -> EngineProtocolError:
        """Returns the fault of an answer for the client: it names the engine, its log and its table."""


def check_model(runner: Runner, model_id: str) -> None:
    """Raises `Misdirected` for any model but the one that the runner has loaded."""
    if model_id != runner.spec.model_id:
        mine = runner.spec.bundle.name
        raise Misdirected(
            f"runner {runner.id} serves {mine} and no other model; ask /v1 without a runner for {model_id}",
            param="model",
        )
