"""A runner on this machine: its process, readiness, connections and end."""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, Protocol

from modelrunner import durable
from modelrunner.backend import Backend, Diagnoses, ExplainsErrors, SavesState, Sleeps
from modelrunner.concurrency import tasks
from modelrunner.concurrency.tasks import all_stopped, stopped
from modelrunner.concurrency.threads import REMOVING
from modelrunner.engine.abandoned import Abandoned
from modelrunner.engine.connections import UpstreamPool
from modelrunner.engine.excess import Excess, memory_limit
from modelrunner.engine.lastwords import LastWords, fault_of_answer
from modelrunner.engine.questions import fields_of, settled
from modelrunner.engine.readiness import PortTaken, Readiness, is_free
from modelrunner.engine.runner import LAST_CHANCE, EngineProcess
from modelrunner.engine.watchdog import Watchdog
from modelrunner.engineapi import OPENAI
from modelrunner.errors import EngineFailed, EngineProtocolError, ModelRunnerError
from modelrunner.plugins.isolation import call_backend, interface_of
from modelrunner.processes import peers
from modelrunner.processes.processtree import memory_of, oom_kills
from modelrunner.sandbox import Permissions, Sandbox
from modelrunner.types import Endpoint, Launch, RequiredMemory, RunnerKey, RunSpec, Served


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


log = logging.getLogger(__name__)
_Order = Callable[[RunSpec, Endpoint], Awaitable[None]]
_OwnedOrder = Callable[[RunSpec, Endpoint, str | None], Awaitable[None]]
_OTHER_PORTS = 5  # tried when one is taken


class OnDevices(Protocol):
    """What the processes of one engine hold of the machine's devices. Threads call it, for it asks drivers."""

    def begin(self) -> None:
        """Notes what the devices have before the engine takes memory of them."""

    def end(self) -> None:
        """Notes that the engine has given it back. Returns at once."""

    def held(self, pid: int, planned: Sequence[int]) -> tuple[int, ...]:
        """Returns the bytes that the engine `pid` holds of each device, where `planned` were expected; empty if nobody
        can tell."""


class LocalRunner:
    """A `Runner` whose engine is a child process of this daemon, under its guardian and in its sandbox.

    `process_phase` says how far the process is, `pid` is None before there is one and after it. `started` is in seconds
    of `clock`."""

    def __init__(
        self,
        backend: Backend,
        spec: RunSpec,
        key: RunnerKey,
        launch: Launch,
        *,
        id: str,
        folder: Path,
        stall_limit: float = 300.0,
        wedge_limit: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        oom_kills: Callable[[], int] = oom_kills,
        other_port: Callable[[], Endpoint] | None = None,
        on_devices: OnDevices | None = None,
    ) -> None:
        """`folder` is for the files of this run, such as its socket. The run makes and removes it. `other_port` chooses
        another endpoint if something else listens on the endpoint of an engine that starts. `on_devices` measures what
        the engine holds of devices."""
        self.id = id
        self.key = key
        self.served = Served(spec.bundle.name, key.backend, id)
        self.spec = spec
        self.process_phase = ProcessPhase.STARTING
        self._history = [ProcessPhase.STARTING]
        self.stage = "starting"
        self.process: EngineProcess | None = None
        self.started = clock()
        self.ready_at: float | None = None
        self.failure: ModelRunnerError | None = None
        self.owners: set[str] = set()
        self.api = OPENAI
        self.names: tuple[str, ...] | None = None
        self.upstream = UpstreamPool(launch.endpoint)
        self.abandoned = Abandoned(self._settled)
        self.sleep_level = 0  # from `Sleeps.sleep_level`, once it is ready
        self._launch = replace(launch, process=replace(launch.process, observer=_RunObserver(self)))
        self._backend = backend
        self._folder = folder
        self._on_devices = on_devices
        self._planned: tuple[int, ...] = ()  # bytes on each device
        self._clock = clock
        self._last_words = LastWords(backend, spec.bundle.name, oom_kills)
        self._changed: Callable[[], None] = lambda: None
        self._loaded_for: Callable[[], str | None] = lambda: ""
        self._readiness = Readiness(self.upstream, lambda: self.pid, stall_limit, clock)
        self._stall_limit = stall_limit
        self._watchdog = Watchdog(self.upstream, limit=wedge_limit, clock=clock)
        self._is_watched = wedge_limit > 0
        self._excess = Excess(folder)
        self._has_process = asyncio.Event()
        self._other_ports = [other_port] * _OTHER_PORTS if other_port else []

    @property
    def endpoint(self) -> Endpoint:
        return self.upstream.endpoint

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    @property
    def log_file(self) -> Path:
        return self._launch.process.log_path

    def __repr__(self) -> str:
        return f"<LocalRunner {self.id} {self.key} {' -> '.join(self._history)} pid={self.pid}>"

    async def run(self, changed: Callable[[], None], loaded_for: Callable[[], str | None] = lambda: "") -> NoReturn:
        """See `Runner`. An engine hangs that owes answers and shows no sign of life for `wedge_limit` seconds (0: for
        ever); a start that makes no progress for `stall_limit` seconds has failed. At the end nothing of the run is
        left, not even its folder."""
        self._changed, self._loaded_for = changed, loaded_for
        self.started = self._clock()
        self._last_words.begin()
        try:
            if os.path.lexists(self._folder):
                await self._remove_folder()
            self._folder.mkdir(mode=0o700)
            await self._learn_api()
            while True:
                try:
                    await self._keep_engine()
                except PortTaken as error:
                    if not self._other_ports:
                        self.failure = error
                        raise
                    self._move_to(self._other_ports.pop()())
        finally:
            self._end()
            await self._remove_folder()

    async def _learn_api(self) -> None:
        self.api = api = await call_backend(self._backend.api, self.spec)
        self._readiness.api, self._last_words.health = api, api.health
        known = (*self.spec.bundle.references, self.spec.model_id) if api.checks_model else None
        self.names = (api.model_name,) if api.model_name else known

    async def _keep_engine(self) -> NoReturn:
        """Starts the engine once and keeps it until it ends. Raises as `run` does, and `PortTaken`."""
        await self._take_devices()
        running = self._backend.run(self.spec, self._permitted())
        engine: asyncio.Task[Any] = asyncio.create_task(running, name=f"engine of runner {self.id}")
        excess = asyncio.create_task(self._watch_excess())
        excess.add_done_callback(lambda task: task.cancelled() or task.exception())  # the engine may have ended as well
        ended_by_itself = True
        try:
            await self._become_ready(engine, excess)
            await self._serve(engine, excess)
            await engine
            raise EngineFailed(f"the backend {self.key.backend} returned instead of keeping its engine")
        except asyncio.CancelledError:
            ended_by_itself = False
            saves = interface_of(self._backend, SavesState)
            if saves is not None and self.ready_at is not None and not engine.done():
                [owner] = self.owners if len(self.owners) == 1 else [None]
                await self._exchange(saves.before_stop, owner, "was not done with")
            raise
        except PortTaken:
            raise
        except Exception as error:  # whatever a backend raises, this runner has failed with it
            if engine.done() and self.process_phase is ProcessPhase.STARTING and not is_free(self.endpoint):
                raise PortTaken(f"port {self.endpoint.port} is taken by another process: try again") from error
            self.failure = await self._last_words.explain(error, self.stage, served=self.ready_at is not None)
            if self.failure is error:
                raise
            raise self.failure from error
        finally:
            excess.cancel()
            await stopped(engine, patience=LAST_CHANCE if ended_by_itself else None)

    async def request_error(self, status: int, message: str, fields: Mapping[str, Any]) -> ModelRunnerError | None:
        knows = interface_of(self._backend, ExplainsErrors)
        return await call_backend(knows.request_error, status, message, fields) if knows else None

    async def fault_of_answer(self, error: EngineProtocolError) -> EngineProtocolError:
        return await fault_of_answer(error, self._backend, self.spec.bundle.name)

    async def _settled(self) -> None:
        if self.api.settled is not None:
            await settled(self.endpoint, self.api.settled)

    async def sleep(self) -> None:
        self._watchdog.resting = True
        await self._ask("fall asleep", self._sleeper().sleep, self._launch.process.stop_grace)
        self._leave_devices()

    async def wake(self) -> None:
        self.stage = "waking up"
        await self._take_devices()
        await self._ask("wake up", self._sleeper().wake, self._stall_limit)
        self.stage, self._watchdog.resting = "", False

    def _sleeper(self) -> Sleeps:
        sleeper = interface_of(self._backend, Sleeps)
        if sleeper is None:
            raise EngineFailed(f"{self.key.backend} cannot sleep")
        return sleeper

    async def _ask(self, what: str, order: _Order, limit: float) -> None:
        try:
            async with asyncio.timeout(limit):
                await order(self.spec, self.endpoint)
        except TimeoutError:
            raise EngineFailed(f"the engine did not {what} within {limit:g} seconds") from None
        except Exception as error:  # as in `run`
            why = await self._last_words.explain(error, self.stage, served=self.ready_at is not None)
            raise EngineFailed(f"the engine did not {what}: {why}") from error

    def become(self, phase: ProcessPhase) -> None:
        """Changes the phase of the process. Raises `RuntimeError` with the history if the change is not allowed."""
        if phase not in NEXT[self.process_phase]:
            raise RuntimeError(f"{self!r} cannot become {phase}")
        self.process_phase = phase
        self._history.append(phase)
        self._changed()

    def mark_stopping(self) -> None:
        if self.process_phase is not ProcessPhase.STOPPING:
            self.become(ProcessPhase.STOPPING)

    async def memory(self) -> RequiredMemory | None:
        """See `Runner`. It measures in a thread: it scans every process of the machine, the kernel walks all of their
        pages, and drivers are slow. `shared` is the part that other runners of the model map, too."""
        return await asyncio.to_thread(self._measured, self.pid) if self.pid is not None else None

    def _measured(self, pid: int) -> RequiredMemory:
        memory = memory_of(pid)
        vram = self._on_devices.held(pid, self._planned) if self._on_devices is not None else ()
        return replace(memory, shared=min(memory.shared, self.spec.bundle.size), vram=vram)

    def expect(self, memory: RequiredMemory) -> None:
        self._planned = memory.vram
        self._excess.limit = memory_limit(memory)

    async def _take_devices(self) -> None:
        if self._on_devices is not None and any(self._planned):
            await asyncio.to_thread(self._on_devices.begin)

    def _leave_devices(self) -> None:
        if self._on_devices is not None and any(self._planned):
            self._on_devices.end()

    async def _watch_excess(self) -> NoReturn:
        await self._has_process.wait()
        assert self.pid is not None
        await self._excess.watch(self.pid)

    async def _become_ready(self, engine: "asyncio.Task[Any]", excess: "asyncio.Task[NoReturn]") -> None:
        """Returns when the engine is ready or has ended. Raises `EngineFailed` if it takes too much."""
        ready = asyncio.create_task(self._readiness.wait())
        try:
            await asyncio.wait([ready, engine, excess], return_when=asyncio.FIRST_COMPLETED)
            if engine.done():
                return
            if excess.done():
                await excess
            await ready
        finally:
            await stopped(ready)
        if (owner := self._loaded_for()) is not None:
            self.owners.add(owner)
        if saves := interface_of(self._backend, SavesState):
            await self._exchange(saves.after_ready, owner, "did not prepare")
        await self._learn_extras()
        if self.process_phase is ProcessPhase.STARTING and not engine.done():
            self.ready_at, self.stage = self._clock(), ""
            self.become(ProcessPhase.READY)

    async def _serve(self, engine: "asyncio.Task[Any]", excess: "asyncio.Task[NoReturn]") -> None:
        """Returns when the engine has ended. Raises `EngineFailed` once it has stopped serving, or takes too much."""
        watches: list[asyncio.Task[NoReturn]] = [excess]
        if self.pid is not None and self._is_watched:
            watches.append(asyncio.create_task(self._watchdog.watch(self.pid, self.api)))
        try:
            await asyncio.wait([engine, *watches], return_when=asyncio.FIRST_COMPLETED)
            if not engine.done():
                await next(watch for watch in watches if watch.done())
        finally:
            await all_stopped(*watches[1:])

    async def _exchange(self, order: _OwnedOrder, owner: str | None, failed: str) -> None:
        """Lets the backend speak with its living engine, for at most the grace of a stop."""
        try:
            async with asyncio.timeout(self._launch.process.stop_grace):
                await order(self.spec, self.endpoint, owner)
        except (OSError, ModelRunnerError) as error:  # a timeout is an OSError
            why = str(error) or "it took too long"
            log.warning("runner %s: %s %s its engine: %s", self.id, self.key.backend, failed, why)

    async def _learn_extras(self) -> None:
        """Asks a ready engine, or its backend, for what it can do besides. An engine without the extra serves as
        well, so a failure is only logged."""
        try:
            if sleeper := interface_of(self._backend, Sleeps):
                self.sleep_level = await call_backend(sleeper.sleep_level, self.spec)
            if self.api.fields is not None:
                self.api = self.api.reading(await fields_of(self.endpoint, self.api.fields))
        except (OSError, EngineProtocolError, ModelRunnerError) as error:
            log.error("the backend %s failed to say what its engine can do", self.key.backend, exc_info=error)

    def _permitted(self) -> Launch:
        """Returns the launch with the permissions for the runner's folder and port."""
        endpoint, process = self.endpoint, self._launch.process
        if process.permissions is not None:
            own = Permissions(writes=(self._folder,), port=endpoint.port)
            process = replace(process, permissions=own | process.permissions)
        return Launch(endpoint, process)

    def _process_started(self, pid: int, sandbox: Sandbox) -> None:
        self.process = EngineProcess(pid, sandbox)
        self._has_process.set()
        if self.endpoint.path is not None:
            peers.expected[self.endpoint.path] = peers.Expected(pid, self._excess.is_another)
        self._changed()

    def _process_said(self, line: str) -> None:
        if self.ready_at is not None or self._last_words.is_echo(line):
            return
        self._last_words.heard(line)
        self._readiness.heard(line)
        diagnoses = interface_of(self._backend, Diagnoses)
        stage = diagnoses.progress(line) if diagnoses else None
        if stage is not None and stage != self.stage:
            self.stage = stage
            self._changed()

    def _move_to(self, endpoint: Endpoint) -> None:
        log.warning("runner %s: port %s is taken by another process: trying another", self.id, self.endpoint.port)
        self.upstream.move(replace(endpoint, headers=self.endpoint.headers))
        self.process = None
        self._has_process.clear()

    def _end(self) -> None:
        self.process = None
        self._leave_devices()
        self.abandoned.end()
        self.upstream.close()
        if self.endpoint.path is not None:
            peers.expected.pop(self.endpoint.path, None)
        self.mark_stopping()

    async def _remove_folder(self) -> None:
        """Removes the folder in a thread: an engine may have put any number of files there."""
        removal = asyncio.wrap_future(REMOVING.submit(_remove, self._folder))
        await tasks.settled(removal)
        if removal.exception() is not None:  # no thread can be started
            _remove(self._folder)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:  # an engine has made folders of endless depth
        with suppress(OSError):
            durable.discard(folder)


class _RunObserver:
    """Keeps the runner's own callbacks out of its public names."""

    def __init__(self, runner: LocalRunner) -> None:
        self.started = runner._process_started
        self.output = runner._process_said
