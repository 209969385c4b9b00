"""Confines the faults of a backend to its own models: every call runs on a thread of the backend's own, has a time
limit, and has its result checked.

The daemon uses an `IsolatedBackend` in place of the backend itself. A backend that raises, blocks, hangs or returns
nonsense causes a `BackendFaulty` that names it and the call."""

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

import psutil

from modelrunner.backend import (
    OPTIONAL,
    Backend,
    BackendState,
    BackendStatus,
    Diagnoses,
    InstallProgress,
    ProgressCallback,
    Quantizes,
)
from modelrunner.engineapi import EngineApi
from modelrunner.errors import BackendFaulty, ModelRunnerError
from modelrunner.plugins import checks
from modelrunner.plugins.thread import BackendThread, CallTimeout
from modelrunner.processes.processtree import process_tree
from modelrunner.sandbox import Sandbox
from modelrunner.types import Endpoint, Launch, ProcessObserver, QuantizeSpec, RequiredMemory, RunSpec

log = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")

ANSWER_LIMIT = 5.0
"""Seconds for a call that only computes: a status, a version, a check of flags."""
WORK_LIMIT = 60.0
"""Seconds for a call that may read a model's files or ask its engine: an estimate, the size of an installation."""
INSTALL_LIMIT = 4 * 3600.0
"""Seconds for an installation, which may compile an engine on a slow machine."""
KILL_AFTER = 5.0
"""Seconds beyond the grace of a stop, after which the engine of a stuck backend is killed."""
_CHANGES = ("install", "update", "uninstall")
_RAISED = object()
COROUTINES = frozenset(
    name for kind in (Backend, *OPTIONAL) for name, method in vars(kind).items() if inspect.iscoroutinefunction(method)
)
KEPT_LINES = 50
"""Lines of a log that wait for the caller's loop; older ones are dropped."""


class IsolatedBackend(Backend):
    """`backend`, on a thread of its own. The methods are those of `Backend`, and of the optional interfaces that
    `backend` has (`interface_of`). They raise what those allow them to raise, and `BackendFaulty` for everything else.
    Methods that are no coroutines wait for the thread: call them in a worker thread, or through `call_backend` on an
    event loop."""

    def __init__(self, backend: Backend, *, answer_limit: float = ANSWER_LIMIT, work_limit: float = WORK_LIMIT) -> None:
        for name in Backend.__annotations__:
            if hasattr(backend, name):
                setattr(self, name, getattr(backend, name))
        self.context = backend.context
        self.settings = backend.settings
        self.backend = backend
        self._limit = answer_limit
        self._work_limit = work_limit
        self._thread = BackendThread(f"backend {backend.name}")
        self._stages: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<IsolatedBackend {self.name}>"

    def close(self, patience: float = 0.0) -> None:
        """Cancels the backend's work, and waits at most `patience` seconds for its thread to end. A stuck thread ends
        with the daemon."""
        self._thread.stop(patience)

    # about the backend and its engine

    def status(self) -> BackendStatus:
        """Never raises: a backend that fails here has the state `ERROR`."""
        try:
            return self._now("status", checks.instance(BackendStatus))
        except ModelRunnerError as error:
            return BackendStatus(BackendState.ERROR, error.message)

    async def disk_usage(self) -> int:
        return await self._checked("disk_usage", checks.byte_count)

    async def install(self, progress: ProgressCallback, **options: Any) -> None:
        await self._change("install", progress, options)

    async def update(self, progress: ProgressCallback, **options: Any) -> None:
        await self._change("update", progress, options)

    async def uninstall(self) -> None:
        await self._checked("uninstall", checks.nothing, limit=INSTALL_LIMIT)

    async def quantize(self, spec: QuantizeSpec, progress: ProgressCallback) -> None:
        relayed = self._relayed(progress)
        patience = spec.process.stop_grace + KILL_AFTER
        await self._on_thread("quantize", lambda: self._as(Quantizes).quantize(spec, relayed), INSTALL_LIMIT, patience)

    async def _change(self, method: str, progress: ProgressCallback, options: Mapping[str, Any]) -> None:
        relayed = self._relayed(progress)
        await self._on_thread(method, lambda: getattr(self.backend, method)(relayed, **options), INSTALL_LIMIT)

    def _relayed(self, progress: ProgressCallback) -> ProgressCallback:
        """Returns a function for the backend's thread, which calls `progress` on the caller's loop."""
        loop = asyncio.get_running_loop()

        def relayed(step: InstallProgress) -> None:
            loop.call_soon_threadsafe(progress, checks.instance(InstallProgress)(step))

        return relayed

    # about a model

    def api(self, spec: RunSpec) -> EngineApi:
        return self._now("api", checks.instance(EngineApi), spec)

    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        return await self._checked("required_memory", checks.memory, spec)

    # around a run

    async def run(self, spec: RunSpec, launch: Launch) -> NoReturn:
        """Ends only by raising, as `Backend.run` does. The observer of `launch` is called on the caller's loop. A run
        that does not end within the grace of its stop and `KILL_AFTER` seconds has its processes killed."""
        relay = RunRelay(self._announced, launch.process.observer)
        launch = replace(launch, process=replace(launch.process, observer=relay))
        patience = launch.process.stop_grace + KILL_AFTER
        await self._on_thread("run", lambda: self.backend.run(spec, launch), None, patience, relay.kill)
        raise BackendFaulty(self.name, "run", "returned instead of keeping its engine")

    def progress(self, line: str) -> str | None:
        """Returns the stage for a line that the observer of a run got; the backend itself was asked on its thread."""
        return self._stages.pop(line, None)

    def _announced(self, line: str) -> None:
        """Remembers the stage that a log line announces, for `progress`. Called on the backend's thread."""
        if not isinstance(self.backend, Diagnoses):
            return
        try:
            stage = self.backend.progress(line)
        except Exception:
            log.exception("backend %s: progress failed", self.name)
            return
        if isinstance(stage, str):
            if len(self._stages) >= KEPT_LINES:
                self._stages.clear()
            self._stages[line] = stage

    # how a call is made

    def _as(self, kind: type[T]) -> T:
        """Returns the backend, which has the optional interface `kind`."""
        assert isinstance(self.backend, kind)
        return self.backend

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns a call of a method of an optional interface."""
        if (call := _CALLS.get(name)) is None:
            raise AttributeError(f"a backend has no {name}", name=name, obj=self)
        return partial(self._awaited if name in COROUTINES else self._returned, name, call)

    async def _awaited(self, name: str, call: "_OptionalCall", *args: object) -> Any:
        return await self._checked(name, call.check, *args, limit=call.limit)

    def _returned(self, name: str, call: "_OptionalCall", *args: object) -> Any:
        try:
            return self._now(name, call.check, *args)
        except BackendFaulty as error:
            if call.otherwise is _RAISED:
                raise
            log.warning("%s", error)
            return call.otherwise

    def _now(self, method: str, check: Callable[[Any], T], *args: object) -> T:
        """Calls the method and waits for the thread."""
        with self._faults(method):
            result = self._thread.wait_for(_work(lambda: getattr(self.backend, method)(*args)), self._limit)
        return self._valid(method, check, result)

    async def _checked(self, method: str, check: Callable[[Any], T], *args: object, limit: float | None = None) -> T:
        result = await self._on_thread(method, lambda: getattr(self.backend, method)(*args), limit or self._work_limit)
        return self._valid(method, check, result)

    async def _on_thread(
        self,
        method: str,
        call: Callable[[], object],
        limit: float | None,
        patience: float = 0.0,
        abandon: Callable[[], None] = lambda: None,
    ) -> object:
        """Returns the result of `call`, or of the awaitable that it returns. `BackendThread.run` explains the
        parameters."""
        with self._faults(method):
            return await self._thread.run(_work(call), limit=limit, patience=patience, abandon=abandon)

    def _valid(self, method: str, check: Callable[[Any], T], result: object) -> T:
        try:
            return check(result)
        except (TypeError, ValueError) as error:
            raise BackendFaulty(self.name, method, f"returned {_shown(result)}: {error}") from None

    @contextmanager
    def _faults(self, method: str) -> Iterator[None]:
        """Turns exceptions that `Backend` does not allow into a `BackendFaulty`."""
        try:
            yield
        except ModelRunnerError:
            raise
        except CallTimeout as error:
            raise BackendFaulty(self.name, method, str(error)) from None
        except OSError as error:  # the engine or the disk failed, not the code: the log gets no traceback
            if method in _CHANGES and not isinstance(error, TimeoutError):
                raise  # the installer explains errors of the disk
            raise BackendFaulty(self.name, method, f"failed: {error}") from error
        except Exception as error:
            log.error("backend %s: %s failed", self.name, method, exc_info=error)
            raise BackendFaulty(self.name, method, f"raised {_shown(error)}") from error


@dataclass(frozen=True, slots=True)
class _OptionalCall:
    """A call of an optional method: the `check` of its result, its time limit in seconds (None: the usual one), and
    the result in place of a fault where only an explanation is missing then."""

    check: Callable[[Any], Any]
    limit: float | None = None
    otherwise: Any = _RAISED


_CALLS: Mapping[str, _OptionalCall] = {
    "priority": _OptionalCall(checks.finite),
    "version": _OptionalCall(checks.instance(str), otherwise=""),
    "models": _OptionalCall(checks.declared_models, otherwise=()),
    "endpoint": _OptionalCall(checks.instance(Endpoint)),
    "check_flags": _OptionalCall(checks.nothing),
    "fold_flags": _OptionalCall(checks.folded),
    "check": _OptionalCall(checks.nothing),
    "default_context_size": _OptionalCall(checks.count),
    "default_parallel": _OptionalCall(checks.count),
    "tunings": _OptionalCall(checks.several_flags, otherwise=()),
    "growth": _OptionalCall(checks.memory),
    "devices": _OptionalCall(checks.optional(checks.devices), limit=WORK_LIMIT),
    "variants": _OptionalCall(checks.variants),
    "explain": _OptionalCall(checks.optional(checks.instance(str)), otherwise=None),
    "ran_out_of_memory": _OptionalCall(checks.instance(bool), otherwise=False),
    "written_at": _OptionalCall(checks.instance(str), otherwise=""),
    "request_error": _OptionalCall(checks.optional(checks.instance(ModelRunnerError)), otherwise=None),
    "after_ready": _OptionalCall(checks.nothing, limit=INSTALL_LIMIT),  # the runner limits this one and the next
    "before_stop": _OptionalCall(checks.nothing, limit=INSTALL_LIMIT),
    "forget": _OptionalCall(checks.nothing),
    "sleep_level": _OptionalCall(checks.sleep_level),
    "sleep": _OptionalCall(checks.nothing),
    "wake": _OptionalCall(checks.nothing, limit=INSTALL_LIMIT),
}


def interface_of(backend: Backend, kind: type[T]) -> T | None:
    """Returns the backend as one with the optional interface `kind`, None if it has not."""
    has = isinstance(backend.backend if isinstance(backend, IsolatedBackend) else backend, kind)
    return cast("T", backend) if has else None


async def call_backend(method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a backend's method that is not a coroutine without blocking the caller's event loop. A backend that is not
    isolated, as in tests, is called at once."""
    if isinstance(getattr(getattr(method, "func", method), "__self__", None), IsolatedBackend):
        return await asyncio.to_thread(method, *args, **kwargs)
    return method(*args, **kwargs)


def _work(call: Callable[[], object]) -> Callable[[], Coroutine[Any, Any, object]]:
    async def work() -> object:
        result = call()
        return await result if inspect.isawaitable(result) else result

    return work


def _shown(value: object) -> str:
    """Returns text for a message, even if the value's own code fails."""
    try:
        return f"{value!r:.200}"
    except Exception:
        return f"an object of the class {type(value).__name__}"


class RunRelay:
    """The observer of one run on the backend's thread. It passes the news to the caller's loop in bundles, so that a
    flood of log lines costs the caller little. `announced` gets each line on the thread, before the caller does."""

    def __init__(self, announced: Callable[[str], None], observer: ProcessObserver | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._announced = announced
        self._observer = observer
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._is_due = False
        self._pid: int | None = None

    def started(self, pid: int, sandbox: Sandbox) -> None:
        self._pid = pid
        if self._observer is not None:
            self._tell(self._observer.started, pid, sandbox)

    def output(self, line: str) -> None:
        self._announced(line)
        self._lines.append(line)
        if not self._is_due:
            self._is_due = True
            self._tell(self._pass_on)

    def kill(self) -> None:
        """Kills the engine without its backend."""
        if self._pid is not None:
            for process in process_tree(self._pid):
                with suppress(psutil.Error):
                    process.kill()

    def _pass_on(self) -> None:
        self._is_due = False
        while self._observer is not None and self._lines:
            self._observer.output(self._lines.popleft())

    def _tell(self, function: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed
            self._loop.call_soon_threadsafe(function, *args)
