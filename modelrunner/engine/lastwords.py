"""Explains the end of an engine by the last lines of its log."""

import logging
import signal
from collections import deque
from collections.abc import Callable, Iterable

from modelrunner.backend import Backend, Configured, Diagnoses
from modelrunner.errors import (
    BackendExited,
    EngineFailed,
    EngineProtocolError,
    ModelRunnerError,
    OutOfMemory,
    TimedOut,
)
from modelrunner.plugins.isolation import call_backend, interface_of

log = logging.getLogger(__name__)

_KEPT_LINES = 50
_LINES = 3
_LONGEST = 400


def last_words(lines: Iterable[str]) -> str:
    """Returns the last three lines, joined to one of at most 400 characters that a terminal can print."""
    lines = [" ".join("".join(c if c.isprintable() else " " for c in line).split()) for line in lines]
    return " | ".join([line for line in lines if line][-_LINES:])[-_LONGEST:]


class LastWords:
    """The last log lines of one run of `model`. `oom_kills` counts the processes that the system has killed for want of
    memory.

    An engine may write what clients sent, and its explanation goes to other clients and into the daemon's log. Once the
    engine may have had requests, its words stay in its own log."""

    def __init__(self, backend: Backend, model: str, oom_kills: Callable[[], int]) -> None:
        self._backend = backend
        self._model = model
        self._oom_kills = oom_kills
        self._oom_kills_before = 0
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.health: str | None = "/health"

    def is_echo(self, line: str) -> bool:
        """Returns True for a log line that only our own health checks have caused. Such a line is neither progress nor
        a reason."""
        return self.health is not None and self.health in line

    def begin(self) -> None:
        """Is called before the engine starts."""
        self._oom_kills_before = self._oom_kills()

    def heard(self, line: str) -> None:
        """Takes a line of the log of an engine that starts."""
        self._lines.append(line)

    async def explain(self, error: Exception, stage: str, *, served: bool) -> ModelRunnerError:
        """Returns the `error` that ended the engine, with its last words explained. `stage` is the stage of its start,
        "" for an engine that was ready. `served` says whether it may have had requests."""
        match error:
            case BackendExited():
                killed = error.returncode == -signal.SIGKILL and self._oom_kills() > self._oom_kills_before
                what = "the engine was killed by the system because memory ran out" if killed else error.message
                starved = killed or await self._starved(error.tail)
                kind = OutOfMemory if starved else type(error)
                return kind(error.returncode, error.tail, message=await self._message(what, error.tail, stage, served))
            case TimedOut():
                return TimedOut(await self._message(error.message, "\n".join(self._lines), stage, served))
            case ModelRunnerError():
                return error
            case _:
                log.error("backend %s failed", self._backend.name, exc_info=error)
                return EngineFailed(f"the backend {self._backend.name} failed: {type(error).__name__}: {error}")

    async def _starved(self, tail: str) -> bool:
        diagnoses = interface_of(self._backend, Diagnoses)
        return diagnoses is not None and await call_backend(diagnoses.ran_out_of_memory, tail)

    async def _message(self, what: str, tail: str, stage: str, served: bool) -> str:
        when = f" while it was {stage}" if stage else ""
        what = _named(what, self._backend)
        diagnoses = interface_of(self._backend, Diagnoses)
        reason = await call_backend(diagnoses.explain, tail, not served) if diagnoses else None
        words = last_words(line for line in tail.splitlines() if not self.is_echo(line))
        if reason or not words:
            said = f"{what}{when}: {reason}" if reason else f"{what}{when}, without a word"
        else:
            said = f"{what}{when}: {_in_its_log(self._model) if served else words}"
        return await _placed(said, self._backend)


async def fault_of_answer(error: EngineProtocolError, backend: Backend, model: str = "") -> EngineProtocolError:
    """Returns the fault of an answer with the engine's name, where its last words are, and the place of its table.
    `model` is what its process here runs, "" for an engine without a log here."""
    said = _named(error.message, backend)
    return error.saying(await _placed(f"{said}; {_in_its_log(model)}" if model else said, backend))


def _named(what: str, backend: Backend) -> str:
    return what.replace("the engine", f"the engine {backend.name}", 1)


def _in_its_log(model: str) -> str:
    return f"`modelrunner logs {model}` shows its last words"


async def _placed(said: str, backend: Backend) -> str:
    configured = interface_of(backend, Configured)
    place = await call_backend(configured.written_at) if configured else ""
    return f"{said} (its table: {place})" if place else said
