"""Decides whether a ready engine still serves. An engine that owes answers, shows no sign of life for a while, and then
does not complete a single token has failed, whatever its `/health` says.

A sign of life is a byte of an answer (of a status below 500), work that the engine counts, or processor time: a
long prompt on a slow processor uses processor time for minutes before the first byte. An idle engine is not asked, and
while answers flow only counters are read.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn

from modelrunner.concurrency.beat import beat
from modelrunner.engine.connections import UpstreamPool
from modelrunner.engine.questions import work_done
from modelrunner.engineapi import OPENAI, EngineApi
from modelrunner.errors import EngineFailed, EngineProtocolError
from modelrunner.processes.processtree import Activity, activity_of
from modelrunner.types import Endpoint

log = logging.getLogger(__name__)

_LOOKS = 10  # looks in one limit
# A share of one processor. Far above what our own looks cost, and far below what driving a GPU does.
_BUSY = 0.01
_BUSY_READING = 1 << 20  # bytes
# An engine that waits for a hung GPU burns a processor for ever: after so many limits without a byte or any counted
# work that is no excuse any more.
_SPINNING = 10
_ASK_LIMIT, _PROBE_LIMIT = 5.0, 15.0  # seconds


@dataclass(frozen=True, slots=True)
class Silence:
    """The silence of an engine that owes an answer. `quiet` is the time of its last sign of life, `silent` the time of
    its last sign other than processor time, in seconds of a clock."""

    quiet: float
    silent: float

    def suspicious(self, now: float, limit: float, *, counts_work: bool) -> bool:
        """Returns True if it is time to ask the engine for a token. An engine without a work counter is trusted as long
        as it uses the processor."""
        return now - self.quiet >= limit or (counts_work and now - self.silent >= _SPINNING * limit)


@dataclass(frozen=True, slots=True)
class Sample:
    """The changes since the last look. `waiting` exchanges are under way now. `begun` is True if there were new ones,
    `answered` if bytes came, `worked` if counted work was done (None if the engine did not say), `busy` if the engine
    used the processor or the disk."""

    waiting: int
    begun: bool
    answered: bool
    worked: bool | None
    busy: bool


def after(before: Silence | None, look: Sample, now: float) -> Silence | None:
    """Returns the silence after a look, None while the engine owes no answer. It still owes the answer to a request
    that its client gave up without a byte: impatient clients must not hide an engine that serves no request. An engine
    that counts its work, and has no request waiting, is well."""
    if not look.waiting and (look.answered or look.worked is not None or not (before or look.begun)):
        return None
    if before is None or look.answered or look.worked:
        return Silence(now, now)
    return Silence(now, before.silent) if look.busy else before


class Watchdog:
    """Watches the engine of one runner. `upstream` has the connections that serve requests; the watchdog asks on
    others."""

    def __init__(
        self,
        upstream: UpstreamPool,
        *,
        limit: float,
        clock: Callable[[], float],
        activity: Callable[[int], Activity] = activity_of,
        work: Callable[[Endpoint, EngineApi], Awaitable[float | None]] = work_done,
    ) -> None:
        """`limit` is in seconds, above 0. `work` asks the engine for its counted work."""
        self._api = OPENAI
        self._served = upstream
        self._limit = limit
        self._probe_limit = min(_PROBE_LIMIT, limit)
        self._ask_limit = min(_ASK_LIMIT, limit / _LOOKS)
        self._clock = clock
        self._activity_of = activity
        self._work_done = work
        self.resting = False  # True while the engine sleeps: it owes nothing, and is not asked
        self._silence: Silence | None = None
        self._begun = self._answered = 0
        self._work: float | None = None
        self._activity, self._sampled = Activity(0.0, 0), clock()
        self._looked = clock()  # when the last look began: what came after it was not seen, and no silence either

    async def watch(self, pid: int, api: EngineApi) -> NoReturn:
        """Raises `EngineFailed` once the engine `pid` has stopped serving."""
        self._api = api
        self._begun, self._answered = self._served.begun, self._served.answered
        while True:
            await beat(self._limit / _LOOKS)
            if self.resting:
                self._silence = None
                continue
            await self._look(pid)
            if self._is_suspicious() and not await self._completes_a_token():
                await self._look(pid)  # it may have worked meanwhile, on what came before the probe
                if self._is_suspicious():
                    raise self._failure()

    def _is_suspicious(self) -> bool:
        counts = self._work is not None
        return self._silence is not None and self._silence.suspicious(self._looked, self._limit, counts_work=counts)

    def _failure(self) -> EngineFailed:
        assert self._silence is not None
        waited = self._clock() - self._silence.silent
        return EngineFailed(
            f"the engine stopped answering: nothing came of it for {waited:.0f} seconds, and it did not complete a "
            "single token when asked to"
        )

    async def _look(self, pid: int) -> None:
        self._looked = self._clock()
        begun, answered = self._served.begun - self._begun, self._served.answered - self._answered
        self._begun, self._answered = self._served.begun, self._served.answered
        waiting = self._served.waiting
        owing = bool(waiting or begun or self._silence) and not answered
        worked, busy = await self._ask(pid) if owing else (None, False)
        look = Sample(waiting, begun > 0, answered > 0, worked, busy)
        self._silence = after(self._silence, look, self._looked)

    async def _ask(self, pid: int) -> tuple[bool | None, bool]:
        """Returns two facts since the last call: if the engine did counted work (None if it does not say), and if it
        used the processor or the disk."""
        busy = self._is_busier(await asyncio.to_thread(self._activity_of, pid))
        try:
            async with asyncio.timeout(self._ask_limit):
                work = await self._work_done(self._served.endpoint, self._api)
        except (OSError, EngineProtocolError):
            return None, busy
        if work is None:
            return None, busy
        worked = self._work is not None and work != self._work
        self._work = work
        return worked, busy

    def _is_busier(self, activity: Activity) -> bool:
        before, self._activity = self._activity, activity
        passed, self._sampled = self._clock() - self._sampled, self._clock()
        return activity.cpu - before.cpu >= _BUSY * passed or activity.read - before.read >= _BUSY_READING

    async def _completes_a_token(self) -> bool:
        """Returns True if the engine completes a token, or if it has no probe. An engine all of whose
        sequences are taken lets a probe wait: that alone proves nothing, and the caller looks again."""
        probe = self._api.probe
        if probe is None:
            return True
        try:
            own = UpstreamPool(self._served.endpoint)  # a probe counts as no request
            status, _ = await own.fetch("POST", probe.path, probe.body, timeout=self._probe_limit)
        except (OSError, EngineProtocolError) as error:
            log.warning("an engine did not complete a token when asked to: %s", str(error) or "it took too long")
            return False
        if status < 500:
            self._silence = None
        return status < 500
