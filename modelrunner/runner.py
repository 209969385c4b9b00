"""One run of one backend with one model: its state, its readiness, its connections, its end."""

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any, NoReturn

from modelrunner.backend import Backend
from modelrunner.errors import BackendExited, EngineFailed, Misdirected, ModelRunnerError, OutOfMemory, TimedOut
from modelrunner.processtree import memory_of, oom_kills
from modelrunner.readiness import Readiness, is_echo
from modelrunner.types import Endpoint, RequiredMemory, RunnerKey, RunSpec
from modelrunner.upstream import UpstreamPool
from modelrunner.watchdog import Watchdog

log = logging.getLogger(__name__)
_Order = Callable[[RunSpec, Endpoint], Awaitable[None]]
_KEPT_LINES = 50
_LAST_LINES = 3
_LAST_WORDS = 400
# Seconds that a failed engine gets to end by itself, so that its last words are seen: a process that crashes needs
# milliseconds, one that writes a core dump longer. A broken connection waits a quarter of it (proxy/exchange.py): there
# the client waits, and the usual end is at once.
LAST_CHANCE = 1.0


class RunnerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"  # its process ends, or has ended


_NEXT = {
    RunnerState.STARTING: {RunnerState.READY, RunnerState.STOPPING},
    RunnerState.READY: {RunnerState.STOPPING},
    RunnerState.STOPPING: set[RunnerState](),
}


class Runner:
    """Made by the scheduler, run once. Others read `state`, `stage` (what it is doing while it starts), `pid` (None
    without a process), `upstream`, `names` (those that its engine knows the model by, its own first; None if it takes
    any), `started` and `ready_at` (of `clock`, in seconds) and, once it has ended by itself, `failure`, whose message
    holds its explained last words."""

    def __init__(
        self,
        backend: Backend,
        spec: RunSpec,
        key: RunnerKey,
        *,
        id: str,
        endpoint: Endpoint,
        stall_limit: float = 300.0,
        wedge_limit: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        oom_kills: Callable[[], int] = oom_kills,
    ) -> None:
        self.id = id
        self.key = key
        self.endpoint = endpoint
        self.spec = replace(spec, process=replace(spec.process, observer=_Observer(self)))
        self.state = RunnerState.STARTING
        self.stage = "starting"
        self.pid: int | None = None
        self.started = clock()
        self.ready_at: float | None = None
        self.failure: ModelRunnerError | None = None
        self.names = (*spec.bundle.references, spec.model_id) if backend.checks_model else None
        self.upstream = UpstreamPool(endpoint)
        self.endpoints = backend.endpoints
        self.asked_as_streams = backend.asked_as_streams
        self.request_error = backend.request_error
        self._backend = backend
        self._clock = clock
        self._oom_kills = oom_kills
        self._oom_kills_before = 0
        self._changed: Callable[[], None] = lambda: None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._readiness = Readiness(self.upstream, stall_limit, clock)
        self._stall_limit = stall_limit
        self._watchdog = Watchdog(backend, self.spec, self.upstream, limit=wedge_limit, clock=clock)
        self._is_watched = wedge_limit > 0

    def __repr__(self) -> str:
        return f"<Runner {self.id} {self.key} {self.state} pid={self.pid}>"

    async def run(self, changed: Callable[[], None]) -> NoReturn:
        """Starts the engine and keeps it until it ends or the caller is cancelled; `changed` is called after every
        change of state or stage.

        Raises `CancelledError` when stopped, `EngineFailed` when the engine ends by itself, or owes answers and shows
        no sign of life for `wedge_limit` seconds (0: for ever), `TimedOut` when it made no progress for `stall_limit`
        seconds while starting, `BackendUnavailable` when it could not be executed. Nothing
        of it is left by then, the file of its socket included.
        """
        self._changed = changed
        self.started = self._clock()
        self._oom_kills_before = self._oom_kills()
        self._remove_socket()
        engine: asyncio.Task[Any]
        engine = asyncio.create_task(self._backend.run(self.spec, self.endpoint), name=f"engine of runner {self.id}")
        try:
            await self._become_ready(engine)
            await self._serve(engine)
            await engine
            raise EngineFailed(f"the backend {self.key.backend} returned instead of keeping its engine")
        except asyncio.CancelledError:
            if self.ready_at is not None and not engine.done():
                await self._let_go()
            raise
        except Exception as error:  # whatever a backend raises, this runner has failed with it
            self.failure = self._explained(error)
            if self.failure is error:
                raise
            raise self.failure from error
        finally:
            try:
                await _stopped(engine, patience=None if self.failure is None else LAST_CHANCE)
            finally:
                self._end()

    def check_model(self, model_id: str) -> None:
        """The guard: raises `Misdirected` for any model but the one that this runner has loaded."""
        if model_id != self.spec.model_id:
            mine = self.spec.bundle.name
            raise Misdirected(
                f"runner {self.id} serves {mine} and no other model; ask /v1 without a runner for {model_id}",
                param="model",
            )

    def check_request(self, path: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
        """As `Backend.check_request`."""
        return tuple(self._backend.check_request(self.spec, path, fields))

    @property
    def sleep_level(self) -> int:
        """As of `Backend.sleep_level`."""
        return self._backend.sleep_level(self.spec)

    async def sleep(self) -> None:
        """Has a ready engine without requests give back what it can. Raises `ModelRunnerError` where it fails or takes
        longer than the grace of a stop; the engine is of no use then."""
        self._watchdog.resting = True
        await self._ask("fall asleep", self._backend.sleep, self.spec.process.stop_grace)

    async def wake(self) -> None:
        """The same for a sleeping one, which is to be ready again within `stall_limit`."""
        self.stage = "waking up"
        await self._ask("wake up", self._backend.wake, self._stall_limit)
        self.stage, self._watchdog.resting = "", False

    async def _ask(self, what: str, order: _Order, limit: float) -> None:
        try:
            async with asyncio.timeout(limit):
                await order(self.spec, self.endpoint)
        except TimeoutError:
            raise EngineFailed(f"the engine did not {what} within {limit:g} seconds") from None
        except Exception as error:  # as in `run`
            raise EngineFailed(f"the engine did not {what}: {self._explained(error)}") from error

    def mark_stopping(self) -> None:
        """The decision to stop it has been made; its task is cancelled next."""
        if self.state is not RunnerState.STOPPING:
            self._move(RunnerState.STOPPING)

    def measured_memory(self) -> RequiredMemory | None:
        """What its processes hold of main memory; None without a process. Looks at every process of the machine:
        milliseconds. `shared` is the part that other runners of the model map too."""
        if self.pid is None:
            return None
        memory = memory_of(self.pid)
        return replace(memory, shared=min(memory.shared, self.spec.bundle.size))

    async def _become_ready(self, engine: "asyncio.Task[Any]") -> None:
        """Returns when it is ready or its engine has ended."""
        ready = asyncio.create_task(self._readiness.wait())
        try:
            await asyncio.wait([ready, engine], return_when=asyncio.FIRST_COMPLETED)
            if engine.done():
                return
            await ready
        finally:
            await _stopped(ready)
        await self._prepare()
        if self.state is RunnerState.STARTING and not engine.done():
            self.ready_at, self.stage = self._clock(), ""
            self._move(RunnerState.READY)

    async def _serve(self, engine: "asyncio.Task[Any]") -> None:
        """Until the engine has ended. Raises `EngineFailed` once it has stopped serving."""
        if self.pid is None or not self._is_watched:
            await asyncio.wait([engine])
            return
        watch = asyncio.create_task(self._watchdog.watch(self.pid))
        try:
            await asyncio.wait([watch, engine], return_when=asyncio.FIRST_COMPLETED)
            if not engine.done():
                await watch
        finally:
            await _stopped(watch)

    async def _prepare(self) -> None:
        """The backend's first exchange with its engine."""
        try:
            async with asyncio.timeout(self.spec.process.stop_grace):
                await self._backend.after_ready(self.spec, self.endpoint)
        except (OSError, ModelRunnerError) as error:  # a timeout is an OSError
            why = str(error) or "it took too long"
            log.warning("runner %s: %s did not prepare its engine: %s", self.id, self.key.backend, why)

    async def _let_go(self) -> None:
        """The backend's last exchange with its living engine, within the grace that a stop has."""
        try:
            async with asyncio.timeout(self.spec.process.stop_grace):
                await self._backend.before_stop(self.spec, self.endpoint)
        except (OSError, ModelRunnerError) as error:  # a timeout is an OSError
            why = str(error) or "it took too long"
            log.warning("runner %s: %s was not done with its engine: %s", self.id, self.key.backend, why)

    def _explained(self, error: Exception) -> ModelRunnerError:
        """`error`, with what the engine said about it."""
        match error:
            case BackendExited():
                killed = error.returncode == -signal.SIGKILL and self._oom_kills() > self._oom_kills_before
                what = "the engine was killed by the system because memory ran out" if killed else error.message
                starved = killed or self._backend.ran_out_of_memory(error.tail)
                kind = OutOfMemory if starved else type(error)
                return kind(error.returncode, error.tail, message=self._message(what, error.tail))
            case TimedOut():
                return TimedOut(self._message(error.message, "\n".join(self._lines)))
            case ModelRunnerError():
                return error
            case _:
                log.error("backend %s failed", self.key.backend, exc_info=error)
                return EngineFailed(f"the backend {self.key.backend} failed: {type(error).__name__}: {error}")

    def _message(self, what: str, tail: str) -> str:
        when = f" while it was {self.stage}" if self.stage else ""
        reason = self._backend.explain(tail) or last_words(tail)
        return f"{what}{when}: {reason}" if reason else f"{what}{when}, without a word"

    def _process_started(self, pid: int) -> None:
        self.pid = self._readiness.pid = pid
        self._changed()

    def _process_said(self, line: str) -> None:
        if self.ready_at is not None or is_echo(line):
            return
        self._lines.append(line)
        self._readiness.heard()
        stage = self._backend.progress(line)
        if stage is not None and stage != self.stage:
            self.stage = stage
            self._changed()

    def _move(self, state: RunnerState) -> None:
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"{self!r} cannot become {state}")
        self.state = state
        self._changed()

    def _end(self) -> None:
        self.pid = None
        self.upstream.close()
        self._remove_socket()
        self.mark_stopping()

    def _remove_socket(self) -> None:
        if self.endpoint.path:
            self.endpoint.path.unlink(missing_ok=True)


class _Observer:
    """Keeps the runner's own callbacks out of its public names."""

    def __init__(self, runner: Runner) -> None:
        self.started = runner._process_started
        self.output = runner._process_said


def last_words(tail: str) -> str:
    """The last lines of a log, in one line that a terminal can print."""
    told = [line for line in tail.splitlines() if not is_echo(line)]
    lines = [" ".join("".join(c if c.isprintable() else " " for c in line).split()) for line in told]
    return " | ".join([line for line in lines if line][-_LAST_LINES:])[-_LAST_WORDS:]


async def _stopped(task: "asyncio.Task[Any]", patience: float | None = None) -> None:
    """Cancels `task` and sees it end, whoever cancels the caller meanwhile: that is passed on, and raised after it.
    After `patience` seconds it is cancelled once more, which ends an engine at once."""
    cancelled = False
    while not task.done():
        task.cancel()
        try:
            await asyncio.wait([task], timeout=patience)
        except asyncio.CancelledError:
            cancelled = True
    if not task.cancelled():
        task.exception()
    if cancelled:
        raise asyncio.CancelledError
