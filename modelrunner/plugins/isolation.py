"""Keeps a backend from hurting any models but its own. Every call runs on a thread of the backend's own, has a limit in
time, and has its result checked.

The daemon uses an `IsolatedBackend` and never a `Backend`. A backend that raises, blocks, hangs or returns nonsense is
answered with a `BackendFaulty` that names it and the call. The event loop of the daemon never runs a backend's code.
"""

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import psutil

from modelrunner.backend import Backend, BackendState, BackendStatus, InstallProgress, ProgressCallback
from modelrunner.errors import BackendFaulty, ModelRunnerError
from modelrunner.plugins import checks
from modelrunner.plugins.thread import BackendThread, Late
from modelrunner.processtree import process_tree
from modelrunner.types import Bundle, Endpoint, Mode, ProcessObserver, RequiredMemory, RunSpec, Variant

log = logging.getLogger(__name__)
T = TypeVar("T")

ANSWER_LIMIT = 5.0
"""Seconds for a call that only computes: a status, a version, a check of flags."""
WORK_LIMIT = 60.0
"""Seconds for a call that may read a model's files or ask its engine: an estimate, the size of an installation."""
INSTALL_LIMIT = 4 * 3600.0
"""Seconds for an installation, which may compile an engine on a slow machine."""
KILL_AFTER = 5.0
"""Seconds beyond the grace of a stop."""
_LINES = 50  # of a log, that wait for the caller's loop


def _ignored(stage: str) -> None:
    pass


class IsolatedBackend:
    """What the daemon calls instead of `backend`. The methods mean what `Backend`'s mean; all are coroutines, raise
    what `Backend` allows them to raise, and `BackendFaulty` for everything else.

    `inline` runs the calls on the caller's own event loop: for tests on a loop whose time is not real.
    """

    def __init__(self, backend: Backend, *, inline: bool = False, answer_limit: float = ANSWER_LIMIT) -> None:
        self.backend = backend
        self.name = backend.name
        self.formats = backend.formats
        self.modes = backend.modes
        self.uses_tcp = backend.uses_tcp
        self.checks_model = backend.checks_model
        self.settings = backend.settings
        self.options_model = backend.options_model
        self._answer_limit = answer_limit
        self._thread = None if inline else BackendThread(f"backend {backend.name}")

    def __repr__(self) -> str:
        return f"<IsolatedBackend {self.name}>"

    def close(self) -> None:
        """Ends the backend's thread, as far as its code lets it. A thread that is stuck ends with the daemon."""
        if self._thread is not None:
            self._thread.stop()

    # about the backend and its engine

    async def status(self) -> BackendStatus:
        """Never raises: a backend that cannot say how it is gets the state `ERROR`."""
        try:
            return await self._checked("status", checks.instance(BackendStatus))
        except ModelRunnerError as error:
            return BackendStatus(BackendState.ERROR, error.message)

    async def version(self) -> str:
        return await self._checked("version", checks.instance(str))

    async def disk_usage(self) -> int:
        return await self._checked("disk_usage", checks.byte_count, limit=WORK_LIMIT)

    async def install(self, progress: ProgressCallback, **options: Any) -> None:
        await self._change("install", progress, options)

    async def update(self, progress: ProgressCallback, **options: Any) -> None:
        await self._change("update", progress, options)

    async def uninstall(self) -> None:
        await self._checked("uninstall", checks.nothing, limit=INSTALL_LIMIT)

    async def forget(self, model_id: str) -> None:
        await self._checked("forget", checks.nothing, model_id, limit=WORK_LIMIT)

    async def _change(self, method: str, progress: ProgressCallback, options: Mapping[str, Any]) -> None:
        loop = asyncio.get_running_loop()

        def relayed(step: InstallProgress) -> None:
            loop.call_soon_threadsafe(progress, checks.instance(InstallProgress)(step))

        await self._call(method, lambda: getattr(self.backend, method)(relayed, **options), INSTALL_LIMIT)

    # about a model

    async def priority(self, bundle: Bundle) -> float:
        return await self._checked("priority", checks.finite, bundle)

    async def default_context_size(self, bundle: Bundle) -> int:
        return await self._checked("default_context_size", checks.count, bundle)

    async def default_parallel(self, bundle: Bundle, mode: Mode) -> int:
        return await self._checked("default_parallel", checks.count, bundle, mode)

    async def check_flags(self, flags: tuple[str, ...], mode: Mode) -> None:
        await self._checked("check_flags", checks.nothing, flags, mode)

    async def fold_flags(self, flags: tuple[str, ...]) -> tuple[Mapping[str, int | None], tuple[str, ...]]:
        return await self._checked("fold_flags", checks.folded, flags)

    async def check(self, spec: RunSpec) -> None:
        await self._checked("check", checks.nothing, spec, limit=WORK_LIMIT)

    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        return await self._checked("required_memory", checks.memory, spec, limit=WORK_LIMIT)

    async def growth(self, spec: RunSpec) -> RequiredMemory:
        return await self._checked("growth", checks.memory, spec, limit=WORK_LIMIT)

    async def variants(self, spec: RunSpec, budget: RequiredMemory) -> Sequence[Variant]:
        return await self._checked("variants", checks.variants, spec, budget, limit=WORK_LIMIT)

    async def dry_run(self, spec: RunSpec) -> RequiredMemory | None:
        return await self._checked("dry_run", checks.optional(checks.memory), spec, limit=WORK_LIMIT)

    # around a run

    async def run(self, spec: RunSpec, endpoint: Endpoint, staged: Callable[[str], None] = _ignored) -> NoReturn:
        """Ends only by raising, as `Backend.run` does. The observer of `spec` is told on the caller's loop, `staged` of
        each stage that a log line announces. Processes of a run that does not end within the grace of its stop and
        `KILL_AFTER` seconds are killed."""
        relay = _Relay(self, spec.process.observer, staged)
        spec = replace(spec, process=replace(spec.process, observer=relay))
        patience = spec.process.stop_grace + KILL_AFTER
        await self._call("run", lambda: self.backend.run(spec, endpoint), None, patience, relay.kill)
        raise BackendFaulty(self.name, "run", "returned instead of keeping its engine")

    async def after_ready(self, spec: RunSpec, endpoint: Endpoint) -> None:
        await self._checked("after_ready", checks.nothing, spec, endpoint, limit=spec.process.stop_grace)

    async def before_stop(self, spec: RunSpec, endpoint: Endpoint) -> None:
        await self._checked("before_stop", checks.nothing, spec, endpoint, limit=spec.process.stop_grace)

    async def probe(self, spec: RunSpec) -> tuple[str, Mapping[str, Any]] | None:
        return await self._checked("probe", checks.optional(checks.probe), spec)

    async def work_done(self, spec: RunSpec, endpoint: Endpoint) -> float | None:
        return await self._checked("work_done", checks.optional(checks.finite), spec, endpoint)

    async def sleep_level(self, spec: RunSpec) -> int:
        return await self._checked("sleep_level", checks.sleep_level, spec)

    async def sleep(self, spec: RunSpec, endpoint: Endpoint) -> None:
        await self._checked("sleep", checks.nothing, spec, endpoint, limit=WORK_LIMIT)

    async def wake(self, spec: RunSpec, endpoint: Endpoint) -> None:
        await self._checked("wake", checks.nothing, spec, endpoint, limit=INSTALL_LIMIT)

    # from an engine's words: a fault here only costs the explanation

    async def explain(self, tail: str) -> str | None:
        return await self._or_none("explain", checks.optional(checks.instance(str)), tail)

    async def ran_out_of_memory(self, tail: str) -> bool:
        return bool(await self._or_none("ran_out_of_memory", checks.instance(bool), tail))

    async def _or_none(self, method: str, check: Callable[[Any], T], *args: object) -> T | None:
        try:
            return await self._checked(method, check, *args)
        except ModelRunnerError as error:
            log.warning("%s", error)
            return None

    # how a call is made

    async def _checked(self, method: str, check: Callable[[Any], T], *args: object, limit: float | None = None) -> T:
        limit = self._answer_limit if limit is None else limit
        result = await self._call(method, lambda: getattr(self.backend, method)(*args), limit)
        try:
            return check(result)
        except (TypeError, ValueError) as error:
            raise BackendFaulty(self.name, method, f"returned {_shown(result)}: {error}") from None

    async def _call(
        self,
        method: str,
        call: Callable[[], object],
        limit: float | None,
        patience: float = 0.0,
        abandon: Callable[[], None] = lambda: None,
    ) -> object:
        """The result of `call`, or of the awaitable that it returns. See `BackendThread.run` for the rest."""

        async def work() -> object:
            result = call()
            return await result if inspect.isawaitable(result) else result

        try:
            if self._thread is None:
                async with asyncio.timeout(limit):
                    return await work()
            return await self._thread.run(work, limit=limit, patience=patience, abandon=abandon)
        except (ModelRunnerError, asyncio.CancelledError):
            raise
        except Late as error:
            raise BackendFaulty(self.name, method, str(error)) from None
        except OSError as error:  # its engine or the disk: no fault in the code, so the log gets no traceback
            raise BackendFaulty(self.name, method, f"failed: {error}") from error
        except Exception as error:
            log.error("backend %s: %s failed", self.name, method, exc_info=error)
            raise BackendFaulty(self.name, method, f"raised {_shown(error)}") from error

    def stage_of(self, line: str) -> str | None:
        """What `Backend.progress` makes of a log line; None where it fails. Called on the backend's thread."""
        try:
            stage = self.backend.progress(line)
        except Exception:
            log.exception("backend %s: progress failed", self.name)
            return None
        return stage if isinstance(stage, str) else None


def _shown(value: object) -> str:
    """For a message, whatever the value's own code does."""
    try:
        return f"{value!r:.200}"
    except Exception:
        return f"an object of the class {type(value).__name__}"


class _Relay:
    """The observer of one run on the backend's thread: passes its news to the caller's loop, bundled, so that a flood
    of log lines costs the caller little."""

    def __init__(
        self, backend: IsolatedBackend, observer: ProcessObserver | None, staged: Callable[[str], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._stage_of = backend.stage_of
        self._observer = observer
        self._staged = staged
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._stages: deque[str] = deque(maxlen=_LINES)
        self._is_due = False
        self._pid: int | None = None

    def started(self, pid: int) -> None:
        self._pid = pid
        if self._observer is not None:
            self._tell(self._observer.started, pid)

    def output(self, line: str) -> None:
        self._lines.append(line)
        if stage := self._stage_of(line):
            self._stages.append(stage)
        if not self._is_due:
            self._is_due = True
            self._tell(self._pass_on)

    def kill(self) -> None:
        """Ends the engine over its backend's head."""
        if self._pid is not None:
            for process in process_tree(self._pid):
                with suppress(psutil.Error):
                    process.kill()

    def _pass_on(self) -> None:
        self._is_due = False
        while self._observer is not None and self._lines:
            self._observer.output(self._lines.popleft())
        while self._stages:
            self._staged(self._stages.popleft())

    def _tell(self, function: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed
            self._loop.call_soon_threadsafe(function, *args)
